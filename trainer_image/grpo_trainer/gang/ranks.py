"""Who am I among the ranks, what do the others say, and what does one of them do for all.

With this, code that proves or agrees on something reads the same in one process and in a gang.
Nothing here imports torch: a process without it, such as a preflight, is alone.

One rank may work for minutes or hours while others wait for it. They exchange a sign every
PERIOD_SECONDS until the work is done. A leader whose process is gone breaks the exchange, so the
others end at once. A leader whose process hangs sends no sign, so no rank has an event any more.
Then the watchdog ends them all within its patience.

Work outside of stage Training shows its own progress, which process/heartbeat.py shares with the
ranks that wait. In stage Training only events of the own rank count, so such work passes `event`.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..runtime.errors import TrainingError

T = TypeVar("T")

PERIOD_SECONDS = 2.0
"""Less than half of the shortest guard.hangTimeoutSeconds."""


def _process_group() -> Any:
    """The module torch.distributed in a process that has joined a gang; None in one that is
    alone."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def world_size() -> int:
    """Number of training processes; 1 without a process group."""
    group = _process_group()
    size: int = group.get_world_size() if group else 1
    return size


def rank() -> int:
    """Global rank of this process; 0 without a process group."""
    group = _process_group()
    number: int = group.get_rank() if group else 0
    return number


def gather(value: T) -> list[T]:
    """Every rank's value, by rank. A collective: all ranks must call it."""
    values = [value] * world_size()
    group = _process_group()
    if group:
        group.all_gather_object(values, value)
    return values


def any_rank(value: bool) -> bool:
    """Whether it holds on any rank. A collective, of one number: cheap enough for every step,
    unlike `gather`."""
    group = _process_group()
    if not group:
        return value
    import torch

    count = torch.tensor(int(value))
    group.all_reduce(count)
    return bool(count)


def run_on_all(action: Callable[[], T], shared: type[TrainingError] = TrainingError) -> T:
    """Runs `action` on every rank; where it fails on any, every rank raises that error, naming the
    ranks.

    Without this a rank that fails alone leaves the others waiting in their next collective. A
    collective itself; errors that are not of the `shared` class must be raised on all ranks alike.

    Raises:
        TrainingError: of the class that the lowest failing rank raised.
    """
    result: T | None = None
    failure: TrainingError | None = None
    # only known ends are shared: any other exception ends this process, and its peers learn of it
    # by their connections
    try:
        result = action()
    except shared as error:
        failure = error
    _raise_first(dict(enumerate(gather(failure))), failure)
    return result  # type: ignore[return-value]  # set wherever nothing failed


def rank_names(ranks: list[int]) -> str:
    """`rank 1` or `ranks 1, 3`, for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _raise_first(errors: Mapping[int, TrainingError | None], own: TrainingError | None) -> None:
    """Raise the error of the lowest rank that has one, naming all that have; `own` is its cause."""
    failed = {number: error for number, error in errors.items() if error is not None}
    if failed:
        first = next(iter(failed.values()))
        raise type(first)(f"{rank_names(list(failed))}: {first}") from own


def run_on_rank0(work: Callable[[], T], event: Callable[[], None] = lambda: None) -> T:
    """Run `work` on rank 0 and return its result, which is small, on all ranks. A collective; see
    run_on_leader."""
    return run_on_leader(0, work, event)


def run_on_node_leader(work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each node and return its result on all ranks of the node. A
    collective."""
    group = _process_group()
    local_rank = group.get_node_local_rank(fallback_rank=0) if group else 0
    return run_on_leader(rank() - local_rank, work)


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
    leaders = sorted(set(gather(leader)))
    failure: TrainingError | None = None
    if rank() == leader:
        ends, failure = _lead(work, leaders, event)
    else:
        ends = _exchange_ends(leaders, lambda: None, event)
    # One process alone has no rank to name.
    if failure is not None and _process_group() is None:
        raise failure
    _raise_first({number: end.error for number, end in ends.items()}, failure)
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
        gathered_ends = gather(next_end())
        event()
        ends = {leader: end for leader in leaders if (end := gathered_ends[leader]) is not None}
        if len(ends) == len(leaders):
            return ends
