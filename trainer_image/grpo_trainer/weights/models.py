"""Loads what a plan names: the policy with its tokenizer, reward models, and a second copy for a
sharded reference.

Dtype, revision and adapter are decided here, and every rank provably means the same files.

Order: `GRPOConfig(...)` first. Under ZeRO-3 its DeepSpeed config (a weak global of transformers)
makes `from_pretrained` build the model inside `deepspeed.zero.Init`. Rank 0 reads the values, and
the others receive their partitions (transformers/integrations/deepspeed.py). Interface:
`load_policy(model, execution, adapter) -> LoadedModel`, `load_reward_model(reward) -> LoadedModel`;
LoRA is returned as `peft_config`, since TRL wraps the policy itself.

`spec.adapter` becomes PEFT's configuration once all modules that it names are found in the model.
PEFT fails without naming the field; where only some names are wrong, it trains the others and says
nothing.

The operator plans the next attempt by the shape of the loaded model: it reads no config.json, and a
declared size may be wrong.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.model import Architecture, ModelSpec
from grpo_api.spec.rewards import ModelReward
from grpo_api.spec.training import AdapterSpec

from ..hub.repositories import Hub, Repository
from ..runtime.errors import BadInput, DiskFailed, is_volume_away
from .checkpoint_files import open_weights
from .model_files import (
    Source,
    architecture_of_config,
    load_tokenizer,
    locate_model,
    require_pad_token,
    vocabulary_of,
)
from .proof import prove_weights

ALL_LINEAR = "all-linear"
"""PEFT's own word for every linear layer but the head."""
_ADAPTABLE = (nn.Linear, Conv1D, nn.Embedding)


def lora_config(adapter: AdapterSpec, model: PreTrainedModel) -> LoraConfig:
    """PEFT's config of `spec.adapter` for this model.

    Raises:
        BadInput: targetModules names what the model doesn't have, or what can't be adapted.
    """
    names = adapter.target_modules
    if names != [ALL_LINEAR]:
        problems = [
            f"[{position}]: {problem}" for position, problem in _target_problems(names, model)
        ]
        if problems:
            raise BadInput(
                f"spec.adapter.targetModules{'; '.join(problems)}. The model has "
                f"{', '.join(_adaptable_modules(model))}; "
                f"{ALL_LINEAR}, alone, means all linear layers but the head"
            )
    unread = unread_modules(model)
    excluded = [path for path, module in unread.items() if isinstance(module, _ADAPTABLE)]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
        exclude_modules=excluded or None,
    )


def unread_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that no text comes to, such as a vision tower, by their paths. What is trained
    of them has no gradient, for which DDP waits in vain."""
    if model.config.get_text_config() is model.config:
        return {}
    readers = [*model.get_decoder().modules(), model.get_output_embeddings()]
    is_read = {id(module) for module in readers}
    return {
        path: module
        for path, module in model.named_modules()
        if is_read.isdisjoint(map(id, module.modules()))
    }


def _read_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    unread = unread_modules(model)
    return {path: module for path, module in model.named_modules() if path not in unread}


def _target_problems(names: list[str], model: PreTrainedModel) -> Iterator[tuple[int, str]]:
    """Position and problem of each name that PEFT could not do what is meant by."""
    read_modules = _read_modules(model)
    for position, name in enumerate(names):
        # As PEFT finds them (tuners_utils.check_target_module_exists): the whole path or its last
        # parts.
        modules = [
            module for path, module in read_modules.items() if f".{path}".endswith(f".{name}")
        ]
        if not modules:
            yield position, f"no module is called {name!r}"
        elif any(module is model.get_output_embeddings() for module in modules):
            yield position, f"{name!r} is the head, whose adapter would never be trained"
        elif not all(isinstance(module, _ADAPTABLE) for module in modules):
            kind = type(modules[0]).__name__
            lack = "which has parts but no weights of its own to adapt"
            yield position, f"{name!r} is a {kind}, {lack}"


def _adaptable_modules(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of the modules that can have an adapter, each once, in the model's
    order."""
    head = model.get_output_embeddings()
    adaptable = [
        (path, module)
        for path, module in _read_modules(model).items()
        if isinstance(module, _ADAPTABLE)
    ]
    paths = [path for path, module in adaptable if module is not head]
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what belongs to it."""

    model: PreTrainedModel
    """The model, on the CPU or partitioned."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer, padding and truncating on the left, with a pad token."""
    source: Source
    """Where both came from."""
    peft_config: PeftConfig | None = None
    """The adapter to train; absent if all parameters are trained."""
    adapter: Path | None = None
    """Folder of the exported adapter that it begins with; absent for a fresh one."""

    @property
    def vocabulary(self) -> int | None:
        """As vocabulary_of."""
        return vocabulary_of(self.model.config)


def load_policy(
    model: ModelSpec, execution: ExecutionPlan, adapter: AdapterSpec, hub: Hub | None = None
) -> LoadedModel:
    """The policy of a plan in its dtype. A collective: all ranks must call it, after GRPOConfig was
    made.

    Raises:
        BadInput: the model is missing, damaged, incomplete or no causal language model, or lacks
            adapter.targetModules.
        Transient: the hub can't be asked now, or there is no room.
    """
    # GRPOConfig was made with the plan's DeepSpeed config.
    assert is_deepspeed_zero3_enabled() == (execution.zero_stage == 3)
    repository = Repository("model", model.name, model.revision, "model")
    source = locate_model(repository, execution.dtype, hub or Hub())
    policy = load_causal(source, model.trust_remote_code)
    for module in unread_modules(policy).values():
        module.requires_grad_(False)
    peft_config = lora_config(adapter, policy) if execution.method == "LoRA" else None
    tokenizer = load_tokenizer(source, model.trust_remote_code, model.chat_template)
    require_pad_token(tokenizer, policy.config, source.name)
    return LoadedModel(policy, tokenizer, source, peft_config)


def load_reward_model(
    reward: ModelReward, path: str = "rewards[0].model", hub: Hub | None = None
) -> LoadedModel:
    """The reward model at that path of the spec: with one label, frozen, in eval mode and proven. A
    collective, before GRPOConfig is made: under its ZeRO-3 config models load partitioned.

    Raises:
        BadInput: missing, damaged, incomplete or with another number of labels.
        Transient: the hub can't be asked now, or there is no room.
        WeightsDiffer: a rank holds other weights than its file.
    """
    assert not is_deepspeed_zero3_enabled()
    source = locate_model(
        Repository("model", reward.name, reward.revision, path), reward.dtype, hub or Hub()
    )
    model = _load(AutoModelForSequenceClassification, source, remote_code=False)
    if model.config.num_labels != 1:
        raise BadInput(
            f"reward model {source.name} has {model.config.num_labels} labels; a reward model has "
            "one"
        )
    tokenizer = load_tokenizer(source, remote_code=False)
    require_pad_token(tokenizer, model.config, source.name)
    model.config.pad_token_id = tokenizer.pad_token_id
    freeze(model)
    with open_weights(source.folder) as files:
        prove_weights(model, files, f"reward model {source.name}")
    return LoadedModel(model, tokenizer, source)


def load_causal(source: Source, remote_code: bool) -> PreTrainedModel:
    """A causal language model in the source's dtype, without dropout.

    Raises:
        BadInput: incomplete, or no such model.
        DiskFailed: its volume does not answer.
    """
    return without_dropout(_load(AutoModelForCausalLM, source, remote_code))


def without_dropout(model: M) -> M:
    """The model with every dropout probability at zero, so that policy and reference differ by
    their weights alone.

    TRL's disable_dropout finds nn.Dropout modules only; most architectures of transformers keep the
    probability as a plain number of their attention (`attention_dropout`), which made KLs in the
    thousands (TRL issue 3500).
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        numbers = [name for name, value in vars(module).items() if isinstance(value, float)]
        for name in numbers:
            if "drop" in name:
                setattr(module, name, 0.0)
    return model


def freeze(model: M) -> M:
    """The model without gradients and in eval mode, as a reference and a reward model must be."""
    return model.requires_grad_(False).eval()


def _load(architecture: Any, source: Source, remote_code: bool) -> PreTrainedModel:
    try:
        model, report = architecture.from_pretrained(
            source.folder,
            dtype=getattr(torch, source.dtype),
            trust_remote_code=remote_code,
            output_loading_info=True,
            # The report names them; transformers' own error says no name.
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        if is_volume_away(error):
            raise DiskFailed(f"model {source.name}: {error}") from error
        raise BadInput(
            f"model {source.name} can't be loaded by {architecture.__name__}: {error}"
        ) from error
    # What transformers does not check of a configuration fails where it is first used.
    except (ArithmeticError, AttributeError, IndexError, TypeError) as error:
        raise _no_such_model(architecture, source, error) from error
    except RuntimeError as error:
        if "negative dimension" in str(error):
            raise _no_such_model(architecture, source, error) from error
        # Under ZeRO-3 rank 0 alone raises this, and the report names no shapes.
        if not (sizes := re.findall(r"size mismatch for .*", str(error))):
            raise
        raise BadInput(
            f"model {source.name} has {len(sizes)} weights of other shapes than its config.json "
            f"says: {sizes[0]} Save it again with save_pretrained"
        ) from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, configured = mismatched[0]
        raise BadInput(
            f"model {source.name} has {len(mismatched)} weights of other shapes than its "
            f"config.json says, the first is {name}: {tuple(stored)}, not {tuple(configured)}; "
            "save it again with save_pretrained"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadInput(
            f"model {source.name} lacks {len(missing)} weights, the first is {missing[0]}; they "
            f"would be random. Is it a model for {architecture.__name__}?"
        )
    return cast(PreTrainedModel, model)


def _no_such_model(architecture: Any, source: Source, error: Exception) -> BadInput:
    """What is said of a configuration, or of a model's own code, that makes no model."""
    return BadInput(
        f"model {source.name} can't be made by {architecture.__name__} ({type(error).__name__}: "
        f"{error}); correct its config.json, or its own code"
    )


def architecture_of(model: PreTrainedModel) -> Architecture | None:
    """The shape that spec.model.architecture would say; None for what that has no words for.

    Widths are those of the loaded configuration; biases are those of the modules, as not every type
    follows what its file says of them.
    """
    shape = architecture_of_config(model.config)
    if shape is None:
        return None
    biases = {
        "attention_bias": shape.attention_bias and _has_bias(model, "q_proj"),
        "mlp_bias": _has_bias(model, "down_proj"),
    }
    return shape.model_copy(update=biases)


def _has_bias(model: nn.Module, projection: str) -> bool:
    return any(name.endswith(f".{projection}.bias") for name, _ in model.named_parameters())
