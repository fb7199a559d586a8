"""Advice on a plan that fits: it may be one that users won't wait for, leave GPUs idle, or have too
long sequences.

The planner's own numbers show it, and each way out has been planned.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from grpo_api.job import GRPOJobSpec, SpecInvalid

from ..hardware.pools import Pool
from ..search.batch import divisors, generation_batch_for, micro_batches, step_completions
from ..search.demand import Demand
from ..search.engines import settings_of_engines
from ..search.option import Option
from ..search.search import Search
from .fixes import ENGINE, with_value

LONG_STEP = 600.0
"""Seconds of a step beyond what users expect; then the plan says what they are spent on."""
SPENT = {
    "compute": "training",
    "generation": "generating",
    "gathering": (
        "sending the model between GPUs to generate, because no GPU has room for all of it"
    ),
    "communication": "sending gradients and weights between GPUs",
    "sync": "bringing the weights into the engines",
    "offload": "moving optimizer state between GPU and host",
}
"""What the parts of a step are called."""


def advice(search: Search, winner: Option) -> list[str]:
    """Sentences about a chosen plan."""
    demand = search.demand
    return [*_too_slow(search, winner), *_idle_gpus_message(search, winner), *_too_long(demand)]


def _too_slow(search: Search, winner: Option) -> Iterator[str]:
    """Where the time goes in a very long step, and what would be far faster on the same GPUs."""
    parts = winner.time._asdict()
    longest = max(parts, key=lambda part: parts[part])
    seconds = parts[longest]
    is_long = winner.seconds > LONG_STEP
    is_sampling = longest in ("generation", "gathering")
    estimate = f"a step is estimated at {winner.seconds:.0f} s"
    if is_long:
        estimate += f", {seconds:.0f} s of it for {SPENT[longest]}"
    faster = search.sooner(winner)
    if faster and (way := _change_message(winner, faster)):
        option = f"{faster.footprint.method.name} on {faster.place.name}"
        yield f"{estimate}: {option} would take {faster.seconds:.0f} s; {way}"
    elif is_long and is_sampling and (engined := _engined(search, winner)):
        yield f"{estimate}: with an engine a step would take {engined}"
    elif is_long:
        yield (
            f"{estimate}: fewer or shorter completions, a smaller model or larger GPUs would be "
            "faster"
        )


def _engined(search: Search, winner: Option) -> str:
    """How long a step takes with an engine that the spec excludes, or that has room on GPUs of its
    own only, and how to ask for it; empty where it would be no faster."""
    spec = search.demand.spec
    values: dict[str, Any] = {ENGINE: "Auto"}
    if spec.generation.engine != "Transformers":
        if winner.footprint.setup.engine or search.engines.why_none or settings_of_engines(spec):
            return ""
        # vLLM splits a model over a power of two of one node's GPUs.
        gpus = 1 << (winner.place.per_node.bit_length() - 1)
        values = {ENGINE: "Servers", "spec.generation.servers.gpusPerReplica": gpus}
    try:
        for path, value in values.items():
            spec = with_value(spec, path, value)
    except SpecInvalid:
        return ""
    choice = search.with_spec(spec).choice
    if choice is None or choice.footprint.setup.engine is None:
        return ""
    way = " and ".join(f"{path} to {value}" for path, value in values.items())
    # An objective may take fewer GPUs with an engine, on which a step is slower.
    is_faster = round(choice.seconds) < round(winner.seconds)
    return f"{choice.seconds:.0f} s; set {way}" if is_faster else ""


def _change_message(winner: Option, faster: Option) -> str:
    """The change of the spec that leads to a faster option; empty where none does."""
    place = faster.place
    steps = []
    if faster.tier > winner.tier and faster.footprint.method.lora:
        steps.append("set spec.adapter.use to Always, which trains an adapter only")
    elif faster.tier > winner.tier:
        steps.append("set spec.training.optimizer to AdamW8bit")
    if place.world > winner.place.world:
        steps.append(f"set spec.placement.gpus.min to {place.world}")
    return " and ".join(steps)


def _idle_gpus_message(search: Search, winner: Option) -> Iterator[str]:
    """GPUs that the plan leaves idle because an engine or the batch can't be split over more, and
    the batch with which it takes them all."""
    spec, world = search.demand.spec, winner.place.world
    whole, beside = _most_gpus(search.demand, winner)
    unit, per_node = spec.generation.tensor_parallel or 1, whole // winner.place.nodes
    is_split = winner.footprint.setup.engine and per_node % unit
    if is_split and per_node - per_node % unit == winner.place.per_node:
        yield (
            f"{whole - world} of {whole} GPUs{beside} stay idle: spec.generation.tensorParallel "
            f"{unit} needs a multiple of {unit} GPUs on each node"
        )
        return
    if whole <= world or not _has_place(search, winner, whole):
        return
    larger = (size for size in divisors(step_completions(spec)) if world < size <= whole)
    # A larger gang whose batch can be split was left out for another reason, such as the objective.
    if any(micro_batches(spec, size) and _has_place(search, winner, size) for size in larger):
        return
    way = _batch_message(search, winner.place.pool, whole)
    if not way and spec.placement.objective not in ("Balanced", "Fastest"):
        return
    micro_batch = spec.training.per_device_train_batch_size or 1
    pinned = f" with perDeviceTrainBatchSize {micro_batch}" if micro_batch > 1 else ""
    yield (
        f"{whole - world} of {whole} GPUs{beside} stay idle: {step_completions(spec)} completions "
        f"per step can't be split over {whole}{pinned}{way}"
    )


def _most_gpus(demand: Demand, winner: Option) -> tuple[int, str]:
    """The most GPUs that a gang could have on the plan's nodes, and what has others there."""
    place, pool, servers = winner.place, winner.place.pool, winner.servers
    limit, beside = demand.most_gpus or pool.gpus, ""
    if servers and servers.is_same(pool):
        limit = min(limit, pool.gpus - winner.engine_gpus)
        beside = " beside the engines'"
    numbers = [place.nodes]
    # Several nodes that the plan leaves may be for other jobs; a single one is likely left over.
    if pool.nodes == place.nodes + 1 and not demand.spec.nodes:
        numbers.append(pool.nodes)
    # Every pod has the same number of GPUs.
    most = max(min(pool.gpus_on(nodes), limit) // nodes * nodes for nodes in numbers)
    return most, beside


def _has_place(search: Search, winner: Option, world: int) -> bool:
    """True if the plan's pool has a place for a gang of `world` processes, beside the engines."""
    demand = search.demand
    place = winner.place.pool.place(world, demand.spec.nodes, demand.pod_cpu, demand.most_memory)
    return bool(place and not (winner.engine_gpus and search.engines.server_pool(place) is None))


def _batch_message(search: Search, pool: Pool, world: int) -> str:
    """The batch with which a plan takes `world` GPUs of a pool; empty where it still takes
    others."""
    spec = search.demand.spec
    prompts = _prompts_for(spec, world)
    generation_batch = generation_batch_for(spec, prompts)
    changes = {"promptsPerStep": prompts}
    if generation_batch:
        changes["generationBatchSize"] = generation_batch
    section = spec.training.model_dump(by_alias=True, exclude_unset=True) | changes
    try:
        changed = with_value(spec, "spec.training", section)
    except SpecInvalid:
        return ""
    alone = search.with_pools([pool]).with_spec(changed)
    # One pool is searched in little time, and mostly its plan shows that the batch is no use.
    for attempt in (alone, alone.with_pools(search.pools)):
        if attempt.choice is None or attempt.choice.place.world != world:
            return ""
    with_batch = f" with generationBatchSize: {generation_batch}" if generation_batch else ""
    return f"; spec.training.promptsPerStep: {prompts}{with_batch} would use all {world}"


def _prompts_for(spec: GRPOJobSpec, world: int) -> int:
    """The most prompts per step, up to the present ones, that `world` processes can share; else the
    fewest above."""
    training = spec.training
    unit = world * (training.per_device_train_batch_size or 1)
    now = training.prompts_per_step
    fewer = range(now, 0, -1)
    # `unit` prompts more always divide evenly, so the search ends.
    more = range(now, now + unit + 1)
    for prompts in chain(fewer, more):
        if prompts * training.num_generations % unit == 0:
            return prompts
    raise AssertionError("a multiple of `unit` is among the tried numbers")


def _too_long(demand: Demand) -> Iterator[str]:
    """Sequences longer than the model, by its name, probably has positions for."""
    training = demand.spec.training
    positions = demand.model.positions.tokens
    length = demand.length
    if positions and length > positions:
        yield (
            f"spec.training.maxPromptLength {training.max_prompt_length} + maxCompletionLength "
            f"{training.max_completion_length} = {length} tokens, and models of this name were "
            f"made for {positions}: lower one of them unless this one was made for more"
        )
