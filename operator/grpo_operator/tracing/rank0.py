"""Turns the times that rank 0 reports into spans.

Rank 0 reports durations by its own monotonic clock. The moment of the report puts them on the operator's clock, and
they are clipped to the time between the attempt's admission and that moment. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_api import traces
from grpo_api.report import Progress, StepTime
from grpo_api.timing import Clock

from .spans import Span, Trace


@dataclass(slots=True)
class Rank0Spans:
    """Which of one attempt's spans that rank 0 knows of have been made."""

    every: int
    """Every which step has a span."""
    _through: int = 0
    """Steps up to this one have theirs, or none."""
    _heard: int = 0
    """The last step in a former operator process's status; 0 for none."""
    _origin: float = float("inf")
    """When rank 0's clock began, by the operator's."""
    _loaded: bool = False
    _proven: bool = False
    _steps: int = 0

    def heard_of(self, step: int) -> None:
        """Record the step in a former operator process's status. Its span may be missing, so it is made again."""
        self._heard, self._through = step, max(0, step - 1)

    def told(self, trace: Trace, progress: Progress, at: float, earliest: float) -> Iterator[Span]:
        """Yield the spans that this report adds. `at` is its time; no span begins before `earliest` (unix seconds)."""
        if progress.account is None:
            return
        clock = progress.account.clock
        self._origin = min(self._origin, at - clock.total)
        timeline = _Timeline(trace, self._origin, earliest, at)
        if self._heard <= progress.resumed_from_step:
            yield from self._start(timeline, clock, progress)
        first = progress.resumed_from_step + 1
        every = traces.stride(self.every, progress.total_steps)
        for one in progress.steps:
            wanted = one.step == first or one.step % every == 0
            if one.step > self._through and wanted and self._steps < traces.MAX_STEPS:
                self._through, self._steps = one.step, self._steps + 1
                yield from timeline.step(one, traces.FIRST_STEP if one.step == first else traces.STEP)

    def _start(self, timeline: "_Timeline", clock: Clock, progress: Progress) -> Iterator[Span]:
        after = clock.generating + clock.scoring + clock.training + clock.saving
        if not self._loaded and (clock.proving or after):
            self._loaded = True
            yield timeline.startup(traces.LOADED, 0.0, clock.loading, progress)
        if not self._proven and after:
            self._proven = True
            yield timeline.startup(traces.PROVEN, clock.loading, clock.loading + clock.proving, progress)


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Rank 0's clock on the operator's."""

    trace: Trace
    origin: float
    earliest: float
    latest: float

    def _at(self, spent: float) -> float:
        return max(self.earliest, min(self.origin + spent, self.latest))

    def startup(self, name: traces.SpanName, begin: float, end: float, progress: Progress) -> Span:
        """A part of the start between two readings of rank 0's clock."""
        known = progress.startup_seconds
        parts = ((one, known.get(one.key.rpartition(".")[2])) for one in traces.STARTUP[name.name])
        attributes = [(one, value) for one, value in parts if value is not None]
        return self.trace.span(name, self._at(begin), self._at(end), attributes=attributes)

    def step(self, step_time: StepTime, name: traces.SpanName) -> Iterator[Span]:
        """Yield the spans of a step and of its parts, one after the other: their real order is not reported."""
        begin = self._at(step_time.began.total)
        number = [(traces.STEP_NUMBER, step_time.step)]
        span = self.trace.span(name, begin, self._at(step_time.ended.total), number=step_time.step, attributes=number)
        yield span
        for part in traces.PARTS:
            spent = getattr(step_time.ended, part.name) - getattr(step_time.began, part.name)
            if spent > 0.0:
                end = min(begin + spent, span.end)
                yield self.trace.span(part, begin, end, number=step_time.step, parent=span.id)
                begin = end
