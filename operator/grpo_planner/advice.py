"""What an expert would remark on a plan that stands: slow for what it is, GPUs left idle, sequences too long.

A plan that fits is not yet one that anybody wants to wait for; the numbers that show it are the planner's own.
"""

from collections.abc import Iterator
from itertools import chain

from grpo_api.job import GRPOJobSpec

from .search.batch import micro_batches, step_completions
from .search.demand import Demand
from .search.option import Option
from .search.search import Search

LONG_STEP = 600.0
"""Seconds of a step that nobody expects; then the plan says what they are spent on."""
SPENT = {
    "compute": "training",
    "generation": "generating",
    "gathering": "sending the model between GPUs to generate, because no GPU has room for all of it",
    "communication": "sending gradients and weights between GPUs",
    "sync": "bringing the weights into the engines",
    "offload": "moving optimizer state between GPU and host",
}
"""What the parts of a step are called."""


def advice(search: Search, chosen: Option) -> list[str]:
    """Sentences about a chosen plan."""
    return [*_too_slow(search, chosen), *_idle(search.demand, chosen), *_too_long(search.demand)]


def _too_slow(search: Search, chosen: Option) -> Iterator[str]:
    """Where the time goes in a very long step, and what would be far faster on the same GPUs."""
    parts = chosen.time._asdict()
    name = max(parts, key=lambda part: parts[part])
    estimate = f"a step is estimated at {chosen.seconds:.0f} s"
    spent = f"{estimate}, {parts[name]:.0f} s of it for {SPENT[name]}"
    faster = search.sooner(chosen)
    if faster:
        head = spent if chosen.seconds > LONG_STEP else estimate
        yield (
            f"{head}: {faster.footprint.method.name} on {faster.place.name} would take {faster.seconds:.0f} s; "
            f"{_way(chosen, faster)}"
        )
    elif chosen.seconds > LONG_STEP:
        yield f"{spent}: fewer or shorter completions, a smaller model or larger GPUs would be faster"


def _way(chosen: Option, faster: Option) -> str:
    """The change of the spec that leads to a faster option."""
    place = faster.place
    steps = []
    if faster.tier > chosen.tier and faster.footprint.method.lora:
        steps.append("set spec.adapter.use to Always, which trains an adapter only")
    elif faster.tier > chosen.tier:
        steps.append("set spec.training.optimizer to AdamW8bit")
    if place.world != chosen.place.world:
        steps.append(f"set spec.placement.gpus.min to {place.world}")
    return " and ".join(steps) or f"pin {faster.footprint.method.name}"


def _idle(demand: Demand, chosen: Option) -> Iterator[str]:
    """GPUs of the plan's nodes that it leaves idle only because the batch can't be split over them."""
    place, spec = chosen.place, demand.spec
    most = demand.most_gpus or place.pool.gpus
    whole = min(place.nodes * place.pool.widest, most)
    if whole <= place.world:
        return
    # A larger gang whose batch can be split was left out for another reason, such as the objective.
    larger = range(place.world + 1, whole + 1)
    if any(micro_batches(spec, world) for world in larger):
        return
    prompts = _prompts_for(spec, whole)
    yield (
        f"{whole - place.world} of {whole} GPUs stay idle: {step_completions(spec)} completions per step can't be "
        f"split over {whole}; spec.training.promptsPerStep: {prompts} would use all {whole}"
    )


def _prompts_for(spec: GRPOJobSpec, world: int) -> int:
    """The most prompts per step, up to the present ones, that so many processes can share; else the fewest above."""
    training = spec.training
    unit = world * (training.per_device_train_batch_size or 1)
    now = training.prompts_per_step
    # `unit` prompts more always divide evenly, so the search ends.
    for prompts in chain(range(now, 0, -1), range(now, now + unit + 1)):
        if prompts * training.num_generations % unit == 0:
            return prompts
    raise AssertionError("a multiple of `unit` is among the tried numbers")


def _too_long(demand: Demand) -> Iterator[str]:
    """Sequences longer than the model has positions for."""
    training, positions, length = demand.spec.training, demand.positions, demand.length
    if positions and length > positions:
        yield (
            f"spec.training.maxPromptLength {training.max_prompt_length} + maxCompletionLength "
            f"{training.max_completion_length} = {length} tokens, more than the model's max_position_embeddings "
            f"{positions}: it was never trained on such positions; lower one of them"
        )
