"""Two kinds of time that must never meet: what this operator observed, and what others reported.

Observed is a reading of the operator's own monotonic clock: it orders what happened and measures
waits. What others report (kubelets, trainers, whose clocks may be minutes off) stays text or unix
seconds that are only passed on to people. Unix seconds of the operator's own clock are for what is
stored and must outlive the process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NewType, TypeVar

Stored = TypeVar("Stored", str, str | None)
Reported = NewType("Reported", float)
"""Unix seconds by another's clock. Two readings of one clock give a duration; one alone has to be
held to bounds by the operator's own clock before anything follows from it."""


@dataclass(frozen=True, slots=True, order=True)
class Observed:
    """When this process saw something, in seconds of its monotonic clock."""

    at: float

    def __sub__(self, earlier: "Observed") -> float:
        """Seconds since an earlier moment."""
        return self.at - earlier.at


@dataclass(frozen=True, slots=True)
class ProcessClock:
    """The two clocks of this process."""

    wall: Callable[[], float]
    """Gives unix seconds, for what is stored."""
    monotonic: Callable[[], Observed]
    """Gives the moment at which something is observed, to order events and to measure waits."""


def seconds(text: str | None) -> float | None:
    """Unix time of an RFC 3339 timestamp; None for one that is absent or empty.

    Raises:
        ValueError: the text is no such timestamp.
    """
    if not text:
        return None
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return when.timestamp()


def timestamp(unix: float) -> str:
    """RFC 3339 in UTC with whole seconds, as metav1.Time is written."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def not_future(stored: Stored, now: float) -> Stored | str:
    """A stored timestamp. Now instead of one that a clock left in the future before it was set
    back, so that a deadline counts from here and not from when the clock has caught up."""
    return timestamp(now) if (seconds(stored) or 0.0) > now else stored


def doubled_pause(first: float, last: float, failures: int) -> float:
    """Seconds to wait after that number of failures in a row: the first pause, doubled with each
    further one, up to the last."""
    # Bounded: a power of two overflows after 1,024 failures, which a night may have.
    return min(last, first * 2.0 ** min(failures - 1, 32))


def shortest_pause(*pauses: float | None) -> float | None:
    """Return the shortest of the pauses in seconds; None without any."""
    return min((pause for pause in pauses if pause is not None), default=None)
