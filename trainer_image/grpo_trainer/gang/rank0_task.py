"""Runs a task on one rank while the others wait for it, for minutes or hours.

A plain collective ends when its own time is up, which is made for steps. There are two ways to wait. With `by_leader`
the ranks that wait ask the store that the ranks met by whether the task is done; process/heartbeat.py shows them that
it makes progress. With `led` rank 0 tells the others every few seconds that it is at work: if it is gone or stuck, the
watchdog's patience runs out as anywhere else.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import TrainingError
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


PERIOD_SECONDS = 2.0
"""Less than half of the shortest guard.hangTimeoutSeconds."""


def led(work: Callable[[], T], event: Callable[[], None]) -> T:
    """Run `work` on rank 0 and return its result, which is small, on all ranks. A collective.

    Args:
        work: called on rank 0, in a thread.
        event: called on every rank every PERIOD_SECONDS while it goes on.

    Raises:
        TrainingError: as rank 0 raised it, on all ranks.
    """
    if ranks.rank() != 0:
        return cast(T, _told(_follow(event)))
    # In a thread, so that this one can tell the other ranks every few seconds that the work goes on.
    with ThreadPoolExecutor(1, "engines") as pool:
        future = pool.submit(work)
        while not wait([future], PERIOD_SECONDS).done:
            _tell(None)
            event()
    _tell(_end(future))
    event()
    return future.result()


def _follow(event: Callable[[], None]) -> tuple[Any, TrainingError | None]:
    while True:
        heard = _tell(None)
        event()
        if heard is not None:
            return cast(tuple[Any, TrainingError | None], heard)


def _told(end: tuple[Any, TrainingError | None]) -> Any:
    result, error = end
    if error is not None:
        raise error
    return result


def _tell(end: tuple[Any, TrainingError | None] | None) -> Any:
    """Rank 0's word for all; returns it."""
    word = [end]
    if ranks.world_size() > 1:
        dist.broadcast_object_list(word, src=0, device=torch.device("cpu"))
    return word[0]


def _end(future: Future[Any]) -> tuple[Any, TrainingError | None]:
    error = future.exception()
    if error is None:
        return future.result(), None
    return None, error if isinstance(error, TrainingError) else TrainingError(
        f"rank 0: {type(error).__name__}: {error}"
    )
