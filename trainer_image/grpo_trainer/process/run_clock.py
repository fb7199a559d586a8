"""Divides the time of this process among the parts of its run.

It only switches between parts, so that their sum is the time since it began, whatever is forgotten elsewhere.
"""

from collections.abc import Callable
from typing import get_args

from grpo_api.report.report import Stage
from grpo_api.text.timing import Clock, RunPart

from ..clock import SYSTEM_CLOCK

_OF_STAGE: dict[Stage, RunPart] = {
    "Starting": "loading",
    "Connecting": "loading",
    "Loading": "loading",
    "Proving": "proving",
    "Training": "training",
    "Saving": "saving",
    "Exporting": "saving",
    "Finished": "saving",
}
_OF_PHASE: dict[str | None, RunPart] = {"generate": "generating", "reward": "scoring"}
"""Phases of a step with a part of their own; the others, and what lies between them, are training."""


class RunClock:
    """Adds up the seconds of each part of a run. Not thread-safe: callers that share it hold a lock."""

    def __init__(self, now: Callable[[], float] = SYSTEM_CLOCK.now) -> None:
        """Start with the part `loading`; `now` is a monotonic clock in seconds."""
        self._now = now
        self._seconds: dict[RunPart, float] = dict.fromkeys(get_args(RunPart), 0.0)
        self._part: RunPart = "loading"
        self._since = now()

    def stage(self, name: Stage) -> None:
        """Note that the run enters a stage."""
        self._switch(_OF_STAGE[name])

    def phase(self, name: str | None) -> None:
        """Note that a step enters a phase, or none."""
        self._switch(_OF_PHASE.get(name, "training"))

    def read(self) -> Clock:
        """The seconds of each part until now, rounded to milliseconds."""
        self._switch(self._part)
        return Clock(**{part: round(seconds, 3) for part, seconds in self._seconds.items()})

    def _switch(self, part: RunPart) -> None:
        now = self._now()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now
