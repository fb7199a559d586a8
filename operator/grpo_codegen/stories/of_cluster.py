"""Stories of the cluster: queues and nodes."""

from grpo_api.report import metrics as operator

from ..timelines import (
    Timeline,
    changed_between,
    clock,
    constant,
    counter,
    only_during,
    series,
)
from .cluster_series import (
    PREEMPTIONS,
)
from .job_series import ATTEMPTS, RANK0, attempt_series, gpu_second_series
from .story import Story
from .world import NEVER, World, absent_during, of_job


def _waiting(reason: str, jobs: int, first: int, end: int, expected: float) -> World:
    """Jobs that wait from minute `first` to before `end`, where `expected` seconds are usual."""
    lines: dict[operator.Metric, Timeline] = {
        operator.JOBS_WAITING: constant(jobs),
        operator.JOBS_LONGEST_WAIT: lambda minute: clock(minute - first),
        operator.JOBS_EXPECTED_WAIT: constant(expected),
    }
    by_reason = {
        series(metric.name, {"reason": reason}): only_during(line, first, end)
        for metric, line in lines.items()
    }
    return {
        **by_reason,
        of_job(operator.JOB_PHASE, "other", phase="Queued"): only_during(constant(1), first, end),
        series(operator.JOBS.name, {"namespace": "team", "phase": "Queued"}): changed_between(
            first, end, jobs, 0
        ),
    }


STORIES = (
    Story(
        name="waiting for GPUs",
        summary=(
            "Forty jobs of another team wait from minute 10 to 130, as their queue expects: the "
            "jobs that run take two hours."
        ),
        minutes=150,
        at=125,
        changes=_waiting("WaitingForGPUs", 40, 10, 130, 7 * 7200.0),
        board="fleet",
        drawn_minute=95,
    ),
    Story(
        name="waiting beyond the queue",
        summary=(
            "Forty jobs wait from minute 10 to 130 for GPUs that jobs of 40 minutes hold: none of "
            "those ends."
        ),
        minutes=150,
        at=125,
        changes=_waiting("WaitingForGPUs", 40, 10, 130, 2 * 2400.0),
        alerts=("GRPOJobsWaiting",),
        board="fleet",
    ),
    Story(
        name="waiting for an image",
        summary="From minute 10 to 100 a job's pods wait for an image that isn't there.",
        minutes=120,
        at=95,
        changes=_waiting("PodWaiting", 1, 10, 100, 0.0),
        alerts=("GRPOJobsWaiting",),
        board="fleet",
    ),
    Story(
        name="node pool drained",
        summary="In minutes 30 to 35 twelve gangs lose their nodes, this job's among them.",
        minutes=80,
        at=38,
        changes={
            **absent_during(RANK0, 30),
            **attempt_series(2, 33, resumed=30),
            PREEMPTIONS: counter(*(30 + number // 2 for number in range(12))),
            ATTEMPTS: counter(30, first=1),
            **gpu_second_series((0, 30, 0), (33, NEVER, 0)),
        },
        alerts=("GRPODisruptionStorm",),
        board="fleet",
    ),
)
