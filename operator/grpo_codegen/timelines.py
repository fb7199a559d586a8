"""Values over time, minute by minute, and how they are written for promtool's tests and its
backfill.

Small pieces that a story is put together from.
"""

import math
from collections.abc import Callable, Iterator, Mapping

Timeline = Callable[[int], float | None]
"""The value at a minute; None while there is no such series."""


def constant(value: float | None) -> Timeline:
    """Always the same."""
    return lambda _: value


def towards(first: float, last: float, pace: float = 120.0) -> Callable[[int], float]:
    """From the first value towards the last, quickly at first, then slowly."""
    return lambda at: last + (first - last) * math.exp(-at / pace)


def clock(minute: int) -> float:
    """The unix time of a story's minute; a story begins at 0."""
    return minute * 60.0


def changed_between(first: int, end: int, inside: float | None, outside: float | None) -> Timeline:
    """One value from minute `first` to before minute `end`, another one before and after."""
    return lambda minute: inside if first <= minute < end else outside


def counter(*minutes: int, first: float = 0.0) -> Timeline:
    """A counter that grows by 1 at each of these minutes."""
    return lambda minute: first + sum(minute >= event_minute for event_minute in minutes)


def running_total(line: Timeline) -> Timeline:
    """A counter that grows in each minute by the line's value there."""
    totals: list[float] = []

    def total(minute: int) -> float:
        while len(totals) <= minute:
            before = totals[-1] if totals else 0.0
            totals.append(before + (line(len(totals)) or 0.0))
        return totals[minute]

    return total


def only_during(line: Timeline, first: int, end: int) -> Timeline:
    """The line from minute `first` to before minute `end`, and nothing else."""
    return lambda minute: line(minute) if first <= minute < end else None


def except_during(line: Timeline, first: int, end: int) -> Timeline:
    """The line, but not from minute `first` to before minute `end`."""
    return lambda minute: None if first <= minute < end else line(minute)


def replaced_during(line: Timeline, first: int, end: int, other: Timeline) -> Timeline:
    """The line, but from minute `first` to before minute `end` another one, wherever there is the
    line."""
    return lambda minute: (
        other(minute) if first <= minute < end and line(minute) is not None else line(minute)
    )


def frozen_during(line: Timeline, first: int, end: int) -> Timeline:
    """The line, but from minute `first` to before minute `end` it stands still."""
    return lambda minute: line(first if first <= minute < end else minute)


def series(name: str, labels: Mapping[str, str]) -> str:
    """A series as PromQL selects it."""
    named = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{named}}}"


def values(line: Timeline, minutes: int) -> str:
    """All values in promtool's notation; what ends is marked stale, as a scrape that doesn't find
    it any more does."""
    return " ".join(_written(line, minutes))


def _written(line: Timeline, minutes: int) -> Iterator[str]:
    before = None
    for minute in range(minutes + 1):
        value = line(minute)
        if value is None:
            yield "_" if before is None else "stale"
        else:
            yield _number(value)
        before = value


def noisy(line: Timeline, by: float, seed: int = 0) -> Timeline:
    """The line, up and down by up to this share of itself, the same each time."""

    def value(minute: int) -> float | None:
        plain = line(minute)
        return None if plain is None else plain * (1 + by * noise(minute, seed))

    return value


def noise(minute: int, seed: int = 0) -> float:
    """From -1 to 1, around 0, the same each time."""
    return sum(math.sin(minute * pace + seed * pace**2) for pace in (0.7, 1.9, 3.3)) / 3


def exposition(name: str, line: Timeline, minutes: int) -> Iterator[str]:
    """Lines of the OpenMetrics format, a sample a minute with its time."""
    for minute in range(minutes + 1):
        value = line(minute)
        if value is not None:
            yield f"{name} {_number(value)} {clock(minute):.0f}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.10g}"
