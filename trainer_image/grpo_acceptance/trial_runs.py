"""A run of the real trainer inside a check's process: built as a pod builds it, one after the
other.

A process start takes longer than a few steps of the tiny model, so the runs of one check share one.
The steps' numbers are TRL's own; the trainer is returned, for checks of its state.
"""

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.training_metrics import ENGINE_MISMATCH
from grpo_trainer.checkpoints.checkpoint_target import open_target
from grpo_trainer.gang import rendezvous
from grpo_trainer.gang.placement import Placement, launch_environment
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.telemetry.observer import StepObserver
from grpo_trainer.training.build_run import build
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer

from .findings import Context
from .trial_plans import write_prompts

NUMBERS = ("loss", "grad_norm", "reward", "kl", "entropy", "completions/mean_length")
"""What TRL logs of a step that must be the same in the same run."""
Step = dict[str, float]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended."""

    trainer: ReferenceGRPOTrainer
    steps: dict[int, Step]
    """NUMBERS by step."""
    seconds: list[float]
    """What each step took."""
    mismatches: list[float]
    """Differences of an engine's log-probabilities, of the steps that compare them."""
    metrics: dict[str, float]
    """What the run published last, by key."""


class Logs(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Keeps what TRL logs of each step, and the step's time."""

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.seconds: list[float] = []
        self.mismatches: list[float] = []
        self._begin = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins with its generation."""
        self._begin = time.perf_counter()

    def on_log(
        self, _: Any, state: Any, *__: Any, logs: dict[str, Any] | None = None, **___: Any
    ) -> None:
        """Keep the numbers of a step, which ends with its log."""
        logged_values = logs or {}
        numbers = {name: float(logged_values[name]) for name in NUMBERS if name in logged_values}
        if "loss" in numbers:
            self.steps[state.global_step] = numbers
            self.seconds.append(time.perf_counter() - self._begin)
            if ENGINE_MISMATCH.trl in logged_values:
                self.mismatches.append(logged_values[ENGINE_MISMATCH.trl])


def run_trial(
    context: Context,
    plan: TrainingPlan,
    prepare: Callable[[ReferenceGRPOTrainer], None] = lambda _: None,
) -> FinishedRun:
    """Build and train; `prepare` sees the trainer before its first step. A collective.

    Raises:
        TrainingError: as in a pod.
    """
    reset_parallelism()
    place = Placement(0, context.rank, context.world, 1)
    write_prompts(context)
    if not dist.is_initialized():
        os.environ.update(launch_environment(plan.rendezvous, place))
        rendezvous.join_gang(plan.rendezvous, plan.guard, plan.execution, place)
    target = open_target(plan)
    if target:
        target.claim()
    recorder = Recorder(plan.job.attempt, place, time.time())
    watchdog = Watchdog(
        plan.guard, plan.execution, plan.grace_period_seconds, recorder, lambda *_: None
    )
    built = build(plan, recorder, watchdog, StepObserver())
    logs = Logs()
    built.trainer.add_callback(logs)
    prepare(built.trainer)
    checkpoint = built.beginning.checkpoint
    try:
        built.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        built.rewards.close()
    metrics = dict(recorder.progress.metrics)
    return FinishedRun(built.trainer, logs.steps, logs.seconds, logs.mismatches, metrics)


def reset_parallelism() -> None:
    """Forget the last trainer's parallelism, so that one process can run several; the process group
    stays."""
    gc.collect()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def nonfinite_problems(steps: dict[int, Step]) -> list[str]:
    """Numbers of the steps that are not finite, as problems."""
    return [
        f"{name} of step {step} is {value}"
        for step, numbers in steps.items()
        for name, value in numbers.items()
        if not math.isfinite(value)
    ]


def largest_difference(first_run: dict[int, Step], second_run: dict[int, Step]) -> float:
    """Largest difference between two runs' numbers in the steps that both have; infinite where
    there are none."""
    common_steps = first_run.keys() & second_run.keys()
    gaps = [
        abs(value - second_run[step][name])
        for step in common_steps
        for name, value in first_run[step].items()
    ]
    return max(gaps, default=math.inf)
