"""Values over time, minute by minute, and how they are written for promtool.

Small pieces that a story is put together from.
"""

import math
from collections.abc import Callable, Iterator, Mapping

Timeline = Callable[[int], float | None]
"""The value at a minute; None while there is no such series."""


def constant(value: float | None) -> Timeline:
    """Always the same."""
    return lambda _: value


def clock(minute: int) -> float:
    """The unix time of a story's minute; a story begins at 0."""
    return minute * 60.0


def between(first: int, end: int, inside: float | None, outside: float | None) -> Timeline:
    """One value from minute `first` to before minute `end`, another one before and after."""
    return lambda minute: inside if first <= minute < end else outside


def counting(*minutes: int, first: float = 0.0) -> Timeline:
    """A counter that grows by 1 at each of these minutes."""
    return lambda minute: first + sum(minute >= one for one in minutes)


def shown(line: Timeline, first: int, end: int) -> Timeline:
    """The line from minute `first` to before minute `end`, and nothing else."""
    return lambda minute: line(minute) if first <= minute < end else None


def hidden(line: Timeline, first: int, end: int) -> Timeline:
    """The line, but not from minute `first` to before minute `end`."""
    return lambda minute: None if first <= minute < end else line(minute)


def frozen(line: Timeline, first: int, end: int) -> Timeline:
    """The line, but from minute `first` to before minute `end` it stands still."""
    return lambda minute: line(first if first <= minute < end else minute)


def series(name: str, labels: Mapping[str, str]) -> str:
    """A series as PromQL selects it."""
    named = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{named}}}"


def values(line: Timeline, minutes: int) -> str:
    """All values in promtool's notation; what ends is marked stale, as a scrape that doesn't find it any more does."""
    return " ".join(_written(line, minutes))


def _written(line: Timeline, minutes: int) -> Iterator[str]:
    before = None
    for minute in range(minutes + 1):
        value = line(minute)
        if value is None:
            yield "_" if before is None else "stale"
        else:
            yield "NaN" if math.isnan(value) else f"{value:.10g}"
        before = value
