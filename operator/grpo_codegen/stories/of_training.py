"""Stories of how a run learns and gets on."""

import math

from grpo_api.plan.plan import MemoryPhases
from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import Metric
from grpo_api.status.status import Phase

from ..timelines import (
    changed_between,
    clock,
    constant,
    counter,
    frozen_during,
    only_during,
    replaced_during,
    series,
)
from .cluster_series import (
    GPU_ACCOUNTS,
    OTHER_RUNS,
    OUT_OF_MEMORY,
    PHASES,
    PREEMPTIONS,
    UTILISATION,
    WAITING,
)
from .job_series import (
    ATTEMPTS,
    GIB,
    GOT_ON,
    INFO,
    KL,
    OF_GPUS,
    PATIENCE,
    RANK0,
    RESTARTS,
    RUNNING,
    SAVED,
    SAVED_AT,
    STEP,
    attempt_series,
    checkpoint_step,
    counted_series,
    gpu_second_series,
)
from .story import Story
from .world import (
    NEVER,
    World,
    absent_during,
    changed_during,
    constant_during,
    constant_series,
    of_job,
    rank0,
)

_UNSCORED = rank0(trainer.UNSCORED, reward="judge")
_ACCURACY = rank0(trainer.REWARD, reward="accuracy")
_SEEN_STEP = of_job(operator.JOB_STEP)


def _between_attempts(*gaps: tuple[int, int]) -> World:
    """The phase: Restarting from the first to before the second minute of each gap."""

    def restarts(minute: int) -> bool:
        return any(first <= minute < end for first, end in gaps)

    return {
        RUNNING: lambda minute: None if restarts(minute) else 1.0,
        of_job(operator.JOB_PHASE, phase="Restarting"): lambda minute: (
            1.0 if restarts(minute) else None
        ),
    }


def _gpu_memory(number: int, phase: str, planned: float, measured: float) -> World:
    both: dict[Metric, float] = {trainer.PREDICTED_MEMORY: planned, trainer.MEMORY: measured}
    return {
        rank0(metric, number, step_phase=phase): constant(gib * GIB) for metric, gib in both.items()
    }


def _until_360(minute: int) -> float:
    return 0.05 * math.exp(math.log(200) * minute / 360) if minute < 360 else 0.02


def _ever_worse(name: str) -> World:
    def worse(minute: int) -> float:
        healthy = RANK0[name](minute) or 0.0
        return healthy * max(0.05, 1 - minute / 330) if minute < 360 else healthy

    return {name: worse}


_WORST = {"accuracy": 0.02, "format": 0.05, "judge": 0.01}


def _useless(world: World, number: int, first: int, end: int) -> World:
    """What goes with a KL that is far too high."""
    values = {
        "reward": 0.08,
        "reward_std": 0.1,
        "entropy": 5.5,
        "grad_norm": 25.0,
        "completion_clipped_ratio": 0.9,
    }
    rewards = {rank0(trainer.REWARD, number, reward=name): value for name, value in _WORST.items()}
    return changed_during(
        world, first, end, {rank0(key, number): value for key, value in values.items()} | rewards
    )


_SECOND = attempt_series(2, 92, resumed=50)
_AFTER_OOM = attempt_series(2, 33)
_NAN = ("kl", "loss", "grad_norm", "reward")


def _saving_step(minute: int) -> float:
    """Ten steps of a minute, then fifteen minutes of saving."""
    cycles, rest = divmod(minute, 25)
    return 10.0 * cycles + min(rest, 10)


def _saving(end: int) -> World:
    """Checkpoints that take fifteen minutes each, and from the end on none is saved slowly."""
    seconds = rank0(trainer.CHECKPOINT_SECONDS)
    return {
        seconds: lambda minute: 900.0 if minute < end else 5.0,
        SAVED: lambda minute: (
            _saving_step(min(minute, end)) // 10 * 10
            + (minute >= end) * ((minute - end) // 10 * 10)
            or None
        ),
        SAVED_AT: lambda minute: clock(minute // 25 * 25) if minute < end else clock(minute),
        rank0(trainer.SAVE_EVERY): constant(10.0),
        rank0("step_seconds"): constant(60.0),
    }


_ON_CPUS = (
    "training_memory_bytes",
    "memory_predicted",
    "memory_usable",
    "memory_reserved",
    "device_memory",
    "_kl{",
    "sync_every",
    "straggler",
)
"""Parts of names of series that are not there on CPUs, in a single process and without a
reference."""

STORIES = (
    Story(
        name="healthy",
        summary="A run learns and saves its checkpoints for five hours.",
        minutes=300,
        at=290,
        changes={},
    ),
    Story(
        name="diverging fast",
        summary=(
            "The KL is 100 from minute 3 on, and 5 after a restart in minute 90; in minute 183 "
            "somebody mends it."
        ),
        minutes=230,
        at=180,
        changes={
            **absent_during(RANK0, 90),
            **_SECOND,
            **_useless(absent_during(RANK0, 90), 1, 3, 90),
            **_useless(_SECOND, 2, 92, 183),
            KL: only_during(changed_between(3, 183, 100.0, 0.02), 0, 90),
            rank0("kl", 2): only_during(lambda minute: 5.0 if minute < 183 else 0.02, 92, NEVER),
            **absent_during({rank0(trainer.MAX_KL, number): constant(1.0) for number in (1, 2)}),
            **_between_attempts((90, 92)),
            RESTARTS: counter(91),
            ATTEMPTS: counter(92, first=1),
            **gpu_second_series((0, 90, 40), (92, NEVER, 0)),
        },
        findings=("Truncating", "KLRising"),
    ),
    Story(
        name="diverging slowly",
        summary=(
            "The KL grows from 0.05 to 10 in six hours, below guard.maxKL 11; then somebody mends "
            "the run."
        ),
        minutes=540,
        at=358,
        changes={
            KL: _until_360,
            rank0(trainer.MAX_KL): constant(11.0),
            **_ever_worse(rank0("reward")),
            **_ever_worse(_ACCURACY),
        },
        findings=("RewardFalling", "KLRising"),
    ),
    Story(
        name="collapsed reward",
        summary="From minute 30 to 90 all completions of a group get the same reward.",
        minutes=120,
        at=80,
        changes={
            **changed_during(
                RANK0, 30, 90, {rank0("reward"): 0.5, _ACCURACY: 0.0, rank0("grad_norm"): 0.0}
            ),
            rank0("reward_std"): changed_between(30, 90, 0.0, 0.4),
            rank0("zero_variance_groups"): changed_between(30, 90, 1.0, 0.1),
        },
        findings=("NoSignal", "RewardFalling", "RewardHacking"),
    ),
    Story(
        name="NaN",
        summary="The loss of minute 60 is no number, and the run fails; its series stay for an hour.",
        minutes=180,
        at=65,
        changes={
            **absent_during(RANK0, 63),
            **{
                rank0(key): only_during(
                    replaced_during(RANK0[rank0(key)], 60, 63, constant(math.nan)), 0, 63
                )
                for key in _NAN
            },
            rank0("nonfinite_steps"): only_during(counter(60), 0, 63),
            **absent_during(
                {
                    GOT_ON: clock,
                    **constant_series(1800.0, PATIENCE),
                    **constant_series(1.0, RUNNING),
                },
                63,
            ),
            **gpu_second_series((0, 63, 13)),
            **constant_during({_SEEN_STEP: float}, 60),
            of_job(operator.JOB_CONDITION, type="Failed", reason="Diverged"): changed_between(
                62, 122, 1, None
            ),
            of_job(operator.JOB_PHASE, phase="Failed"): changed_between(63, 122, 1, None),
            INFO: only_during(constant(1.0), 0, 122),
            series(operator.JOBS.name, {"namespace": "team", "phase": "Running"}): changed_between(
                0, 63, 1, 0
            ),
            series(operator.JOBS.name, {"namespace": "team", "phase": "Failed"}): changed_between(
                63, NEVER, 1, 0
            ),
        },
        alerts=("GRPOJobFailed", "GRPONotFinite"),
        phase=Phase.FAILED,
    ),
    Story(
        name="OOM and re-plan",
        summary=(
            "Memory is nearly full, with more than predicted; in minute 30 it runs out, and a plan "
            "with less goes on."
        ),
        minutes=120,
        at=28,
        changes={
            **_AFTER_OOM,
            **absent_during(
                {**RANK0, **_gpu_memory(1, "backward", 66, 75), **_gpu_memory(1, "step", 63, 72)},
                30,
            ),
            **_between_attempts((30, 33)),
            ATTEMPTS: counter(31, first=1),
            RESTARTS: counter(31),
            OUT_OF_MEMORY: counter(31),
            of_job(operator.JOB_CONDITION, type="Degraded", reason="OutOfMemory"): changed_between(
                30, 34, 1, None
            ),
            **gpu_second_series((0, 30, 30), (33, NEVER, 0)),
        },
        drawn_minute=75,
        alerts=("GRPOMemoryTight", "GRPOPredictionOff"),
    ),
    Story(
        name="straggler",
        summary="One rank takes twice as long as the median one from minute 30 to 75.",
        minutes=100,
        at=70,
        changes={
            **changed_during(RANK0, 30, 75, {rank0("straggler_ratio"): 2.0}),
            **counted_series(
                {
                    "tokens": changed_between(30, 75, 174_000.0, 312_000.0),
                    "generate": changed_between(30, 75, 58.0, 29.0),
                }
            ),
        },
        findings=("Straggler",),
    ),
    Story(
        name="preempted three times",
        summary="Within half an hour the gang loses its nodes three times, and starts again.",
        minutes=150,
        at=55,
        changes={
            **absent_during(RANK0, 20),
            **{
                name: line
                for number, first, end, resumed in (
                    (2, 22, 35, 20),
                    (3, 37, 50, 33),
                    (4, 52, NEVER, 46),
                )
                for name, line in attempt_series(number, first, end, resumed).items()
            },
            **_between_attempts((20, 22), (35, 37), (50, 52)),
            ATTEMPTS: counter(21, 36, 51, first=1),
            PREEMPTIONS: counter(21, 36, 51),
            **gpu_second_series((0, 20, 0), (22, 35, 0), (37, 50, 0), (52, NEVER, 0)),
        },
        drawn_minute=80,
        alerts=("GRPOJobRestarting",),
    ),
    Story(
        name="stalled exporter",
        summary="Rank 0 trains on, but answers nobody from minute 30 to 60.",
        changes={
            **absent_during(RANK0, 30, 60),
            GOT_ON: frozen_during(clock, 30, 60),
            _SEEN_STEP: frozen_during(float, 30, 60),
        },
        alerts=("GRPOTrainingStalled", "GRPOTrainingUnseen"),
    ),
    Story(
        name="hang",
        summary=(
            "No step ends from minute 30 on; in minute 60 the attempt is ended as Hang and the "
            "next begins."
        ),
        minutes=120,
        at=55,
        changes={
            **absent_during(constant_during(RANK0, 30), 60),
            **attempt_series(2, 61),
            **constant_during({GOT_ON: clock, _SEEN_STEP: float}, 30, 60),
            ATTEMPTS: counter(61, first=1),
            RESTARTS: counter(61),
            **_between_attempts((60, 61)),
            **gpu_second_series((0, 60, 60), (61, NEVER, 0)),
        },
        alerts=("GRPOTrainingStalled",),
    ),
    Story(
        name="long export",
        summary="After the last step, in minute 60, the model is written for two hours, file by file.",
        minutes=200,
        at=170,
        changes={
            **constant_during(RANK0, 60),
            **constant_during({_SEEN_STEP: float}, 60),
            **constant_series(60, rank0(trainer.TOTAL_STEPS)),
            rank0(trainer.ETA): lambda minute: 60.0 * max(0, 60 - minute),
            STEP: lambda minute: float(min(minute, 60)),
            SAVED: lambda minute: 60.0 if minute >= 60 else checkpoint_step(minute),
            SAVED_AT: only_during(lambda minute: 3600.0 if minute >= 60 else clock(50), 50, NEVER),
            PATIENCE: only_during(constant(1800.0), 0, 60),
            of_job(operator.JOB_PATIENCE, stage="Exporting"): only_during(
                constant(1800.0), 60, NEVER
            ),
        },
    ),
    Story(
        name="rewards unscored",
        summary="The service behind a reward fails for a fifth of the completions from minute 30 to 60.",
        changes={_UNSCORED: changed_between(30, 60, 0.2, 0.0)},
        alerts=("GRPORewardsUnscored",),
    ),
    Story(
        name="rank 0 is not scraped",
        summary=(
            "Prometheus can't reach rank 0 from minute 30 to 60; the operator can, and the run "
            "goes on."
        ),
        changes=absent_during(RANK0, 30, 60),
        alerts=("GRPOTrainingUnseen",),
    ),
    Story(
        name="suspended",
        summary="From minute 30 to 90 the job is suspended by its owner.",
        minutes=120,
        at=85,
        changes={
            **absent_during({**RANK0, GOT_ON: clock, PATIENCE: constant(1800.0)}, 30, 90),
            RUNNING: lambda minute: None if 30 <= minute < 90 else 1.0,
            of_job(operator.JOB_PHASE, phase="Suspended"): only_during(constant(1.0), 30, 90),
        },
        phase=Phase.SUSPENDED,
    ),
    Story(
        name="resumed after hours",
        summary=(
            "From minute 60 to 320 the job is suspended; it goes on from its checkpoint of minute "
            "50."
        ),
        minutes=390,
        at=345,
        changes={
            **absent_during(RANK0, 60),
            **absent_during({GOT_ON: clock, PATIENCE: constant(1800.0)}, 60, 320),
            **attempt_series(2, 320, resumed=50),
            rank0("checkpoint_timestamp_seconds", 2): only_during(
                lambda minute: clock(50 if minute < 370 else 370), 320, NEVER
            ),
            RUNNING: lambda minute: None if 60 <= minute < 320 else 1.0,
            of_job(operator.JOB_PHASE, phase="Suspended"): only_during(constant(1.0), 60, 320),
            ATTEMPTS: counter(320, first=1),
        },
    ),
    Story(
        name="short answers under a long limit",
        summary=(
            "Completions have at most 90 of 786 tokens, so that half of the predicted memory is "
            "used. A run of the same name that ended in minute 5 had longer ones."
        ),
        minutes=90,
        at=80,
        changes={
            rank0("completion_length_max"): constant(90.0),
            rank0("completion_length_max", 2): only_during(constant(786.0), 0, 5),
            rank0("completion_length"): constant(60.0),
            rank0("completion_clipped_ratio"): constant(0.0),
            **{
                rank0(trainer.MEMORY, step_phase=phase): constant(30.0 * GIB)
                for phase in MemoryPhases.model_fields
            },
        },
    ),
    Story(
        name="each checkpoint takes 15 minutes",
        summary=(
            "Training stands still for 15 of 25 minutes at each checkpoint, every ten steps, until "
            "minute 150."
        ),
        minutes=190,
        at=145,
        changes={
            STEP: lambda minute: _saving_step(min(minute, 150)) + max(0, minute - 150),
            **_saving(150),
        },
        findings=("CheckpointSlow",),
    ),
    Story(
        name="full disk",
        summary="From minute 60 to 190 no checkpoint can be written.",
        minutes=230,
        at=185,
        changes={
            **constant_during({SAVED: RANK0[SAVED], SAVED_AT: RANK0[SAVED_AT]}, 60, 190),
            rank0(trainer.CHECKPOINT_FAILURES): counter(100, 101, 103, 107, 115, 131, 150, 163),
        },
        findings=("CheckpointFailing",),
        alerts=("GRPOCheckpointOld",),
    ),
    Story(
        name="on CPUs",
        summary="A small run on CPUs without a reference (training.beta: 0) is alone in its cluster.",
        minutes=100,
        at=90,
        changes={
            **absent_during(PHASES),
            **constant_series(
                1, series(operator.JOBS.name, {"namespace": "team", "phase": "Running"})
            ),
            **absent_during(
                {
                    **{
                        name: line
                        for name, line in RANK0.items()
                        if any(part in name for part in _ON_CPUS)
                    },
                    **OF_GPUS,
                    **GPU_ACCOUNTS,
                    **OTHER_RUNS,
                    **UTILISATION,
                    **WAITING,
                }
            ),
        },
    ),
)
