"""Finds the tensor of a checkpoint that belongs to a parameter of a model.

Names differ: tied parameters are saved under one of their names, PEFT prefixes and wraps, and some architectures are
saved in another form than they run in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from . import partition

_PEFT_PREFIX = "base_model.model."
_PEFT_WRAPPED = ".base_layer."
TRAINED_ADAPTER = "default"
"""PEFT's name of the adapter that is trained; its files leave it out."""


Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a checkpoint by its key."""


@dataclass(frozen=True, slots=True)
class TensorKey:
    """The place of a parameter's values in a checkpoint."""

    form: Literal["direct", "converted", "absent"]
    """direct: the tensor `name`; converted: in tensors of another form; absent: in no file (a fresh adapter)."""
    name: str = ""
    """Key in the files for direct; the parameter's name in the base model for converted."""


def keys_of(model: nn.Module, shapes: Shapes) -> dict[str, TensorKey]:
    """The key of every parameter of a model, in the model's order; a tied parameter counts once."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return {
        name: _key(aliases[id(parameter)], partition.shape(parameter), shapes)
        for name, parameter in partition.parameters_by_name(model).items()
    }


def _key(aliases: list[str], shape: tuple[int, ...], shapes: Shapes) -> TensorKey:
    for alias in aliases:
        for candidate in (alias, base_name(alias), adapter_key(alias)):
            if candidate and shapes.get(candidate) == shape:
                return TensorKey("direct", candidate)
    if adapter_key(aliases[0]):
        return TensorKey("absent")
    return TensorKey("converted", base_name(aliases[0]))


def adapter_key(name: str) -> str | None:
    """The key that PEFT's files have for a parameter of the trained adapter; None for one of the base."""
    parts = name.split(".")
    if TRAINED_ADAPTER not in parts:
        return None
    return ".".join(part for part in parts if part != TRAINED_ADAPTER)


def base_name(name: str) -> str:
    """A parameter's name in the base model, without what PEFT puts around it."""
    return name.removeprefix(_PEFT_PREFIX).replace(_PEFT_WRAPPED, ".")
