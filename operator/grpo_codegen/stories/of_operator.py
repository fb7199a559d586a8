"""Stories of the operator: its leader, its process, its queue and what it reports."""

from grpo_api.report import metrics as operator

from ..timelines import (
    Timeline,
    changed_between,
    clock,
    constant,
    counter,
    frozen_during,
    noisy,
    series,
)
from .cluster_series import (
    DENIED,
    DEPTH,
    ERRORS,
    EVENTS_REFUSED,
    FOLLOWER,
    GROWING,
    HEARD,
    LAG_COUNT,
    LEADER,
    LONGEST,
    MEMORY_LIMIT,
    OPERATOR,
    RESIDENT,
    RETRIES,
    SPANS_DROPPED,
    SUCCESSES,
    lag_histogram,
    reconcile_histograms,
)
from .job_series import GOT_ON, JOB, PATIENCE, RANK0
from .story import Story
from .world import absent_during, constant_during, of_job

FIRST, END = 30, 60
"""Minutes in which it happens."""


def _stuck(minute: int) -> float:
    return 30.0 * (minute if minute < FIRST else max(FIRST, minute - 30))


def _alternating(first: float) -> Timeline:
    """Another value every five minutes while it happens; the first value otherwise."""

    def line(minute: int) -> float:
        has_changed = FIRST <= minute < END and (minute - FIRST) // 5 % 2 == 0
        return 1 - first if has_changed else first

    return line


def _failing(rate: float) -> Timeline:
    return lambda minute: rate * min(max(0, minute - FIRST), 50)


STORIES = (
    Story(
        name="operator gone",
        summary="The operator has no pod from minute 30 to 60; the run goes on.",
        minutes=100,
        at=55,
        changes=absent_during({**JOB, **OPERATOR}, FIRST, END),
        alerts=("GRPOOperatorDown",),
        board="operator",
    ),
    Story(
        name="nobody leads",
        summary=(
            "From minute 30 to 60 no operator gets its Lease renewed, and none decides; the run "
            "goes on."
        ),
        minutes=100,
        at=55,
        changes={
            **absent_during(JOB, FIRST, END),
            **constant_during({name: OPERATOR[name] for name in GROWING}, FIRST, END),
            **reconcile_histograms(frozen_during(lambda minute: 30.0 * minute, FIRST, END)),
            LEADER: changed_between(FIRST, END, 0, 1),
        },
        alerts=("GRPOOperatorDown",),
        board="operator",
    ),
    Story(
        name="two leaders",
        summary="From minute 30 to 60 both replicas hold that they lead.",
        minutes=100,
        at=55,
        changes={FOLLOWER: changed_between(FIRST, END, 1, 0)},
        alerts=("GRPOTwoLeaders",),
        board="operator",
    ),
    Story(
        name="leader flaps",
        summary="From minute 30 to 60 the two replicas take turns every five minutes.",
        minutes=150,
        at=58,
        changes={LEADER: _alternating(1.0), FOLLOWER: _alternating(0.0)},
        alerts=("GRPOLeaderFlapping",),
        board="operator",
    ),
    Story(
        name="operator deaf",
        summary=(
            "From minute 30 to 60 the watch of pods hears nothing, as behind a proxy that "
            "swallows it."
        ),
        changes={HEARD: frozen_during(clock, FIRST, END)},
        alerts=("GRPOOperatorDeaf",),
        board="operator",
    ),
    Story(
        name="API server denies",
        summary="From minute 30 to 80 half of the operator's reconciles fail, this job's as well.",
        minutes=120,
        at=75,
        changes={
            ERRORS: _failing(30.0),
            DENIED: _failing(30.0),
            RETRIES: _failing(30.0),
            of_job(operator.JOB_RECONCILE_FAILURES): changed_between(FIRST, 80, 20, None),
        },
        alerts=("GRPOOperatorFailing",),
        board="operator",
    ),
    Story(
        name="queue stuck",
        summary="From minute 30 to 60 no reconcile ends, and jobs wait.",
        changes={
            SUCCESSES: _stuck,
            **reconcile_histograms(_stuck),
            LONGEST: lambda minute: clock(minute - FIRST) if FIRST <= minute < END else 0.1,
            DEPTH: changed_between(FIRST, END, 5, 0),
        },
        alerts=("GRPOQueueStuck",),
        board="operator",
    ),
    Story(
        name="one job's reconcile fails",
        summary="From minute 30 to 60 every reconcile of this job fails; others go well.",
        changes={of_job(operator.JOB_RECONCILE_FAILURES): changed_between(FIRST, END, 20, None)},
        alerts=("GRPOJobNotReconciled",),
    ),
    Story(
        name="a job is never reconciled",
        summary="From minute 30 to 60 a job of another team has no phase.",
        changes={
            of_job(operator.JOB_INFO, "new", "code", model="", strategy=""): changed_between(
                FIRST, END, 1, None
            )
        },
        alerts=("GRPOJobNotReconciled",),
        board="fleet",
    ),
    Story(
        name="twelve jobs are unreadable",
        summary="From minute 30 to 60 twelve GRPOJobs are of a version that nobody here can read.",
        changes={
            series(operator.UNREADABLE_OBJECTS.name, {"resource": "grpojobs"}): changed_between(
                FIRST, END, 12, 0
            )
        },
        alerts=("GRPOObjectsUnreadable",),
        board="operator",
    ),
    Story(
        name="operator near its memory limit",
        summary="From minute 30 to 60 the leader uses 490 of 512 MiB.",
        changes={
            RESIDENT: noisy(changed_between(FIRST, END, 490 * 2.0**20, 88 * 2.0**20), 0.01),
            MEMORY_LIMIT: constant(512 * 2.0**20),
        },
        alerts=("GRPOOperatorMemoryTight",),
        board="operator",
    ),
    Story(
        name="operator's event loop is late",
        summary="From minute 30 to 60 one timer in twenty is more than a second late.",
        changes=lag_histogram(
            LAG_COUNT, lambda minute: 3.0 * min(max(0, minute - FIRST), END - FIRST)
        ),
        alerts=("GRPOOperatorLate",),
        board="operator",
    ),
    Story(
        name="events are refused",
        summary="In minute 30 RBAC refuses ten events of the operator.",
        minutes=70,
        at=35,
        changes={EVENTS_REFUSED: changed_between(0, 30, 0, 10)},
        alerts=("GRPOReportsLost",),
        board="operator",
    ),
    Story(
        name="spans are dropped",
        summary="From minute 30 to 34 the collector is away, and spans are dropped.",
        minutes=70,
        at=36,
        changes={SPANS_DROPPED: counter(30, 31, 32, 33, 34)},
        alerts=("GRPOReportsLost",),
        board="operator",
    ),
    Story(
        name="own program",
        summary="The job's own `command` serves neither progress nor metrics.",
        changes=absent_during(
            dict.fromkeys((*RANK0, GOT_ON, PATIENCE, of_job(operator.JOB_STEP)), clock), 0
        ),
    ),
)
