"""Work that rank 0 does alone while all ranks wait for it, without being taken for a hang.

Every such piece of work has a deadline of its own. While it goes on, rank 0 tells the others so every few seconds: a
rank 0 that is gone or stuck tells nothing, and the watchdog's patience runs out as anywhere else.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import TrainingError
from ..gang import ranks

T = TypeVar("T")
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
