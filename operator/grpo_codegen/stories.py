"""Stories of jobs and of their operator, as the series that Prometheus would have of them, minute by minute.

Alerts are put to them by promtool (tests/integration/test_alerts.py), and docs/alerts.md says what comes of it. A story
says what differs from WELL, and names metrics by their declarations: it can't tell of one that nothing exports.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_api import metrics as operator
from grpo_api import training_metrics as trainer
from grpo_api.metrics import CONTROLLER, Metric

from .timelines import Timeline, between, clock, constant, counting, frozen, hidden, series, shown

World = Mapping[str, Timeline]
"""Timelines by series."""
GIB = 2.0**30
EVERY = 50
"""Steps between checkpoints; a step takes a minute."""
_BY_KEY = {metric.key: metric for metric in trainer.TRAINING}


@dataclass(frozen=True, slots=True)
class Story:
    """What happens."""

    name: str
    """Few words, for the matrix."""
    says: str
    """A sentence on what happens when."""
    minutes: int
    """How long it lasts. At its end all is well again, for long enough that nothing fires any more."""
    at: int
    """The minute at which all fires that is to fire, late in what happens."""
    changes: World
    """What differs from WELL."""

    @property
    def world(self) -> World:
        """All series."""
        return {**WELL, **self.changes}


def rank0(metric: Metric | str, attempt: int = 1, **labels: str) -> str:
    """A series of the job's rank 0, by the metric or its key."""
    found = _BY_KEY[metric] if isinstance(metric, str) else metric
    pod = {"namespace": "team", "grpojob": "run", "attempt": str(attempt), "pod": f"run-{attempt}-0"}
    return series(found.name, {**pod, **labels})


def of_job(metric: Metric, job: str = "run", **labels: str) -> str:
    """A series of the operator's about a job."""
    return series(metric.name, {"namespace": "team", "grpojob": job, **labels})


def _saved(minute: int) -> float | None:
    return float(minute // EVERY * EVERY) or None


KL, STEP = rank0("kl"), rank0(trainer.STEP)
SAVED, SAVED_AT = rank0("checkpoint_step"), rank0("checkpoint_timestamp_seconds")
UNSCORED = rank0(trainer.UNSCORED, reward="judge")
RANK0: World = {
    KL: constant(0.02),
    STEP: float,
    rank0("reward_std"): constant(0.4),
    rank0("zero_variance_groups"): constant(0.1),
    rank0("straggler_ratio"): constant(1.05),
    rank0("nonfinite_steps"): constant(0.0),
    SAVED: _saved,
    SAVED_AT: lambda minute: clock(int(_saved(minute) or 0)) or None,
    rank0(trainer.SAVE_EVERY): constant(EVERY),
    UNSCORED: constant(0.0),
}
GOT_ON, ATTEMPTS = of_job(operator.JOB_PROGRESS_TIME), of_job(operator.JOB_ATTEMPTS)
PATIENCE = of_job(operator.JOB_PATIENCE, stage="Training")
MEASURED = of_job(operator.JOB_MEMORY_MEASURED)
RATIO, RUNNING = of_job(operator.JOB_MEMORY_RATIO), of_job(operator.JOB_PHASE, phase="Running")
JOB: World = {
    GOT_ON: clock,
    PATIENCE: constant(1800.0),
    ATTEMPTS: constant(1),
    MEASURED: constant(60 * GIB),
    of_job(operator.JOB_MEMORY_USABLE): constant(76 * GIB),
    RATIO: constant(1.03),
    RUNNING: constant(1),
}
_OWN = {"controller": CONTROLLER}
SUCCESSES = series(operator.RECONCILES.name, {**_OWN, "result": "success"})
ERRORS = series(operator.RECONCILES.name, {**_OWN, "result": "error"})
DEPTH = series(operator.QUEUE_DEPTH.name, {"name": CONTROLLER})
LONGEST = series(operator.QUEUE_LONGEST.name, {"name": CONTROLLER})
HEARD = series(operator.HEARD.name, {"resource": "pods"})
PREEMPTIONS = series(operator.RESTARTS.name, {"reason": "Preempted"})
OPERATOR: World = {
    series(operator.BUILD_INFO.name, {"version": "1"}): constant(1),
    SUCCESSES: lambda minute: minute * 30.0,
    ERRORS: constant(0),
    DEPTH: constant(0),
    LONGEST: constant(0.1),
    HEARD: clock,
    PREEMPTIONS: constant(0),
}
WELL: World = {**RANK0, **JOB, **OPERATOR}


def _gone(world: World, first: int, end: int = 10**6) -> World:
    return {name: hidden(line, first, end) for name, line in world.items()}


def _until_360(minute: int) -> float:
    return 0.05 * math.exp(math.log(200) * minute / 360) if minute < 360 else 0.02


def _restarted(minute: int) -> float | None:
    return None if minute < 92 else 5.0 if minute < 183 else 0.02


STORIES = (
    Story("healthy", "A run learns and saves its checkpoints for five hours.", 300, 290, {}),
    Story(
        "diverging fast",
        "The KL is 100 from minute 3 on, and 5 after a restart in minute 90; in minute 183 somebody mends it.",
        200,
        180,
        {**_gone(RANK0, 90), KL: shown(between(3, 183, 100.0, 0.02), 0, 90), rank0("kl", 2): _restarted},
    ),
    Story(
        "diverging slowly",
        "The KL grows from 0.05 to 10 in six hours, below guard.maxKL 11; then somebody mends the run.",
        540,
        358,
        {KL: _until_360, rank0(trainer.MAX_KL): constant(11.0)},
    ),
    Story(
        "collapsed reward",
        "From minute 30 to 90 all completions of a group get the same reward.",
        120,
        80,
        {
            rank0("reward_std"): between(30, 90, 0.0, 0.4),
            rank0("zero_variance_groups"): between(30, 90, 1.0, 0.1),
        },
    ),
    Story(
        "NaN",
        "The loss of minute 60 is no number, and the run fails; its series stay for an hour.",
        180,
        65,
        {
            **_gone({**RANK0, **JOB}, 63),
            KL: between(60, 63, math.nan, None),
            rank0("nonfinite_steps"): shown(counting(60), 0, 63),
            of_job(operator.JOB_CONDITION, type="Failed", reason="Diverged"): between(62, 122, 1, None),
        },
    ),
    Story(
        "OOM and re-plan",
        "Memory is nearly full, with more than predicted; in minute 30 it runs out, and a plan with less goes on.",
        120,
        28,
        {
            **_gone(RANK0, 30),
            rank0("kl", 2): shown(constant(0.02), 33, 10**6),
            MEASURED: between(0, 33, 75 * GIB, 60 * GIB),
            RATIO: between(0, 33, 0.88, 1.02),
            ATTEMPTS: counting(31, first=1),
        },
    ),
    Story(
        "straggler",
        "One rank takes twice as long as the mean from minute 30 to 75.",
        100,
        70,
        {rank0("straggler_ratio"): between(30, 75, 2.0, 1.05)},
    ),
    Story(
        "preempted three times",
        "Within half an hour the gang loses its nodes three times, and starts again.",
        150,
        55,
        {
            **_gone(RANK0, 20),
            **{
                rank0("kl", attempt): shown(constant(0.02), first, end)
                for attempt, first, end in ((2, 22, 35), (3, 37, 50), (4, 52, 10**6))
            },
            ATTEMPTS: counting(21, 36, 51, first=1),
            PREEMPTIONS: counting(21, 36, 51),
        },
    ),
    Story(
        "stalled exporter",
        "Rank 0 trains on, but answers nobody from minute 30 to 60.",
        90,
        55,
        {**_gone(RANK0, 30, 60), GOT_ON: frozen(clock, 30, 60)},
    ),
    Story(
        "hang",
        "No step ends from minute 30 on; in minute 60 the attempt is ended as Hang and the next begins.",
        120,
        55,
        {STEP: frozen(float, 30, 60), GOT_ON: frozen(clock, 30, 60), ATTEMPTS: counting(61, first=1)},
    ),
    Story(
        "long export",
        "After the last step, in minute 60, the model is written for two hours, file by file.",
        200,
        170,
        {
            STEP: lambda minute: float(min(minute, 60)),
            SAVED: lambda minute: 60.0 if minute >= 60 else _saved(minute),
            SAVED_AT: lambda minute: 3600.0 if minute >= 60 else 0.0,
            PATIENCE: shown(constant(1800.0), 0, 60),
            of_job(operator.JOB_PATIENCE, stage="Exporting"): shown(constant(1800.0), 60, 10**6),
        },
    ),
    Story(
        "rewards unscored",
        "The service behind a reward fails for a fifth of the completions from minute 30 to 60.",
        90,
        55,
        {UNSCORED: between(30, 60, 0.2, 0.0)},
    ),
    Story(
        "full disk",
        "From minute 60 to 190 no checkpoint can be written.",
        230,
        185,
        {SAVED: frozen(_saved, 60, 190), SAVED_AT: frozen(lambda m: clock(int(_saved(m) or 0)), 60, 190)},
    ),
    Story(
        "waiting for GPUs",
        "Another job is pending or queued from minute 10 to 100, since others have all GPUs.",
        120,
        95,
        {
            of_job(operator.JOB_PHASE, "other", phase="Pending"): shown(constant(1), 10, 12),
            of_job(operator.JOB_PHASE, "other", phase="Queued"): shown(constant(1), 12, 100),
        },
    ),
    Story(
        "node pool drained",
        "In minutes 30 to 35 twelve gangs lose their nodes, this job's among them.",
        80,
        38,
        {PREEMPTIONS: counting(*(30 + number // 2 for number in range(12))), ATTEMPTS: counting(30, first=1)},
    ),
    Story(
        "operator gone",
        "The operator has no pod from minute 30 to 60; the run goes on.",
        100,
        55,
        _gone({**JOB, **OPERATOR}, 30, 60),
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
        {ERRORS: lambda minute: 30.0 * min(max(0, minute - 30), 50)},
    ),
    Story(
        "queue stuck",
        "From minute 30 to 60 no reconcile ends, and jobs wait.",
        90,
        55,
        {
            SUCCESSES: lambda minute: 30.0 * (minute if minute < 30 else max(30, minute - 30)),
            LONGEST: lambda minute: clock(minute - 30) if 30 <= minute < 60 else 0.1,
            DEPTH: between(30, 60, 5, 0),
        },
    ),
)
"""All stories. Each says what no other does."""
