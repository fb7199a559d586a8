"""The world of usage_world with a trace per attempt, and a rank 0 that tells when its steps were.

The operator's process ends and begins anew as that world wants; what it knew of traces is gone with
it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from grpo_api.report.report import MAX_STEPS, Progress, StepTime
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Decision
from grpo_operator.decide.observation import Observation, Pull
from grpo_operator.tracing.attempt_trace import AttemptTraces
from grpo_operator.tracing.spans import Span
from tests.unit.usage_run import Gang, Run
from tests.unit.usage_world import World

EVERY = 3
STEPS_BEFORE = 100
"""By so many steps each attempt is further than the one before."""


def steps_of(run: Run, attempt: int, until: float = float("inf")) -> list[StepTime]:
    """All steps that are over by then, oldest first."""
    begins = [
        (when, run.clock(when))
        for when, part in run.parts()
        if part == "generating" and when <= until
    ]
    first = STEPS_BEFORE * attempt + 1
    return [
        StepTime(step=first + number, began=one[1], ended=other[1])
        for number, (one, other) in enumerate(pairwise(begins))
    ]


@dataclass
class TracedWorld(World):
    """A world whose operator makes spans."""

    spans_by_process: list[list[Span]] = field(default_factory=list)
    """Spans by each process of the operator."""
    attempts_over_restarts: set[int] = field(default_factory=set)
    """Attempts that more than one process has seen, or none for a while."""
    _traces: AttemptTraces | None = None

    def _act(self, observation: Observation, decision: Decision) -> None:
        status = GRPOJobStatus.model_validate(self.status)
        if self._traces is None or len(self.spans_by_process) <= self.restarts:
            self.spans_by_process += [
                [] for _ in range(self.restarts + 1 - len(self.spans_by_process))
            ]
            self._traces = AttemptTraces(self.spans_by_process[-1].append, every=EVERY, version="1")
            self.attempts_over_restarts |= {observation.job.status.attempt, status.attempt}
        self._traces.record_observation(observation)
        self._traces.record_status(observation.job, status, observation.now)
        super()._act(observation, decision)

    def _pull(self, attempt: int) -> Pull | None:
        gang = next((one for one in self.gangs if one.attempt == attempt), None)
        when = self.now - self.chance.uniform(0.0, 5.0)
        if gang is None or gang.run is None or not gang.run.begin <= when < gang.until:
            return None
        return Pull(self._progress(gang, gang.run, when), Observed(when), Observed(when))

    def _progress(self, gang: Gang, run: Run, when: float) -> Progress:
        steps = steps_of(run, gang.attempt, when)
        traced = [one for one in steps[1:] if one.step % EVERY == 0][-MAX_STEPS:]
        return Progress(
            attempt=gang.attempt,
            stage="Training",
            step=STEPS_BEFORE * gang.attempt + len(steps),
            resumed_from_step=STEPS_BEFORE * gang.attempt,
            account=run.account(when),
            startup_seconds={"load": 1.0, "proof": 2.0, "x": 3.0},
            steps=[*steps[:1], *traced],
        )

    def spans(self) -> Iterator[Span]:
        """All of them."""
        for spans in self.spans_by_process:
            yield from spans


def lived(chance: random.Random, losses: int) -> TracedWorld:
    """A world at its end."""
    world = TracedWorld(chance, losses)
    for _ in world.live():
        pass
    return world


def by_attempt(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Spans by the attempt whose trace they are in."""
    found: dict[int, list[Span]] = {}
    for span in spans:
        found.setdefault(span.trace.attempt, []).append(span)
    return found
