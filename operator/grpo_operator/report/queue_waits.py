"""How long jobs have waited to run, by reason, and how long their queue lets them expect to wait.

A batch queue makes jobs wait for hours, which needs no alert. The expected wait follows from the
jobs that run. Each turn of the queue takes as long as the longest of them, from its start to its
ETA. As many jobs start in a turn as run now.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from grpo_api.report.metrics import JOBS_EXPECTED_WAIT, JOBS_LONGEST_WAIT, JOBS_WAITING, Metric
from grpo_api.report.report import Result
from grpo_api.status.status import ConditionType, Phase
from grpo_kube.objects.times import seconds
from grpo_planner.result.result import PlanReason

from ..records.reasons import Reason
from ..records.records import GRPOJobRecord

WAITING = frozenset({Phase.PENDING, Phase.QUEUED, Phase.STARTING, Phase.RESTARTING})
_TURN = frozenset(
    {
        Reason.WAITING_FOR_GPUS,
        Reason.WAITING_IN_QUEUE,
        Reason.WAITING_FOR_QUOTA,
        Reason.WAITING_FOR_KUEUE,
        Reason.EVICTED,
        Reason.WAITING_FOR_CHECKPOINT,
    }
)
"""Reasons of jobs that wait for other jobs to end."""
_KNOWN = frozenset({*Reason, *PlanReason, *Result})
"""A status may say anything, and each word would be a series."""


@dataclass(slots=True)
class QueueWaits:
    """Collects the waits of jobs that have not ended, at the unix time `now`."""

    now: float
    _waits: dict[str, list[float]] = field(default_factory=dict)
    _runs: list[float] = field(default_factory=list)

    def add(self, job: GRPOJobRecord) -> None:
        """Count one more job."""
        if job.phase in WAITING:
            stated = job.status.reason or ""
            reason = stated if stated in _KNOWN else "Unknown"
            self._waits.setdefault(reason, []).append(_seconds_waited(job, self.now))
        # A job on CPUs frees nothing that others wait for.
        elif job.phase == Phase.RUNNING and job.status.plan and job.status.plan.gpus:
            self._runs.append(_seconds_of_run(job, self.now))

    def samples(self) -> Iterator[tuple[Metric, str, float]]:
        """Yield family, reason and value."""
        in_turn = sum(len(waits) for reason, waits in self._waits.items() if reason in _TURN)
        for reason, waits in self._waits.items():
            yield JOBS_WAITING, reason, len(waits)
            yield JOBS_LONGEST_WAIT, reason, round(max(waits))
            expected = self._expected_seconds(in_turn) if reason in _TURN else 0.0
            yield JOBS_EXPECTED_WAIT, reason, round(expected)

    def _expected_seconds(self, waiting: int) -> float:
        if not self._runs:
            return 0.0
        turns = math.ceil(waiting / len(self._runs))
        return turns * max(self._runs)


def _seconds_waited(job: GRPOJobRecord, now: float) -> float:
    """Seconds since the job ran last, was resumed or was created, whichever came last."""
    since = job.created
    for kind in (ConditionType.RUNNING, ConditionType.SUSPENDED):
        condition = job.condition(kind)
        if condition and condition.status == "False":
            since = max(since, seconds(condition.last_transition_time) or 0.0)
    return max(0.0, now - since)


def _seconds_of_run(job: GRPOJobRecord, now: float) -> float:
    """Seconds from the attempt's start to its ETA, or until now where it has none yet."""
    start = seconds(job.status.attempt_start_time)
    elapsed = max(0.0, now - start) if start else 0.0
    progress = job.status.progress
    seconds_left = progress.eta_seconds if progress else None
    return elapsed + (seconds_left or 0)
