"""Runs work on one rank while the other ranks wait for it, for minutes or hours.

The ranks exchange a sign every PERIOD_SECONDS until the work is done. A leader whose process is
gone breaks the exchange, so the others end at once. A leader whose process hangs sends no sign, so
no rank has an event any more. Then the watchdog ends them all within its patience.

Work outside of stage Training shows its own progress, which process/heartbeat.py shares with the
ranks that wait. In stage Training only events of the own rank count, so such work passes `event`.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..runtime.errors import TrainingError
from . import ranks
from .placement import LOCAL_RANK_ENV

T = TypeVar("T")

PERIOD_SECONDS = 2.0
"""Less than half of the shortest guard.hangTimeoutSeconds."""


def run_on_rank0(work: Callable[[], T], event: Callable[[], None] = lambda: None) -> T:
    """Run `work` on rank 0 and return its result, which is small, on all ranks. A collective; see
    run_on_leader."""
    return run_on_leader(0, work, event)


def run_on_node_leader(work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each node and return its result on all ranks of the node. A
    collective."""
    return run_on_leader(ranks.rank() - int(os.environ.get(LOCAL_RANK_ENV, "0")), work)


def run_on_leader(
    leader: int, work: Callable[[], T], event: Callable[[], None] = lambda: None
) -> T:
    """Run `work` on the rank that leads this one, wait for all leaders, and return the result of
    the own leader.

    Args:
        leader: the rank that leads this one; a leader leads itself.
        work: called on the leaders, in the calling thread. It takes part in no collective.
        event: called on every rank every PERIOD_SECONDS until all leaders are done, on leaders in
            another thread.

    Raises:
        TrainingError: of the class that the lowest failing leader raised, on all ranks. A leader
            whose work raises anything else raises that itself.
    """
    leaders = sorted(set(ranks.gather(leader)))
    failure: TrainingError | None = None
    if ranks.rank() == leader:
        ends, failure = _lead(work, leaders, event)
    else:
        ends = _exchange_ends(leaders, lambda: None, event)
    # One process alone has no rank to name.
    if failure is not None and ranks.is_alone():
        raise failure
    failed = {leader: end.error for leader, end in ends.items() if end.error is not None}
    if failed:
        first = next(iter(failed.values()))
        raise type(first)(f"{ranks.rank_names(list(failed))}: {first}") from failure
    result: T = ends[leader].result
    return result


@dataclass(frozen=True, slots=True)
class _End:
    """How the work of a leader ended."""

    result: Any = None
    error: TrainingError | None = None


def _lead(
    work: Callable[[], Any], leaders: list[int], event: Callable[[], None]
) -> tuple[dict[int, _End], TrainingError | None]:
    """Work while another thread exchanges signs; how each leader ended, and the error of this one
    as it was raised."""
    is_done = threading.Event()
    own_end: _End | None = None
    failure: BaseException | None = None

    def next_end() -> _End | None:
        is_done.wait(PERIOD_SECONDS)
        return own_end

    # The work stays in this thread: the watchdog shows the main thread's stack, and a CUDA device
    # is a thread's.
    with ThreadPoolExecutor(1, "leader") as pool:
        exchange = pool.submit(_exchange_ends, leaders, next_end, event)
        try:
            own_end = _End(work())
        except BaseException as error:
            failure = error
            shown = TrainingError(f"{type(error).__name__}: {error}")
            own_end = _End(error=error if isinstance(error, TrainingError) else shown)
        is_done.set()
    if failure is not None and not isinstance(failure, TrainingError):
        raise failure
    return exchange.result(), failure


def _exchange_ends(
    leaders: list[int], next_end: Callable[[], _End | None], event: Callable[[], None]
) -> dict[int, _End]:
    """Exchange signs until all leaders are done; how each leader ended, by rank."""
    while True:
        gathered_ends = ranks.gather(next_end())
        event()
        ends = {leader: end for leader in leaders if (end := gathered_ends[leader]) is not None}
        if len(ends) == len(leaders):
            return ends
