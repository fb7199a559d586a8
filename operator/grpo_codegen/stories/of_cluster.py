"""Stories of the cluster and of the operator."""

from grpo_api.report import metrics as operator

from ..timelines import between, clock, constant, counting, frozen, series, shown
from .cluster import DENIED, DEPTH, ERRORS, HEARD, LEADER, LONGEST, OPERATOR, PREEMPTIONS, RETRIES, SUCCESSES, took
from .run import ATTEMPTS, JOB, RANK0, attempt, spent
from .story import Story
from .world import NEVER, gone, of_job


def _stuck(minute: int) -> float:
    return 30.0 * (minute if minute < 30 else max(30, minute - 30))


STORIES = (
    Story(
        "waiting for GPUs",
        "Another job is pending or queued from minute 10 to 100, since others have all GPUs.",
        120,
        95,
        {
            of_job(operator.JOB_PHASE, "other", phase="Pending"): shown(constant(1), 10, 12),
            of_job(operator.JOB_PHASE, "other", phase="Queued"): shown(constant(1), 12, 100),
            series(operator.JOBS.name, {"namespace": "team", "phase": "Queued"}): between(10, 100, 1, 0),
        },
    ),
    Story(
        "node pool drained",
        "In minutes 30 to 35 twelve gangs lose their nodes, this job's among them.",
        80,
        38,
        {
            **gone(RANK0, 30),
            **attempt(2, 33, resumed=30),
            PREEMPTIONS: counting(*(30 + number // 2 for number in range(12))),
            ATTEMPTS: counting(30, first=1),
            **spent((0, 30, 0), (33, NEVER, 0)),
        },
    ),
    Story(
        "operator gone",
        "The operator has no pod from minute 30 to 60; the run goes on.",
        100,
        55,
        gone({**JOB, **OPERATOR}, 30, 60),
    ),
    Story(
        "nobody leads",
        "From minute 30 to 60 no operator gets its Lease renewed; the run goes on.",
        100,
        55,
        {**gone(JOB, 30, 60), LEADER: between(30, 60, 0, 1)},
    ),
    Story(
        "operator deaf",
        "From minute 30 to 60 the watch of pods hears nothing, as behind a proxy that swallows it.",
        90,
        55,
        {HEARD: frozen(clock, 30, 60)},
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
            **took(_stuck),
            LONGEST: lambda minute: clock(minute - 30) if 30 <= minute < 60 else 0.1,
            DEPTH: between(30, 60, 5, 0),
        },
    ),
)
