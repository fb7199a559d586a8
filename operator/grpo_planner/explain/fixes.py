"""Finds changes that would make a job fit, verifies each by planning it, and suggests improvements
of plans that fit.

"Nothing fits" helps only with a way out. Changes are ordered by their cost: pins that do not change
what is trained, more GPUs, how weights are kept, the adapter, then shorter sequences. Where no
single change helps, two are combined.

A change sets one field of a spec by its path, as `--what-if` does. The changed spec is parsed
again, so it is planned exactly as if the user had written it.

A plan that fits may still be one that users won't wait for: it is slow, leaves GPUs idle or has too
long sequences. The planner's own numbers show it, and an expert's advice is given.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec

from ..hardware.pools import Pool
from ..model.shapes import Shape
from ..result.formatting import gib, plural
from ..result.result import Change, Fix
from ..search.batch import divisors, generation_batch_for, micro_batches, step_completions
from ..search.demand import Demand
from ..search.engines import settings_of_engines
from ..search.option import Option
from ..search.search import Search

MOST = 3
"""Fixes that are shown."""
ACCESS_MODE = "spec.checkpoint.volumeClaimTemplate.accessMode"
ENGINE = "spec.generation.engine"
SHORTEST = 64
"""Tokens below which a completion is of no use."""
LEAST_RANK = 4
"""Rank below which an adapter is of little use."""

Planner = Callable[[GRPOJobSpec], Option | None]
"""What a changed spec would be planned as; None where nothing fits."""


class Adjustment(NamedTuple):
    """A field of the spec that may change, and its new values."""

    path: str
    values: Sequence[Any]
    """To try, growing in effect; None removes the field."""
    cost: str

    @property
    def strongest(self) -> "Adjustment":
        """The same adjustment with its strongest value only."""
        return self._replace(values=self.values[-1:])


def find_fixes(spec: GRPOJobSpec, shape: Shape, pools: Sequence[Pool], plan: Planner) -> list[Fix]:
    """The cheapest changes after which `plan` finds something that fits: at most MOST single ones,
    else one of two."""
    turns = [turn for turn in _turns(spec, shape, pools) if turn.values]
    fixes: list[Fix] = []
    for turn in turns:
        fix = _mildest_fix(spec, (), turn, plan)
        if fix:
            fixes.append(fix)
        if len(fixes) == MOST:
            break
    return fixes or _cheapest_pair(spec, turns, plan)


def _cheapest_pair(spec: GRPOJobSpec, turns: Sequence[Adjustment], plan: Planner) -> list[Fix]:
    """The cheapest two changes that help together, each no stronger than it must be; empty where
    none do."""
    pairs = combinations(turns, 2)
    cheapest_first = sorted(pairs, key=lambda pair: sum(map(turns.index, pair)))
    for first, second in cheapest_first:
        if first.path == second.path:
            continue
        strongest = (first.strongest, second.strongest)
        if not _option_with(spec, strongest, plan):
            continue
        for value in first.values:
            milder = first._replace(values=[value])
            fix = _mildest_fix(spec, (milder,), second, plan)
            if fix:
                return [fix]
    return []


def _mildest_fix(
    spec: GRPOJobSpec, before: tuple[Adjustment, ...], turn: Adjustment, plan: Planner
) -> Fix | None:
    """A turn by the first of its values that leads to a plan, after others; None when even the last
    doesn't."""
    # The strongest value first: where even that doesn't help, one plan has shown it instead of one
    # per value.
    strongest = (*before, turn.strongest)
    last_option = _option_with(spec, strongest, plan)
    if last_option is None:
        return None
    for value in turn.values[:-1]:
        turns = (*before, turn._replace(values=[value]))
        option = _option_with(spec, turns, plan)
        if option:
            return _fix(turns, option)
    return _fix(strongest, last_option)


def _option_with(spec: GRPOJobSpec, turns: Sequence[Adjustment], plan: Planner) -> Option | None:
    """What the changed spec would be planned as; None if a change is not allowed or doesn't
    help."""
    try:
        for path, values, _ in turns:
            spec = with_value(spec, path, values[-1])
    except SpecInvalid:
        # A change may break another rule of the spec, such as divisibility; then it is not a fix.
        return None
    return plan(spec)


def _fix(turns: Sequence[Adjustment], option: Option) -> Fix:
    """The fix with the plan that it leads to."""
    changes = [Change(path=path, value=_yaml(values[-1])) for path, values, _ in turns]
    instructions = " and ".join(map(_adjustment_message, turns))
    costs = "; ".join(turn.cost for turn in turns)
    method, needs = option.footprint.method.name, gib(option.footprint.device)
    gpus = plural(option.place.world, "GPU")
    outcome = f"{method} on {gpus}, {needs} per GPU, {option.seconds:.0f} s per step"
    return Fix(changes=changes, message=f"{instructions} ({costs}): {outcome}")


def _adjustment_message(turn: Adjustment) -> str:
    """`set spec.placement.nodes to 2`, or `remove spec.placement.nodes`."""
    value = turn.values[-1]
    if value is None:
        return f"remove {turn.path}"
    return f"set {turn.path} to {_yaml(value)}"


def _yaml(value: Any) -> str:
    """A value as YAML in one line."""
    if value is None:
        return "null"
    if isinstance(value, list):
        items = ", ".join(value)
        return f"[{items}]"
    return str(value)


def _turns(spec: GRPOJobSpec, shape: Shape, pools: Sequence[Pool]) -> Iterator[Adjustment]:
    """What may be tried, cheapest first."""
    training = spec.training
    yield from _pins(spec)
    yield from _places(spec, pools)
    if training.dtype == "Auto":
        yield Adjustment(
            "spec.training.dtype",
            ["bfloat16"],
            "weights in bfloat16, where small updates can round away",
        )
    if spec.adapter.use == "Never":
        yield Adjustment(
            "spec.adapter.use", ["IfNeeded"], "trains an adapter instead of all parameters"
        )
    else:
        yield from _smaller_adapters(spec, shape)
    # The mean that is expected can't be above the limit.
    shortest = max(SHORTEST, training.expected_completion_length or 0)
    completion_lengths = _halves(training.max_completion_length, shortest)
    yield Adjustment(
        "spec.training.maxCompletionLength", completion_lengths, "cuts off longer completions"
    )
    prompt_lengths = _halves(training.max_prompt_length, SHORTEST)
    yield Adjustment("spec.training.maxPromptLength", prompt_lengths, "leaves out longer prompts")


def _halves(number: int, least: int) -> list[int]:
    """Half of a number, half of that, and so on down to `least`."""
    halves = [number >> bits for bits in range(1, number.bit_length())]
    return [half for half in halves if half >= least]


def _smaller_adapters(spec: GRPOJobSpec, shape: Shape) -> Iterator[Adjustment]:
    """An adapter of lower rank, or on fewer modules where the model has those that are named."""
    ranks = _halves(spec.adapter.rank, LEAST_RANK)
    yield Adjustment("spec.adapter.rank", ranks, "a smaller adapter")
    attention = ["q_proj", "v_proj"]
    if spec.adapter.target_modules == ["all-linear"] and shape.adapted_linears(tuple(attention)):
        yield Adjustment(
            "spec.adapter.targetModules", [attention], "an adapter on queries and values alone"
        )


def _engines(spec: GRPOJobSpec) -> Iterator[Adjustment]:
    """What samples the completions: settings of an engine, then fewer or none."""
    wanted = spec.generation
    if wanted.memory_share is not None:
        yield Adjustment("spec.generation.memoryShare", [None], "the share that the engine needs")
    if wanted.sleep is False:
        yield Adjustment("spec.generation.sleep", [None], "waking the engine for every generation")
    if wanted.tensor_parallel is not None:
        yield Adjustment(
            "spec.generation.tensorParallel", [None], "as many GPUs per engine as it needs"
        )
    if wanted.sequences_at_a_time is not None:
        yield Adjustment(
            "spec.generation.sequencesAtATime", [None], "as many completions at a time as fit"
        )
    if wanted.servers and wanted.servers.replicas > 1:
        fewer = _halves(wanted.servers.replicas, 1)
        yield Adjustment("spec.generation.servers.replicas", fewer, "fewer engines, so more time")
    if wanted.engine in ("Colocated", "Servers"):
        yield Adjustment(
            ENGINE,
            ["Auto"],
            "another engine, or Transformers, which generates slower",
        )


def _pins(spec: GRPOJobSpec) -> Iterator[Adjustment]:
    """Settings that only say how, not what, to train."""
    training = spec.training
    yield from _engines(spec)
    if training.gradient_checkpointing == "Disabled":
        yield Adjustment(
            "spec.training.gradientCheckpointing",
            ["Auto"],
            "20 to 30 % more time where it is needed",
        )
    micro_batch = training.per_device_train_batch_size
    if micro_batch is not None and micro_batch > 1:
        yield Adjustment(
            "spec.training.perDeviceTrainBatchSize", [None], "smaller micro-batches, the same step"
        )
    if training.ds3_gather_for_generation == "Enabled":
        yield Adjustment(
            "spec.training.ds3GatherForGeneration", ["Auto"], "slower generation where it is needed"
        )
    reference = spec.reference
    if reference.strategy not in ("Auto", "None"):
        yield Adjustment(
            "spec.reference.strategy", ["Auto"], "another place for the same reference"
        )
    if reference.strategy == "Auto" and reference.offload is None and training.beta > 0:
        for strategy in ("Offload", "Sharded"):
            yield Adjustment(
                "spec.reference.strategy", [strategy], "another place for the same reference"
            )
    if training.optimizer == "AdamW":
        yield Adjustment(
            "spec.training.optimizer", ["Auto"], "moments in 8 bits where they are needed"
        )
    if training.dtype != "Auto":
        yield Adjustment("spec.training.dtype", ["Auto"], "the dtype that the plan chooses")


def _places(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[Adjustment]:
    """Where the gang may run: more or other GPUs, other nodes, other requests."""
    placement = spec.placement
    yield from _gpu_bounds(spec, pools)
    if spec.checkpoint.is_on_one_node:
        yield Adjustment(ACCESS_MODE, ["ReadWriteMany"], "a claim that several nodes can mount")
    if placement.nodes is not None:
        yield Adjustment("spec.placement.nodes", [None], "as many nodes as it needs")
    if placement.gpu_product:
        yield Adjustment("spec.placement.gpuProduct", [None], "another kind of GPU")
    for kind in ("limits", "requests"):
        if "memory" in getattr(spec.resources, kind):
            yield Adjustment(
                f"spec.resources.{kind}.memory", [None], "the host memory that the plan needs"
            )


def _gpu_bounds(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[Adjustment]:
    """Fewer GPUs where there are less than the spec asks for, more where it asks for less than
    there are."""
    gpus = spec.placement.gpus
    if gpus is None:
        return
    most = max((pool.gpus for pool in pools), default=0)
    if spec.most_gpus is not None:
        most = min(most, spec.most_gpus)
    if gpus.min > most:
        divisible_sizes = divisors(step_completions(spec))
        fewer = [size for size in reversed(divisible_sizes) if size <= most]
        yield Adjustment("spec.placement.gpus.min", fewer, "fewer GPUs, so more time")
    if gpus.max and gpus.max < most:
        doubled = [gpus.max * 2**power for power in range(1, 10)]
        more = [size for size in doubled if size <= most]
        yield Adjustment("spec.placement.gpus.max", more or [most], "more GPUs")


def with_value(spec: GRPOJobSpec, path: str, value: Any) -> GRPOJobSpec:
    """The spec with the field at `path`, such as `spec.training.numGenerations`, set; None removes
    it.

    Raises:
        SpecInvalid: there is no such field, or the value is not allowed there.
    """
    document: dict[str, Any] = spec.model_dump(by_alias=True, exclude_unset=True)
    *parents, last = path.removeprefix("spec.").split(".")
    section = document
    for name in parents:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise SpecInvalid([f"{path}: {name} is {section!r:.80}, which has no fields to set"])
    if value is None:
        section.pop(last, None)
    else:
        section[last] = value
    return parse_spec(document)


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
    if faster:
        option = f"{faster.footprint.method.name} on {faster.place.name}"
        way = _change_message(winner, faster)
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
    """The change of the spec that leads to a faster option."""
    place = faster.place
    method = faster.footprint.method
    steps = []
    if faster.tier > winner.tier and method.lora:
        steps.append("set spec.adapter.use to Always, which trains an adapter only")
    elif faster.tier > winner.tier:
        steps.append("set spec.training.optimizer to AdamW8bit")
    if place.world > winner.place.world:
        steps.append(f"set spec.placement.gpus.min to {place.world}")
    return " and ".join(steps) or f"pin {method.name}"


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
