"""What a rule says, and what it may know beside the run's numbers."""

from dataclasses import dataclass
from typing import NamedTuple


class Verdict(NamedTuple):
    """How ill a run is by one rule."""

    score: float
    """1 at the limit, more beyond it."""
    evidence: dict[str, float]
    """The numbers that it was judged by, by their names for users."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a run's spec allows; None where nothing is known of it."""

    max_kl: float | None = None
    """guard.maxKL, in nats per token."""
