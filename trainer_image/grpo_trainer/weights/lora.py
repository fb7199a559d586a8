"""`spec.adapter` as PEFT's configuration, once it is sure that the model has the modules that it names.

PEFT fails without naming the field, or, where only some of the names are wrong, trains the others and says nothing.
"""

from collections.abc import Iterator

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_api.spec.training import AdapterSpec

from ..errors import BadInput

ALL_LINEAR = "all-linear"
"""PEFT's own word for every linear layer but the head."""
_ADAPTABLE = (nn.Linear, Conv1D, nn.Embedding)


def lora(adapter: AdapterSpec, model: PreTrainedModel) -> LoraConfig:
    """PEFT's config of `spec.adapter` for this model.

    Raises:
        BadInput: targetModules names what the model doesn't have, or what can't be adapted.
    """
    names = adapter.target_modules
    if names != [ALL_LINEAR]:
        problems = [f"[{position}]: {problem}" for position, problem in _problems(names, model)]
        if problems:
            raise BadInput(
                f"spec.adapter.targetModules{'; '.join(problems)}. The model has {', '.join(_adaptable(model))}; "
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
        # As PEFT finds them (tuners_utils.check_target_module_exists): the whole path or its last parts.
        found = [module for path, module in model.named_modules() if f".{path}".endswith(f".{name}")]
        if not found:
            yield position, f"no module is called {name!r}"
        elif any(module is model.get_output_embeddings() for module in found):
            yield position, f"{name!r} is the head, whose adapter would never be trained"
        elif not all(isinstance(module, _ADAPTABLE) for module in found):
            yield (
                position,
                f"{name!r} is a {type(found[0]).__name__}, which has parts but no weights of its own to adapt",
            )


def _adaptable(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of the modules that can have an adapter, each once, in the model's order."""
    head = model.get_output_embeddings()
    adaptable = [(path, module) for path, module in model.named_modules() if isinstance(module, _ADAPTABLE)]
    paths = [path for path, module in adaptable if module is not head]
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
