"""Begin and end of the newest steps by the clock of the run, for traces.

A step is over when the next one begins to work, so that the checkpoint written after it is a part of it.
"""

from collections import deque

from grpo_api.report.report import MAX_STEPS, StepTime
from grpo_api.text.timing import Clock

KEPT = 512
"""Newest steps that are kept: more than a run makes between two requests. A report has only some of them."""


class StepTimes:
    """Begin and end of the first and the newest steps. Not thread-safe: callers that share it hold a lock."""

    def __init__(self) -> None:
        """No step has begun."""
        self._began = Clock()
        self._open: tuple[int, Clock] | None = None
        """The step that is finished, and when it was; what follows until the next one works belongs to it."""
        self._first: StepTime | None = None
        self._newest: deque[StepTime] = deque(maxlen=KEPT)

    def begin(self, clock: Clock) -> None:
        """Note that training begins."""
        self._began = clock

    @property
    def waits(self) -> bool:
        """Whether the newest finished step still lasts: the next one has not begun to work."""
        return self._open is not None

    def finished(self, step: int, clock: Clock) -> None:
        """Note that this optimizer step is finished; it lasts until the next one begins to work."""
        if self._open:
            self.over(self._open[1])
        self._open = step, clock

    def over(self, clock: Clock) -> None:
        """Note that the finished step is over. Does nothing without such a step."""
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
        later = [one for one in self._newest if one.step > self._first.step]
        every_nth = [one for one in later if one.step % every == 0]
        return [self._first, *every_nth[-MAX_STEPS:]]
