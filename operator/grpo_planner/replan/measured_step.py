"""What an attempt's steps teach: the job's next plan, and the plans of other jobs of its model.

The job itself learns how long its completions are and by how much the time model was wrong on its
GPUs. Other jobs have it as a row of the cluster's measured runs.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import MAX_LENGTH, Learned, MeasuredStep
from grpo_api.report.history import standing_rows
from grpo_api.report.training_metrics import COMPLETION_LENGTH, PHASE_SECONDS
from grpo_api.status.status import GRPOJobStatus

from ..hardware.products import CPU_LABEL
from ..result.result import SpecRejected
from ..search.batch import step_completions
from ..time.measured_runs import MeasuredRow, Part, sampler_of
from ..time.step_time import StepTime
from ..time.training import scoring_passes
from .past_run import Run

TRAINING_PHASES = ("reference", "forward", "backward", "step")
"""Phases of a step that the time model counts as its update."""
WARM_UP = 2
"""Logged steps at the beginning of a run that are no measure where there are others: memory is
allocated and kernels are compiled."""


class StepSeconds(NamedTuple):
    """What was measured of a run's steps."""

    completion: float
    """Mean tokens of a completion."""
    generation: float
    """Seconds that a step which sampled did so."""
    training: float
    """Seconds that a step trained, with log-probabilities."""

    @property
    def is_complete(self) -> bool:
        """True if all numbers are plausible."""
        are_positive = all(isfinite(number) and number > 0 for number in self)
        return are_positive and 1 <= self.completion <= MAX_LENGTH

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> Self:
        """The seconds of one step, as rank 0 reports them."""
        phases = {phase: metrics.get(f"{PHASE_SECONDS.key}/{phase}", 0.0) for phase in _PHASES}
        training = sum(phases[phase] for phase in TRAINING_PHASES)
        return cls(metrics.get(COMPLETION_LENGTH.key, 0.0), phases["generate"], training)

    @classmethod
    def of_history(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """The medians of a run's logged steps; zeros where they have no such numbers."""
        steps = [_logged_step(row) for row in standing_rows([dict(row) for row in rows])]
        steps = steps[WARM_UP:] or steps
        completions = [step.completion for step in steps]
        generations = [step.generation for step in steps]
        trainings = [step.training for step in steps]
        return cls(_median(completions), _median(generations), _median(trainings))

    @classmethod
    def of_step(cls, step: MeasuredStep) -> Self:
        """The seconds in status.learned.step."""
        return cls(step.completion_length, step.generation_seconds, step.training_seconds)


_PHASES = ("generate", *TRAINING_PHASES)


def _logged_step(row: Mapping[str, Any]) -> StepSeconds:
    """One row of a history, whose numbers may be anything."""
    lengths = (COMPLETION_LENGTH.key, COMPLETION_LENGTH.trl)
    names = [f"{PHASE_SECONDS.key}/{phase}" for phase in _PHASES]
    metrics = {name: _number(row.get(name)) for name in names}
    metrics[COMPLETION_LENGTH.key] = max(_number(row.get(name)) for name in lengths)
    return StepSeconds.of_metrics(metrics)


def _number(value: object) -> float:
    """A finite number; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else 0.0  # type: ignore[arg-type]


def _median(numbers: Sequence[float]) -> float:
    """The median of those above zero: where a generation feeds several steps, most sample
    nothing."""
    positive = [number for number in numbers if number > 0]
    return median(positive) if positive else 0.0


def learned_with_step(run: Run, metrics: Mapping[str, float]) -> Learned:
    """Return what is known of the job once an attempt of this run has reported a step.

    The model's own seconds are computed with the length that was measured, without the factors that
    were known before, and for the whole of a generation: the phases are of a step that sampled.
    A step that is near what is known changes nothing.
    """
    before = run.learned.step
    measured = StepSeconds.of_metrics(metrics)
    # Where a generation feeds several steps, most steps sample nothing.
    if run.plan.accelerator != "GPU" or not measured.is_complete:
        return run.learned
    predicted = _predicted_seconds(run, measured)
    step = MeasuredStep(
        gpu_product=run.plan.gpu_product,
        completion_length=round(measured.completion),
        generation_seconds=round(measured.generation, 3),
        training_seconds=round(measured.training, 3),
        predicted_generation_seconds=round(predicted.generation, 3),
        predicted_training_seconds=round(predicted.training, 3),
    )
    if before and step.is_near(before):
        return run.learned
    return run.learned.model_copy(update={"step": step})


def measured_row(
    run: Run, measured: StepSeconds, *, source: str, date: str, cluster: str = ""
) -> MeasuredRow | None:
    """The row of a run for the plans of other jobs; None where nothing can be learned of it.

    `source` is `namespace/job`, `date` when it ended, in UTC.
    """
    if not measured.is_complete:
        return None
    try:
        return _row(run, measured, source=source, date=date, cluster=cluster)
    except (SpecRejected, ValidationError):
        # Its model is of unknown size, or a number beyond all bounds.
        return None


def _row(run: Run, measured: StepSeconds, *, source: str, date: str, cluster: str) -> MeasuredRow:
    plan = run.plan
    setup = run.setup
    training = run.spec.training
    updates = run.demand.updates_per_generation
    predicted = _predicted_seconds(run, measured)
    seconds: dict[Part, float] = {"training": round(updates * measured.training, 4)}
    model: dict[Part, float] = {"training": round(updates * predicted.training, 4)}
    # Engines on a product of their own say nothing of the trainer's.
    own_product = plan.engine.gpu_product if plan.engine else ""
    if own_product in ("", plan.gpu_product):
        seconds["generation"] = round(measured.generation, 4)
        model["generation"] = round(predicted.generation, 4)
    return MeasuredRow(
        source=source,
        cluster=cluster,
        date=date,
        model=run.spec.model.name,
        gpu=plan.gpu_product or CPU_LABEL,
        gpus=plan.world_size,
        nodes=plan.nodes,
        parameters=run.demand.shape.parameters,
        active=round(run.demand.shape.active_parameters),
        sequences=step_completions(run.spec) * updates,
        prompt=setup.mean_prompt,
        completion=round(measured.completion),
        limit=training.max_completion_length,
        updates=updates,
        scores=scoring_passes(setup),
        recompute=setup.checkpointing,
        lora=setup.has_lora,
        zero=setup.zero,
        tensor_parallel=plan.engine.tensor_parallel if plan.engine else 1,
        graphs=setup.engine.graphs if setup.engine else False,
        pass_tokens=setup.micro_batch * setup.length,
        sampler=sampler_of(setup.engine),
        seconds=seconds,
        predicted=model,
    )


def _predicted_seconds(run: Run, measured: StepSeconds) -> StepSeconds:
    """What the time model says of the plan with the measured length, before any correction, and of
    a whole generation."""
    limit = run.spec.training.max_completion_length
    length = min(round(measured.completion), limit)
    plan = run.plan.model_copy(update={"expected_completion_length": length})
    uncorrected = run.learned.model_copy(update={"step": None})
    time: StepTime = Run(plan, run.spec, uncorrected, run.inventory).step_time
    generation = (time.generation + time.gathering) * run.demand.updates_per_generation
    training = time.compute + time.communication + time.offload
    return StepSeconds(length, generation, training)


def finished_run(
    spec: GRPOJobSpec, status: GRPOJobStatus, source: str, cluster: str = ""
) -> MeasuredRow | None:
    """The row of a job that has ended with this status; None where no step of it was measured.

    `source` is its `namespace/job`, `cluster` where it ran.
    """
    plan, ended = status.plan, status.completion_time
    learned = status.learned or Learned()
    step = learned.step
    if plan is None or ended is None or step is None:
        return None
    if step.gpu_product != plan.gpu_product:
        # Its last attempt moved to other GPUs and made no step there.
        return None
    run = Run(plan, spec, learned)
    measured = StepSeconds.of_step(step)
    return measured_row(run, measured, source=source, date=ended, cluster=cluster)
