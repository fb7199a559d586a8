"""Loads what a plan names: the policy with its tokenizer, reward models, and a second copy for a
sharded reference.

Dtype, revision and adapter are decided here, and every rank provably means the same files.

Order: `GRPOConfig(...)` first. Under ZeRO-3 its DeepSpeed config (a weak global of transformers)
makes `from_pretrained` build the model inside `deepspeed.zero.Init`: rank 0 reads the values, the
others receive their partitions (transformers/integrations/deepspeed.py). Interface:
`load_policy(model, execution, adapter) -> LoadedModel`, `load_reward_model(reward) -> LoadedModel`;
LoRA is returned as `peft_config`, since TRL wraps the policy itself.

`spec.adapter` becomes PEFT's configuration once all modules that it names are found in the model.
PEFT fails without naming the field; where only some names are wrong, it trains the others and says
nothing.

The operator plans the next attempt by the shape of the loaded model: it reads no config.json, and a
declared size may be wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from peft import LoraConfig, PeftConfig
from pydantic import ValidationError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.model import Architecture, ModelSpec
from grpo_api.spec.rewards import ModelReward
from grpo_api.spec.training import AdapterSpec

from ..gang import ranks
from ..hub.repositories import Fetch, Hub, Repository
from ..runtime.errors import BadInput, TrainingError
from .checkpoint_files import ADAPTER, WHOLE, open_weights, shards
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
        problems = [f"[{position}]: {problem}" for position, problem in _problems(names, model)]
        if problems:
            raise BadInput(
                f"spec.adapter.targetModules{'; '.join(problems)}. The model has "
                f"{', '.join(_adaptable(model))}; "
                f"{ALL_LINEAR}, alone, means all linear layers but the head"
            )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
    )


def _problems(names: list[str], model: PreTrainedModel) -> Iterator[tuple[int, str]]:
    """Position and problem of each name that PEFT could not do what is meant by."""
    for position, name in enumerate(names):
        # As PEFT finds them (tuners_utils.check_target_module_exists): the whole path or its last
        # parts.
        found = [
            module for path, module in model.named_modules() if f".{path}".endswith(f".{name}")
        ]
        if not found:
            yield position, f"no module is called {name!r}"
        elif any(module is model.get_output_embeddings() for module in found):
            yield position, f"{name!r} is the head, whose adapter would never be trained"
        elif not all(isinstance(module, _ADAPTABLE) for module in found):
            yield (
                position,
                (
                    f"{name!r} is a {type(found[0]).__name__}, which has parts but no weights of "
                    "its "
                    "own to adapt"
                ),
            )


def _adaptable(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of the modules that can have an adapter, each once, in the model's
    order."""
    head = model.get_output_embeddings()
    adaptable = [
        (path, module) for path, module in model.named_modules() if isinstance(module, _ADAPTABLE)
    ]
    paths = [path for path, module in adaptable if module is not head]
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))


MODEL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", WHOLE, ADAPTER]
"""What is fetched of a hub repository: configuration, tokenizer, remote code and weights; and the
shards of an index. No pickles, and none of the copies in other formats that lie beside
(`consolidated.safetensors`, `onnx/`)."""

Dtype = Literal["bfloat16", "float32"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Source:
    """The files that a model was loaded from."""

    name: str
    """Hub id or folder, as the plan names it."""
    folder: Path
    """Where the files lie on this node."""
    revision: str
    """Commit on the hub; empty for a folder."""
    dtype: Dtype
    """Dtype that the weights were cast to."""


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
    if is_deepspeed_zero3_enabled() != (execution.zero_stage == 3):
        raise TrainingError(
            "make GRPOConfig with the plan's DeepSpeed config before loading the policy"
        )
    repository = Repository("model", model.name, model.revision, "model")
    source = locate_model(repository, execution.dtype, hub or Hub())
    policy = load_causal(source, model.trust_remote_code)
    peft_config = lora_config(adapter, policy) if execution.method == "LoRA" else None
    return LoadedModel(policy, load_tokenizer(source, model.trust_remote_code), source, peft_config)


def load_reward_model(
    reward: ModelReward, path: str = "rewards[0].model", hub: Hub | None = None
) -> LoadedModel:
    """The reward model at that path of the spec: with one label, frozen, in eval mode and proven. A
    collective.

    Raises:
        BadInput: missing, damaged, incomplete or with another number of labels.
        Transient: the hub can't be asked now, or there is no room.
        WeightsDiffer: a rank holds other weights than its file.
    """
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
    model.config.pad_token_id = tokenizer.pad_token_id
    freeze(model)
    with open_weights(source.folder) as files:
        prove_weights(model, files, f"reward model {source.name}")
    return LoadedModel(model, tokenizer, source)


def load_causal(source: Source, remote_code: bool) -> PreTrainedModel:
    """A causal language model in the source's dtype, without dropout.

    Raises:
        BadInput: incomplete, or no such model.
    """
    return without_dropout(_load(AutoModelForCausalLM, source, remote_code))


def load_tokenizer(source: Source, remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model; a missing pad token becomes the end-of-sequence token.

    Raises:
        BadInput: the folder has none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder,
            padding_side="left",
            truncation_side="left",
            trust_remote_code=remote_code,
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"model {source.name} has no usable tokenizer: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast(PreTrainedTokenizerBase, tokenizer)


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


def locate_model(repository: Repository, dtype: Dtype, hub: Hub) -> Source:
    """The folder of a model, with every weight file checked to be there and whole. A collective.

    Raises:
        BadInput: not found, or a file is missing, truncated or damaged.
        Transient: the hub can't be asked now, or there is no room.
    """
    folder = Path(repository.name)
    if folder.is_absolute() or any(ranks.gather(folder.is_dir())):
        commit = ranks.run_on_all(lambda: _mounted(repository))
    else:
        folder, commit = hub.snapshot(repository, _download)
    return ranks.run_on_all(lambda: _checked(Source(repository.name, folder, commit, dtype)))


def _mounted(repository: Repository) -> str:
    """A folder has no commit; it has to be there."""
    if not Path(repository.name).is_dir():
        where = f"spec.{repository.path}"
        raise BadInput(
            f"{where}.name: folder {repository.name} does not exist in the pod; mount it with "
            f"{where}.volume"
        )
    return ""


def _download(fetch: Fetch) -> Path:
    """The repository's snapshot with the one set of weights that `open_weights` reads."""
    folder = fetch(MODEL_FILES)
    if not (folder / WHOLE).exists() and (listed := shards(folder)):
        fetch([escape(shard) for shard in listed])
    return folder


def _checked(source: Source) -> Source:
    open_weights(source.folder)
    return source


def _load(architecture: Any, source: Source, remote_code: bool) -> PreTrainedModel:
    try:
        model, report = architecture.from_pretrained(
            source.folder,
            dtype=getattr(torch, source.dtype),
            trust_remote_code=remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"model {source.name} can't be loaded by {architecture.__name__}: {error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadInput(
            f"model {source.name} lacks {len(missing)} weights, the first is {missing[0]}; they "
            "would be random. "
            f"Is it a model for {architecture.__name__}?"
        )
    return cast(PreTrainedModel, model)


def architecture_of(model: PreTrainedModel) -> Architecture | None:
    """The shape that spec.model.architecture would say; None for what that has no words for.

    Widths are those of the loaded configuration, where transformers has filled in what the file
    left out; biases are those of the modules, as not every type heeds what its file says of them.
    """
    config = model.config
    if getattr(config, "text_config", None) is not None or not _alike(config):
        return None
    try:
        experts = int(_own(config, "num_local_experts") or _own(config, "num_experts") or 0)
        heads = config.num_attention_heads
        intermediate_size = _own(config, "moe_intermediate_size") or config.intermediate_size
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        experts_per_token = config.num_experts_per_tok if experts else 0
        return Architecture(
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size,
            attention_heads=heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            attention_bias=_has_bias(model, "o_proj"),
            mlp_bias=_has_bias(model, "down_proj"),
            experts=experts,
            experts_per_token=experts_per_token,
            **_window(config),
        )
    except (AttributeError, TypeError, ValidationError):
        return None


def _alike(config: Any) -> bool:
    """Whether all layers have the same feed-forward part."""
    return (
        not getattr(config, "mlp_only_layers", None)
        and getattr(config, "decoder_sparse_step", 1) == 1
    )


def _own(config: Any, name: str) -> Any:
    """A setting that the model's type has; a file may carry others' along. None where it has it
    not."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def _has_bias(model: nn.Module, projection: str) -> bool:
    return any(name.endswith(f".{projection}.bias") for name, _ in model.named_parameters())


def _window(config: Any) -> dict[str, int]:
    """The window of local attention and how many layers have none; empty when all layers attend to
    everything."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    full = list(kinds).count("full_attention") if kinds else 0
    if not window or full == config.num_hidden_layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": full}
