"""Who am I among the ranks, and what do the others say.

With this, code that proves or agrees on something reads the same in one process and in a gang.
Nothing here imports torch: a process without it, such as a preflight, is alone.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..runtime.errors import TrainingError

T = TypeVar("T")


def _process_group() -> Any:
    """The module torch.distributed in a process that has joined a gang; None in one that is
    alone."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def is_alone() -> bool:
    """Whether this process has joined no process group."""
    return _process_group() is None


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
    failures = gather(failure)
    failed = [number for number, error in enumerate(failures) if error is not None]
    if failed:
        first = failures[failed[0]]
        raise type(first or TrainingError())(f"{rank_names(failed)}: {first}") from failure
    return result  # type: ignore[return-value]  # set wherever nothing failed


def rank_names(ranks: list[int]) -> str:
    """`rank 1` or `ranks 1, 3`, for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
