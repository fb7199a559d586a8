"""Splits the global batch of one step over processes, micro-batches and generation calls.

TRL wants world * per_device_train_batch_size * gradient_accumulation_steps to be exactly one step's
completions: arithmetic on whole numbers, done here.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil, inf

from grpo_api.job import GRPOJobSpec

from ..memory import engine as terms
from ..memory.setup import Engine, Setup
from ..result.result import PlanReason, SpecRejected

MOST_SEQUENCES = 16
"""Largest micro-batch that is tried: beyond it nothing gets faster."""

CLOSE_ROUNDS = 32
"""Rounds of generation up to which every number of them is tried; past that each is larger than the
last by one part in CLOSE_ROUNDS."""

MOST_QUANTILE_TOKENS = 1 << 24
"""torch.quantile refuses more numbers (torch 2.13). With topEntropyQuantile TRL asks it for a
quantile of the completion tokens of one micro-batch of all processes."""


def step_completions(spec: GRPOJobSpec) -> int:
    """Completions of one optimizer step over all processes."""
    return spec.training.prompts_per_step * spec.training.num_generations


def generations_ahead(spec: GRPOJobSpec) -> int:
    """Optimizer steps that one generation batch feeds: 1 unless generationBatchSize asks for more,
    in whole steps."""
    size = spec.training.generation_batch_size
    return 1 if size is None else size // step_completions(spec)


def generation_batch_for(spec: GRPOJobSpec, prompts: int) -> int | None:
    """The generationBatchSize that goes with another number of prompts per step, for as many steps
    as now; None where the spec's own, or none, will do."""
    size = spec.training.generation_batch_size
    completions = prompts * spec.training.num_generations
    if size is None or size % completions == 0:
        return None
    return completions * generations_ahead(spec)


def updates_per_generation(spec: GRPOJobSpec) -> int:
    """Optimizer steps taken on one generation batch: those that it feeds, each numIterations
    times."""
    return generations_ahead(spec) * spec.training.num_iterations


def should_score_old_policy(spec: GRPOJobSpec, *, has_engine: bool) -> bool:
    """True if the policy's own log-probabilities are computed before the update: for steps off
    policy, and to compare an engine's with (TRL's _generate_and_score_completions)."""
    is_compared = has_engine and spec.training.has_engine_comparison
    return is_compared or updates_per_generation(spec) > 1


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    # Each divisor up to the root has its partner above it, so the root bounds the work.
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    large = [number // factor for factor in reversed(small) if factor * factor != number]
    return (*small, *large)


def whole_node_gpus(spec: GRPOJobSpec, gpus: int) -> int:
    """GPUs that a large gang takes of each node with `gpus`: all, or the most that the batch can be
    split over where those are more than half."""
    most = max(size for size in divisors(step_completions(spec)) if size <= gpus)
    return most if 2 * most > gpus else gpus


def accumulation(spec: GRPOJobSpec, world: int, micro_batch: int) -> int:
    """Micro-batches of one optimizer step on each of `world` processes; `world * micro_batch` must
    divide the step."""
    return step_completions(spec) // (world * micro_batch)


def generation_share(spec: GRPOJobSpec, world: int) -> int:
    """Completions that each of `world` processes generates for one generation batch."""
    return step_completions(spec) // world * generations_ahead(spec)


def generation_sizes(spec: GRPOJobSpec, world: int) -> tuple[int, ...]:
    """Completions of one process that may be generated at a time, from all of them to one: in one
    round, in two, and so on. Of the sizes that need the same rounds the smallest takes least and is
    no slower.
    """
    whole = generation_share(spec, world)
    pinned = spec.generation.sequences_at_a_time
    if pinned is not None:
        return (min(pinned, whole),)
    return _sizes_by_rounds(whole)


@lru_cache(maxsize=1024)
def _sizes_by_rounds(whole: int) -> tuple[int, ...]:
    sizes, size, rounds = [], whole, 1
    while size > 1:
        sizes.append(size)
        # Past CLOSE_ROUNDS the rounds grow by a ratio: thousands of sizes that differ by less than
        # a part in CLOSE_ROUNDS would cost the search a prediction each.
        fewest_rounds_of_less = ceil(whole / (size - 1))
        rounds = max(fewest_rounds_of_less, rounds + rounds // CLOSE_ROUNDS)
        size = ceil(whole / rounds)
    return (*sizes, 1)


def generate_calls(setup: Setup, whole: int, updates: int) -> float:
    """Calls of generate per optimizer step, below 1 where one batch feeds several steps, or how
    often an engine is filled with all that it samples at a time; `whole`: completions of a process
    for one generation batch, on which `updates` updates are taken."""
    engine = setup.engine
    if engine is None:
        return ceil(whole / setup.generation_batch) / updates
    if engine.kind == "Servers":
        completions = terms.replica_completions(setup)
    else:
        completions = whole * engine.tensor_parallel
    # As one completion ends the next begins, so the last filling may be a part of one. An engine
    # may be limited to fewer completions than it has GPUs.
    return completions / terms.sequences(setup) * engine.syncs


def sizes_at_a_time(spec: GRPOJobSpec, world: int, engine: Engine | None) -> tuple[int, ...]:
    """Completions of one process that are sampled at a time, from most to fewest."""
    whole = generation_share(spec, world)
    sizes = generation_sizes(spec, world)
    if engine is None:
        return sizes
    # Servers have room of their own: fewer at a time would save nothing on the trainer's GPUs.
    if engine.kind == "Servers":
        return (whole,)
    if not engine.most_sequences:
        return sizes
    gpus = engine.tensor_parallel
    if spec.generation.sequences_at_a_time is not None:
        return (min(whole, ceil(engine.most_sequences / gpus)),)
    most = min(whole, max(1, engine.most_sequences // gpus))
    return (most, *(size for size in sizes if size < most))


def evener_sizes(whole: int, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the smaller sizes of a generation of `whole` completions that fill their last round
    better than all larger ones."""
    fewest = inf
    for index, size in enumerate(sizes):
        # A larger size takes fewer rounds and is faster, unless more places of its last round stay
        # empty: they take as long as the others.
        places = ceil(whole / size) * size
        if places < fewest and index:
            yield size
        fewest = min(fewest, places)
        # Nothing after this can save more than one part in CLOSE_ROUNDS of the time.
        if fewest * CLOSE_ROUNDS <= whole * (CLOSE_ROUNDS + 1):
            return


def micro_batches(spec: GRPOJobSpec, world: int) -> list[int]:
    """Micro-batch sizes up to MOST_SEQUENCES that divide one process's share; only the pinned one
    when it is pinned.

    Empty when one step can't be split over `world` processes at all.
    """
    share, rest = divmod(step_completions(spec), world)
    if rest:
        return []
    pinned = spec.training.per_device_train_batch_size
    sizes = range(1, min(share, MOST_SEQUENCES) + 1) if pinned is None else [pinned]
    most = most_ranked_sequences(spec, world)
    # TRL refuses a step that its accumulation steps don't divide evenly.
    return [size for size in sizes if share % size == 0 and size <= most]


def most_ranked_sequences(spec: GRPOJobSpec, world: int) -> float:
    """Largest micro-batch whose tokens' entropies TRL can rank; infinite without
    topEntropyQuantile."""
    training = spec.training
    if training.top_entropy_quantile == 1:
        return inf
    return MOST_QUANTILE_TOKENS // (world * training.max_completion_length)


def indivisible(spec: GRPOJobSpec, world: int, where: str) -> SpecRejected:
    """Why `world` processes can't share the batch, with the next batch that they can; `where` names
    the processes."""
    training, step = spec.training, step_completions(spec)
    unit = world * (training.per_device_train_batch_size or 1)
    if step % unit == 0:
        return SpecRejected(
            PlanReason.INVALID_BATCH_SPLIT,
            f"spec.training.topEntropyQuantile {training.top_entropy_quantile:g} ranks all "
            f"completion tokens of one micro-batch of {where}, at most {MOST_QUANTILE_TOKENS:,}: "
            f"{unit} * maxCompletionLength {training.max_completion_length} are more; lower "
            "maxCompletionLength or perDeviceTrainBatchSize, or set topEntropyQuantile to 1",
        )
    pinned = f" with perDeviceTrainBatchSize {unit // world}" if unit != world else ""
    # The advice must be a valid batch. Of any `unit` consecutive numbers one is a multiple.
    prompts = next(
        n
        for n in range(training.prompts_per_step, unit * 2 + training.prompts_per_step)
        if n * training.num_generations % unit == 0
    )
    generation_batch = generation_batch_for(spec, prompts)
    with_batch = f" and generationBatchSize to {generation_batch}" if generation_batch else ""
    return SpecRejected(
        PlanReason.INVALID_BATCH_SPLIT,
        f"spec.training.promptsPerStep {training.prompts_per_step} * numGenerations "
        f"{training.num_generations} = "
        f"{step} completions per step can't be split over {where}{pinned}: it must be a multiple "
        f"of {unit}; "
        f"set spec.training.promptsPerStep to {prompts}{with_batch}",
    )
