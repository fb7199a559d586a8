"""Stories of the cluster and of the operator."""

from grpo_api.report import metrics as operator

from ..timelines import (
    changed_between,
    clock,
    constant,
    counter,
    frozen_during,
    only_during,
    series,
)
from .cluster import (
    DENIED,
    DEPTH,
    ERRORS,
    HEARD,
    LEADER,
    LONGEST,
    OPERATOR,
    PREEMPTIONS,
    RETRIES,
    SUCCESSES,
    reconcile_histograms,
)
from .run import ATTEMPTS, JOB, RANK0, attempt_series, gpu_second_series
from .story import Story
from .world import NEVER, absent_during, of_job


def _stuck(minute: int) -> float:
    return 30.0 * (minute if minute < 30 else max(30, minute - 30))


STORIES = (
    Story(
        "waiting for GPUs",
        "Another job is pending or queued from minute 10 to 100, since others have all GPUs.",
        120,
        95,
        {
            of_job(operator.JOB_PHASE, "other", phase="Pending"): only_during(constant(1), 10, 12),
            of_job(operator.JOB_PHASE, "other", phase="Queued"): only_during(constant(1), 12, 100),
            series(operator.JOBS.name, {"namespace": "team", "phase": "Queued"}): changed_between(
                10, 100, 1, 0
            ),
        },
    ),
    Story(
        "node pool drained",
        "In minutes 30 to 35 twelve gangs lose their nodes, this job's among them.",
        80,
        38,
        {
            **absent_during(RANK0, 30),
            **attempt_series(2, 33, resumed=30),
            PREEMPTIONS: counter(*(30 + number // 2 for number in range(12))),
            ATTEMPTS: counter(30, first=1),
            **gpu_second_series((0, 30, 0), (33, NEVER, 0)),
        },
    ),
    Story(
        "operator gone",
        "The operator has no pod from minute 30 to 60; the run goes on.",
        100,
        55,
        absent_during({**JOB, **OPERATOR}, 30, 60),
    ),
    Story(
        "nobody leads",
        "From minute 30 to 60 no operator gets its Lease renewed; the run goes on.",
        100,
        55,
        {**absent_during(JOB, 30, 60), LEADER: changed_between(30, 60, 0, 1)},
    ),
    Story(
        "operator deaf",
        "From minute 30 to 60 the watch of pods hears nothing, as behind a proxy that swallows it.",
        90,
        55,
        {HEARD: frozen_during(clock, 30, 60)},
    ),
    Story(
        "API server denies",
        "From minute 30 to 80 half of the operator's reconciles fail.",
        120,
        75,
        {
            ERRORS: lambda minute: 30.0 * min(max(0, minute - 30), 50),
            DENIED: lambda minute: 30.0 * min(max(0, minute - 30), 50),
            RETRIES: lambda minute: 30.0 * min(max(0, minute - 30), 50),
        },
    ),
    Story(
        "queue stuck",
        "From minute 30 to 60 no reconcile ends, and jobs wait.",
        90,
        55,
        {
            SUCCESSES: _stuck,
            **reconcile_histograms(_stuck),
            LONGEST: lambda minute: clock(minute - 30) if 30 <= minute < 60 else 0.1,
            DEPTH: changed_between(30, 60, 5, 0),
        },
    ),
)
