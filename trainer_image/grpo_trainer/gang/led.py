"""One process works while others wait for it, for minutes or hours.

A collective would not do: it ends when its own time is up, which is made for steps. So those who wait ask the store
that the ranks met by whether it is done; that the work gets on, they hear as of all work (process/pulse.py).
"""

import itertools
import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..clock import SYSTEM_CLOCK
from . import ranks
from .placement import LOCAL_RANK_ENV

T = TypeVar("T")
POLL_SECONDS = 0.5
_numbers = itertools.count()
"""The calls so far; the same on all ranks, since each call is one of all of them."""


def by_main(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on all ranks. A collective; see by_leader."""
    return by_leader(0, action)


def by_node(action: Callable[[], T]) -> T:
    """Run `action` on each node's first rank; return its result on all ranks of the node. A collective."""
    return by_leader(ranks.rank() - int(os.environ.get(LOCAL_RANK_ENV, "0")), action)


def by_leader(leader: int, action: Callable[[], T]) -> T:
    """Runs `action` on the rank that is this one's leader, and waits for all leaders.

    Raises:
        TrainingError: of the class that the lowest failing leader raised, on all ranks.
    """
    if not dist.is_initialized():
        return action()
    name, leaders = f"led/{next(_numbers)}", sorted(set(ranks.gather(leader)))
    own_action = action if ranks.rank() == leader else None
    result = ranks.together(lambda: _lead(name, leaders, own_action))
    return ranks.gather(result)[leader]  # type: ignore[return-value]  # only who waits has None


def _lead(name: str, leaders: list[int], action: Callable[[], T] | None) -> T | None:
    store = dist.distributed_c10d._get_default_store()
    try:
        return action() if action else None
    finally:
        if action:
            store.set(f"{name}/{ranks.rank()}", "done")
        while not store.check([f"{name}/{leader}" for leader in leaders]):
            SYSTEM_CLOCK.sleep(POLL_SECONDS)
