"""Parameters of a model as this rank holds them, their tensors in a checkpoint, and hashes of their
bytes.

ZeRO-3 leaves a parameter of shape (0,) in the module and keeps the rank's share in `ds_tensor`. The
proof, the reference's sync and its checkpoint all work on that share, so that none of them needs a
gather. In DeepSpeed 0.19 shares are equal ranges of the flattened parameter, the last one padded
(deepspeed/runtime/zero/partition_parameters.py, `_partition_param`).

Names in a checkpoint differ from the model's. Tied parameters are saved under one of their names,
and PEFT prefixes and wraps. Some architectures are saved in another form than they run in.

Ranks compare what they hold by exchanging 16 bytes a tensor, which messages can show. XXH3-128
(xxhash) is as fast as memory. Forged weights are no threat here, so it is as good as a
cryptographic hash. SHA-256 over the model would cost as much as loading it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash
from torch import nn


@dataclass(frozen=True, slots=True)
class Share:
    """Elements [start, stop) of a flattened parameter, as this rank holds them."""

    tensor: torch.Tensor
    """The elements, one dimension, without padding; memory of the parameter itself, not a copy."""
    start: int
    """Index of the first element in the whole flattened parameter."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    @property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.tensor.numel()

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the parameter."""
        return self.tensor.numel() == torch.Size(self.shape).numel()


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed ZeRO-3 manages the parameter."""
    return hasattr(parameter, "ds_tensor")


@contextmanager
def local_share(parameter: nn.Parameter) -> Iterator[Share]:
    """This rank's elements while inside, as with `gathered_share`: its partition under ZeRO-3, else
    all."""
    yield _partition(parameter) if is_partitioned(parameter) else _whole_share(parameter)


@contextmanager
def gathered_share(parameter: nn.Parameter) -> Iterator[Share]:
    """All elements while inside, gathered under ZeRO-3. A collective there."""
    if is_partitioned(parameter):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield _whole_share(parameter)
    else:
        yield _whole_share(parameter)


def release(parameter: nn.Parameter) -> None:
    """Drops a gathered copy of a ZeRO-3 parameter, so that the next use gathers the partitions
    again.

    Persistent parameters (those below stage3_param_persistence_threshold) stay gathered between
    uses; a change of the partition alone would never reach them.
    """
    managed: Any = parameter
    if is_partitioned(parameter) and managed.ds_status.name == "AVAILABLE":
        managed.partition()


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, a tied one under its first name."""
    return dict(model.named_parameters())


def shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, also while it is partitioned."""
    managed: Any = parameter
    return tuple(managed.ds_shape if is_partitioned(parameter) else parameter.shape)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside DDP or a DeepSpeed engine."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def _whole_share(parameter: nn.Parameter) -> Share:
    return Share(parameter.detach().view(-1), 0, tuple(parameter.shape))


def _partition(parameter: Any) -> Share:
    # All shares have one length; where it does not divide the parameter, the last ranks' shares end
    # in padding, and a parameter smaller than the world leaves some with nothing but padding: start
    # is then the end.
    padded = parameter.ds_tensor.detach().view(-1)
    start = min(parameter.ds_zero_partition_rank * padded.numel(), parameter.ds_numel)
    elements = max(0, min(padded.numel(), parameter.ds_numel - start))
    return Share(padded[:elements], start, shape(parameter))


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
    """direct: the tensor `name`; converted: in tensors of another form; absent: in no file (a fresh
    adapter)."""
    name: str = ""
    """Key in the files for direct; the parameter's name in the base model for converted."""


def tensor_keys(model: nn.Module, shapes: Shapes) -> dict[str, TensorKey]:
    """The key of every parameter of a model, in the model's order; a tied parameter counts once."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return {
        name: _key(aliases[id(parameter)], shape(parameter), shapes)
        for name, parameter in parameters_by_name(model).items()
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
    """The key that PEFT's files have for a parameter of the trained adapter; None for one of the
    base."""
    parts = name.split(".")
    if TRAINED_ADAPTER not in parts:
        return None
    return ".".join(part for part in parts if part != TRAINED_ADAPTER)


def base_name(name: str) -> str:
    """A parameter's name in the base model, without what PEFT puts around it."""
    return name.removeprefix(_PEFT_PREFIX).replace(_PEFT_WRAPPED, ".")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the size of an element in bytes."""


def fingerprint(tensor: torch.Tensor) -> str:
    """32 hex digits over the bytes of a tensor of any shape and dtype; copies a tensor from a GPU
    first."""
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data: Any = values.cpu().numpy()
    return xxhash.xxh3_128(data).hexdigest()


def is_bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and number of elements are the same bits: NaN equals itself,
    0.0 is not -0.0.

    Compared as the widest integers that their layout allows, which is six times as fast as byte by
    byte.
    """
    first = first.detach().contiguous().view(-1)
    second = second.detach().contiguous().view(-1)
    # A view as int64 needs whole integers, from an offset in the storage that is a multiple of
    # their size.
    offsets = [tensor.storage_offset() * tensor.itemsize for tensor in (first, second)]
    whole = all(size % 8 == 0 for size in (first.nbytes, second.nbytes, *offsets))
    integers = torch.int64 if whole else _INTEGERS[first.itemsize]
    return torch.equal(first.view(integers), second.view(integers))


def combined_fingerprint(fingerprints: Iterable[str]) -> str:
    """One fingerprint of many, in order."""
    return xxhash.xxh3_128("\n".join(fingerprints).encode()).hexdigest()
