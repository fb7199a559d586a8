"""The job of the stories: the series that its rank 0 and the operator export while nothing is
wrong.

It finishes a step a minute on eight GPUs, and its reward grows as in successful runs.
"""

from collections.abc import Mapping

from grpo_api.plan.plan import MemoryPhases
from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.report import STEP_PHASES
from grpo_api.status.usage import GPUSeconds

from ..timelines import (
    Timeline,
    clock,
    constant,
    noise,
    noisy,
    only_during,
    running_total,
    towards,
)
from .world import NEVER, World, constant_series, of_job, rank0

GIB = 2.0**30
EVERY = 50
"""Steps between checkpoints."""
STEPS = 600
GPUS = 8
PRICE = 2.5
"""Of an hour of one GPU."""
_STEP = dict(zip(STEP_PHASES, (0.0, 29.0, 6.0, 4.0, 6.0, 12.0, 2.0), strict=True))
"""Seconds of each phase of a step. One second of the minute belongs to no phase."""
_PLANNED = dict(
    zip(MemoryPhases.model_fields, (31.0, 0.0, 58.0, 44.0, 52.0, 62.0, 49.0), strict=True)
)
"""GiB by phase."""
_SPENT = {"generating": 29.0, "scoring": 6.0, "training": 23.5, "saving": 0.5, "other": 1.0}
"""Seconds of each minute of training, by state; before it come these:"""
_BEFORE = {"loading": 90.0, "proving": 20.0, "other": 15.0}
_PRODUCTIVE = ("generating", "scoring", "training")


def checkpoint_step(step: int, resumed: int = 0) -> float | None:
    """Step of the newest checkpoint, saved every EVERY steps; a run that has resumed one has
    that."""
    return float(max(resumed, step // EVERY * EVERY)) or None


def attempt_series(number: int = 1, first: int = 0, end: int = NEVER, resumed: int = 0) -> World:
    """What rank 0 of an attempt exports from its first step, in minute `first`, to before minute
    `end`."""

    def by_step(line: Timeline) -> Timeline:
        return only_during(lambda minute: line(resumed + minute - first), first, end)

    def saved_at(step: int) -> float | None:
        saved_step = checkpoint_step(step, resumed)
        return None if saved_step is None else clock(int(saved_step) - resumed + first)

    checkpoints = {
        "checkpoint_step": lambda step: checkpoint_step(step, resumed),
        "checkpoint_timestamp_seconds": saved_at,
    }
    lines: dict[str, Timeline] = {**_LEARNED, **_WRITTEN, **_MEASURED, **checkpoints}
    world = {rank0(key, number): by_step(line) for key, line in lines.items()}
    world |= {rank0(metric, number): by_step(line) for metric, line in _PLAIN.items()}
    for reward, (line, weight) in _REWARDS.items():
        world[rank0(trainer.REWARD, number, reward=reward)] = by_step(
            noisy(line, 0.05, int(weight))
        )
        world[rank0(trainer.UNSCORED, number, reward=reward)] = by_step(constant(0.0))
    world |= counted_series({}, number, first, end)
    for phase, planned in _PLANNED.items():
        world[rank0(trainer.PREDICTED_MEMORY, number, step_phase=phase)] = by_step(
            constant(planned * GIB)
        )
        world[rank0(trainer.MEMORY, number, step_phase=phase)] = by_step(
            constant(planned * 0.97 * GIB)
        )
    return world


def counted_series(
    changes: Mapping[str, Timeline], number: int = 1, first: int = 0, end: int = NEVER
) -> World:
    """Counters of an attempt that begins in minute `first`, with what they grow by in each minute.

    `changes` are those of the tokens, and of phases by name.
    """
    increments = {"tokens": noisy(constant(312_000.0), 0.06, 16)}
    for place, (phase, seconds) in enumerate(_STEP.items()):
        increments[phase] = noisy(constant(seconds), 0.08, place)
    increments |= changes
    totals = {
        name: only_during(running_total(only_during(line, first, end)), first, end)
        for name, line in increments.items()
    }
    tokens = totals.pop("tokens")
    phases = {
        rank0(trainer.PHASE_SECONDS, number, step_phase=phase): total
        for phase, total in totals.items()
    }
    durations = rank0(trainer.STEP_SECONDS, number)
    steps = {
        durations.replace("{", f"_{part}{{", 1): only_during(
            running_total(only_during(constant(each), first, end)), first, end
        )
        for part, each in (("count", 1.0), ("sum", 60.0))
    }
    return {**steps, rank0(trainer.TOKENS, number): tokens, **phases}


_REWARDS = {
    "accuracy": (towards(0.2, 1.5), 1),
    "format": (towards(0.1, 0.5, 40.0), 2),
    "judge": (constant(0.3), 3),
}
_LEARNED: dict[str, Timeline] = {
    "kl": noisy(towards(0.005, 0.06, 300.0), 0.15),
    "reward": noisy(lambda step: sum(line(step) or 0.0 for line, _ in _REWARDS.values()), 0.04),
    "reward_std": noisy(towards(0.45, 0.3), 0.08, 5),
    "loss": lambda step: 0.015 * noise(step, 7),
    "grad_norm": noisy(constant(0.6), 0.4, 8),
    "entropy": noisy(towards(0.9, 0.45), 0.05, 9),
    "clip_ratio_low": noisy(constant(0.011), 0.5, 10),
    "clip_ratio_high": noisy(constant(0.022), 0.5, 11),
    "zero_variance_groups": constant(0.1),
}
_WRITTEN: dict[str, Timeline] = {
    "completion_length": noisy(towards(210.0, 330.0), 0.05, 12),
    "completion_length_min": noisy(constant(70.0), 0.3, 13),
    "completion_length_max": lambda step: min(786.0, 720.0 + 120 * noise(step, 14)),
    "completion_clipped_ratio": noisy(constant(0.04), 0.6, 15),
}
_MEASURED: dict[str, Timeline] = {
    "straggler_ratio": noisy(constant(1.05), 0.02, 17),
    "nonfinite_steps": constant(0.0),
}
_PLAIN: dict[operator.Metric, Timeline] = {
    trainer.STEP: float,
    trainer.TOTAL_STEPS: constant(STEPS),
    trainer.ETA: lambda step: 60.0 * (STEPS - step),
    trainer.MAX_COMPLETION: constant(786),
    trainer.SAVE_EVERY: constant(EVERY),
    trainer.MAX_KL: constant(1.0),
    trainer.REFERENCE_EVERY: constant(120),
    trainer.USABLE_MEMORY: constant(76 * GIB),
    trainer.MEMORY_BESIDE["reserved"]: constant(66 * GIB),
    trainer.MEMORY_BESIDE["device"]: constant(69 * GIB),
    trainer.MEMORY_BESIDE["host"]: noisy(constant(21 * GIB), 0.01, 18),
}


def gpu_second_series(
    *attempts: tuple[int, int, int], job: str = "run", namespace: str = "team", gpus: int = GPUS
) -> World:
    """GPU-seconds by state, and their cost: each attempt's first minute, its end, and the minutes
    lost there."""

    def seconds(state: str, minute: int) -> float:
        total = 0.0
        for first, end, lost in attempts:
            trained = max(0, min(minute, end) - first)
            forgotten = lost if minute >= end else 0
            counts = trained - forgotten if state in _PRODUCTIVE else trained
            total += _SPENT.get(state, 0.0) * counts + _BEFORE.get(state, 0.0) * (minute >= first)
            productive_share = sum(_SPENT[productive_state] for productive_state in _PRODUCTIVE)
            total += forgotten * productive_share * (state == "lost")
        return total * gpus

    def line(state: str) -> Timeline:
        return lambda minute: seconds(state, minute)

    def cost(minute: int) -> float:
        return sum(seconds(state, minute) for state in GPUSeconds.model_fields) / 3600 * PRICE

    names = {
        of_job(operator.JOB_GPU_SECONDS, job, namespace, state=state): state
        for state in GPUSeconds.model_fields
    }
    return {
        of_job(operator.JOB_COST, job, namespace): cost,
        **{name: line(state) for name, state in names.items()},
    }


RANK0 = attempt_series()
KL, STEP = rank0("kl"), rank0(trainer.STEP)
SAVED, SAVED_AT = rank0("checkpoint_step"), rank0("checkpoint_timestamp_seconds")
GOT_ON, ATTEMPTS = of_job(operator.JOB_PROGRESS_TIME), of_job(operator.JOB_ATTEMPTS)
RESTARTS = of_job(operator.JOB_RESTARTS)
PATIENCE = of_job(operator.JOB_PATIENCE, stage="Training")
INFO = of_job(operator.JOB_INFO, model="1.24B", strategy="Clone")
RUNNING = of_job(operator.JOB_PHASE, phase="Running")
OF_GPUS: World = {
    of_job(operator.JOB_GPUS, product="H100-80GB"): constant(GPUS),
    **gpu_second_series((0, NEVER, 0)),
}
JOB: World = {
    GOT_ON: clock,
    of_job(operator.JOB_STEP): float,
    **constant_series(1800.0, PATIENCE),
    **constant_series(0, RESTARTS),
    **constant_series(1, ATTEMPTS, RUNNING, INFO),
    **OF_GPUS,
}
