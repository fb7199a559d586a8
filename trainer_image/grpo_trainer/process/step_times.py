"""When the newest steps were, by the clock of the run; for traces.

A step is over when the next one begins to work, so that the checkpoint written after it is a part of it.
"""

from collections import deque

from grpo_api.report import MAX_STEPS, StepTime
from grpo_api.timing import Clock

KEPT = 512
"""Newest steps that are remembered: more than a run makes between two questions, of which few are told."""


class StepTimes:
    """The times of steps. Whoever shares it between threads holds a lock."""

    def __init__(self) -> None:
        """No step has begun."""
        self._began = Clock()
        self._open: tuple[int, Clock] | None = None
        """The step that is finished, and when it was; what follows until the next one works belongs to it."""
        self._first: StepTime | None = None
        self._newest: deque[StepTime] = deque(maxlen=KEPT)

    def begin(self, clock: Clock) -> None:
        """Training begins."""
        self._began = clock

    @property
    def waits(self) -> bool:
        """Whether a step is finished that is not over."""
        return self._open is not None

    def finished(self, step: int, clock: Clock) -> None:
        """The step of this number is finished."""
        if self._open:
            self.over(self._open[1])
        self._open = step, clock

    def over(self, clock: Clock) -> None:
        """What was finished is over now; nothing without such a step."""
        if self._open is None:
            return
        made = StepTime(step=self._open[0], began=self._began, ended=clock)
        self._first = self._first or made
        self._newest.append(made)
        self._began, self._open = clock, None

    def told(self, every: int) -> list[StepTime]:
        """The first step and the newest of every Nth, oldest first."""
        if self._first is None:
            return []
        found = [one for one in self._newest if one.step % every == 0 and one.step > self._first.step]
        return [self._first, *found[-MAX_STEPS:]]
