"""Times as the contract writes them, and what a trainer says of its own: how long it spent on each
part of its run.

Those are durations by a clock that only goes forward, so that an error of the node's clock does not
change them. The operator divides by them the time that it knows a gang to have held its GPUs
(docs/explanation/usage.md).
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import Model


def _rfc3339(text: str) -> str:
    """Refuse what the API server refuses as a date-time."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time needs a time zone, such as 2026-01-31T12:00:00Z")
    return text


Time = Annotated[
    str, Field(max_length=32, json_schema_extra={"format": "date-time"}), AfterValidator(_rfc3339)
]

LAST_TIME = 253402300799.0
"""Unix time of the last second that a timestamp can say: 9999-12-31T23:59:59Z."""
Seconds = Annotated[float, Field(ge=0.0, le=LAST_TIME)]
HOUR = 3600.0
"""Seconds of one hour."""
DAY = 24 * HOUR
"""Seconds of one day."""

RunPart = Literal["loading", "proving", "generating", "scoring", "training", "saving"]
"""The parts of a trainer's time; each moment belongs to one of them."""


class Clock(Model):
    """Seconds of a process's life so far, by what it spent them on."""

    loading: Seconds = 0.0
    """Importing, meeting the other ranks, fetching and loading model and data."""
    proving: Seconds = 0.0
    """From there to the first step: weights proven, trainer and engine built, a checkpoint
    restored."""
    generating: Seconds = 0.0
    """Generating completions."""
    scoring: Seconds = 0.0
    """Waiting for the rewards of completions."""
    training: Seconds = 0.0
    """The rest of the steps: log-probabilities, forward and backward passes, the optimizer's
    step."""
    saving: Seconds = 0.0
    """Writing and sealing checkpoints, and exporting the model."""

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return (
            self.loading
            + self.proving
            + self.generating
            + self.scoring
            + self.training
            + self.saving
        )


class Beginning(Model):
    """The checkpoint that an attempt began at."""

    attempt: Annotated[int, Field(ge=0, le=2**31)] = 0
    """The attempt of this run that sealed it; 0 for a fresh start, or for another run's
    checkpoint."""
    clock: Clock = Clock()
    """That attempt's clock when it sealed it."""


class Account(Model):
    """What a process did with its time, and how much of it a restart would keep."""

    clock: Clock = Clock()
    """All of its time so far."""
    sealed: Clock = Clock()
    """The same when this attempt sealed its last checkpoint; zero before the first."""
    began_at: Beginning | None = None
    """Where the attempt began; absent until it knows."""
