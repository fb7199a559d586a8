"""Collectives on copies of their tensors.

A thread of gloo's holds a collective's tensors a moment longer than the collective takes. If it is
the last to let go, no profiler sees the release, and the bytes would count as live for ever. So it
gets copies, which count as the network's (ledger_sites.py). NCCL has no such threads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "reduce",
    "reduce_scatter_tensor",
)
"""Those that the trainer and DeepSpeed call with large tensors."""


class Done:
    """What an asynchronous collective returns here: it is over already, which changes no byte of
    what is live."""

    def wait(self) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


def stage_collectives() -> None:
    """For this process, before DeepSpeed looks for the collectives that it calls."""
    for name in COLLECTIVES:
        setattr(distributed, name, staged(getattr(distributed, name)))
    distributed._broadcast_coalesced = one_by_one  # type: ignore[assignment, attr-defined]


def one_by_one(group: Any, tensors: list[torch.Tensor], _buffer_bytes: int, source: int) -> None:
    """What DDP tells the other ranks as it begins; its own way joins all tensors to one that gloo
    holds."""
    for tensor in tensors:
        distributed.broadcast(tensor, source, group=group)


def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, done with copies of its tensors, which are written back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        values = {name: replaced(value, copies) for name, value in kwargs.items()}
        work = collective(*replaced(args, copies), **values)
        if work is not None:
            work.wait()
        for tensor, copy in copies:
            tensor.detach().copy_(copy)
        return Done() if work is not None else None

    return call


def replaced(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """An argument with copies in place of tensors; which of which is added to `copies`."""
    if isinstance(value, torch.Tensor):
        copies.append((value, copied(value)))
        return copies[-1][1]
    return [replaced(part, copies) for part in value] if isinstance(value, (list, tuple)) else value


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the network."""
    return tensor.detach().clone()
