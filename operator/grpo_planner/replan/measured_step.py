"""What an attempt's steps teach the next plan: how long completions are, and by how much the time
model was wrong on these GPUs."""

from collections.abc import Mapping
from math import isfinite

from grpo_api.plan.learned import Learned, MeasuredStep
from grpo_api.report.training_metrics import COMPLETION_LENGTH, PHASE_SECONDS

from ..time.step_time import StepTime
from .past_run import Run

TRAINING_PHASES = ("reference", "forward", "backward", "step")
"""Phases of a step that the time model counts as its update."""


def learned_with_step(run: Run, metrics: Mapping[str, float]) -> Learned:
    """Return what is known of the job once an attempt of this run has reported a step.

    The model's own seconds are computed with the length that was measured, without the factors that
    were known before, and for the whole of a generation: the phases are of a step that sampled.
    A step that is near what is known changes nothing.
    """
    before = run.learned.step
    length = metrics.get(COMPLETION_LENGTH.key, 0.0)
    generation = metrics.get(f"{PHASE_SECONDS.key}/generate", 0.0)
    training = sum(metrics.get(f"{PHASE_SECONDS.key}/{phase}", 0.0) for phase in TRAINING_PHASES)
    numbers = (length, generation, training)
    # Where a generation feeds several steps, most steps sample nothing.
    is_complete = all(isfinite(number) and number > 0 for number in numbers) and length >= 1
    if run.plan.accelerator != "GPU" or not is_complete:
        return run.learned
    predicted = _predicted(run, round(length))
    step = MeasuredStep(
        gpu_product=run.plan.gpu_product,
        completion_length=round(length),
        generation_seconds=round(generation, 3),
        training_seconds=round(training, 3),
        predicted_generation_seconds=round(_generation(predicted) / _share(run), 3),
        predicted_training_seconds=round(_training(predicted), 3),
    )
    if before and step.is_near(before):
        return run.learned
    return run.learned.model_copy(update={"step": step})


def _predicted(run: Run, length: int) -> StepTime:
    """What the time model says of the plan with that length, before any correction."""
    limit = run.spec.training.max_completion_length
    plan = run.plan.model_copy(update={"expected_completion_length": min(length, limit)})
    uncorrected = run.learned.model_copy(update={"step": None})
    return Run(plan, run.spec, uncorrected, run.inventory).step_time


def _generation(time: StepTime) -> float:
    return time.generation + time.gathering


def _training(time: StepTime) -> float:
    return time.compute + time.communication + time.offload


def _share(run: Run) -> float:
    """Share of a generation that one step counts."""
    return 1 / run.demand.updates_per_generation
