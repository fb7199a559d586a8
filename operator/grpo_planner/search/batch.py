"""Splits the global batch of one step over processes, micro-batches and generation calls.

Exists because TRL needs world * per_device_train_batch_size * gradient_accumulation_steps to be exactly one step's
completions, and an exact resume needs checkpoints on generation boundaries. Used by every planning path.
"""

from dataclasses import dataclass

from grpo_api.job import GRPOJobSpec

from ..result import PlanReason, PlanRefused


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How one step's completions are cut up; all counts are per process except `world`."""

    world: int
    micro_batch: int
    gradient_accumulation: int
    steps_per_generation: int

    @property
    def once(self) -> bool:
        """Whether one micro-batch is a process's whole share of a step."""
        return self.gradient_accumulation == 1

    @property
    def generation_batch(self) -> int:
        """Completions that one process generates at a time: TRL's per-device share of generation_batch_size."""
        return self.micro_batch * self.steps_per_generation


def step_completions(spec: GRPOJobSpec) -> int:
    """Completions of one optimizer step over all processes."""
    return spec.training.prompts_per_step * spec.training.num_generations


def generations_ahead(spec: GRPOJobSpec) -> int:
    """Optimizer steps that one generation batch feeds: 1 unless generationBatchSize asks for more, in whole steps."""
    size = spec.training.generation_batch_size
    return 1 if size is None else size // step_completions(spec)


def updates_per_generation(spec: GRPOJobSpec) -> int:
    """Optimizer steps taken on one generation batch: those that it feeds, each numIterations times."""
    return generations_ahead(spec) * spec.training.num_iterations


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    return small + [number // factor for factor in reversed(small) if factor * factor != number]


def split(spec: GRPOJobSpec, world: int, micro_batch: int) -> BatchSplit:
    """The split of one step over `world` processes with the given micro-batch, which must divide."""
    accumulation = step_completions(spec) // (world * micro_batch)
    return BatchSplit(world, micro_batch, accumulation, accumulation * generations_ahead(spec))


def micro_batches(spec: GRPOJobSpec, world: int, most: int) -> list[int]:
    """Micro-batch sizes up to `most` that divide one process's share; only the pinned one when it is pinned.

    Empty when one step can't be split over `world` processes at all.
    """
    share, rest = divmod(step_completions(spec), world)
    if rest:
        return []
    pinned = spec.training.per_device_train_batch_size
    if pinned is not None:
        return [pinned] if share % pinned == 0 else []
    return [size for size in range(1, min(share, most) + 1) if share % size == 0]


def refuse_split(spec: GRPOJobSpec, world: int, where: str) -> PlanRefused:
    """The refusal of a batch that `world` processes can't share, with the nearest batch that they can."""
    training, step = spec.training, step_completions(spec)
    unit = world * (training.per_device_train_batch_size or 1)
    pinned = f" with perDeviceTrainBatchSize {unit // world}" if unit != world else ""
    prompts = next(
        n
        for n in range(training.prompts_per_step, unit * 2 + training.prompts_per_step)
        if n * training.num_generations % unit == 0
    )
    return PlanRefused(
        PlanReason.INVALID_BATCH_SPLIT,
        f"spec.training.promptsPerStep {training.prompts_per_step} * numGenerations {training.num_generations} = "
        f"{step} completions per step can't be split over {where}{pinned}: it must be a multiple of {unit}; "
        f"set spec.training.promptsPerStep to {prompts}",
    )


def save_every_steps(spec: GRPOJobSpec) -> int:
    """checkpoint.everySteps, raised so that no generated batch is half used when a checkpoint is written.

    A generation batch is used for generations_ahead * num_iterations steps; only between two of them is a resume exact
    (TRL keeps the buffered completions in memory).
    """
    period = updates_per_generation(spec)
    return -(-spec.checkpoint.every_steps // period) * period
