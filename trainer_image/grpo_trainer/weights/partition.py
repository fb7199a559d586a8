"""The part of a parameter that this rank holds, with and without ZeRO-3.

ZeRO-3 leaves a parameter of shape (0,) in the module and keeps the rank's share in `ds_tensor`: the proof, the
reference's sync and its checkpoint all work on that share, so that none of them needs a gather.
Facts of DeepSpeed 0.19: shares are equal ranges of the flattened parameter, the last one padded
(deepspeed/runtime/zero/partition_parameters.py, `_partition_param`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
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
    def whole(self) -> bool:
        """Whether these are all elements of the parameter."""
        return self.tensor.numel() == torch.Size(self.shape).numel()


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed ZeRO-3 manages the parameter."""
    return hasattr(parameter, "ds_tensor")


@contextmanager
def held(parameter: nn.Parameter) -> Iterator[Share]:
    """This rank's elements while inside, as with `gathered`: its partition under ZeRO-3, else all."""
    yield _partition(parameter) if is_partitioned(parameter) else _all(parameter)


@contextmanager
def gathered(parameter: nn.Parameter) -> Iterator[Share]:
    """All elements while inside, gathered under ZeRO-3. A collective there."""
    if is_partitioned(parameter):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield _all(parameter)
    else:
        yield _all(parameter)


def release(parameter: nn.Parameter) -> None:
    """Drops a gathered copy of a ZeRO-3 parameter, so that the next use gathers the partitions again.

    Persistent parameters (those below stage3_param_persistence_threshold) stay gathered between uses; a change of the
    partition alone would never reach them.
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


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP or a DeepSpeed engine."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def _all(parameter: nn.Parameter) -> Share:
    return Share(parameter.detach().view(-1), 0, tuple(parameter.shape))


def _partition(parameter: Any) -> Share:
    # All shares have one length; where it does not divide the parameter, the last ranks' shares end in padding, and a
    # parameter smaller than the world leaves some with nothing but padding: start is then the end.
    padded = parameter.ds_tensor.detach().view(-1)
    start = min(parameter.ds_zero_partition_rank * padded.numel(), parameter.ds_numel)
    elements = max(0, min(padded.numel(), parameter.ds_numel - start))
    return Share(padded[:elements], start, shape(parameter))
