"""Finds changes that would make a job fit, verifies each by planning it, and suggests improvements
of plans that fit.

"Nothing fits" helps only with a way out. Changes are ordered by their cost: pins that do not change
what is trained, more GPUs, how weights are kept, the adapter, then shorter sequences. Where no
single change helps, two are combined.

A change sets one field of a spec by its path, as `--what-if` does. The changed spec is parsed
again, so it is planned exactly as if the user had written it.

A plan that fits may still be one that nobody wants to wait for: it is slow, leaves GPUs idle or has
too long sequences. The planner's own numbers show it, and an expert's advice is given.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec

from ..hardware.pools import Pool
from ..model.shapes import Shape
from ..result.formatting import gib, plural
from ..result.result import Change, Fix
from ..search.batch import divisors, micro_batches, step_completions
from ..search.demand import Demand
from ..search.option import Option
from ..search.search import Search

MOST = 3
"""Fixes that are shown."""
ACCESS_MODE = "spec.checkpoint.volumeClaimTemplate.accessMode"
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
        fix = _mildest(spec, (), turn, plan)
        if fix:
            fixes.append(fix)
        if len(fixes) == MOST:
            break
    return fixes or _pair(spec, turns, plan)


def _pair(spec: GRPOJobSpec, turns: Sequence[Adjustment], plan: Planner) -> list[Fix]:
    """The cheapest two changes that help together, each no stronger than it must be; empty where
    none do."""
    for first, second in sorted(
        combinations(turns, 2), key=lambda pair: sum(map(turns.index, pair))
    ):
        if first.path == second.path or not _planned(
            spec, (first.strongest, second.strongest), plan
        ):
            continue
        for value in first.values:
            fix = _mildest(spec, (first._replace(values=[value]),), second, plan)
            if fix:
                return [fix]
    return []


def _mildest(
    spec: GRPOJobSpec, before: tuple[Adjustment, ...], turn: Adjustment, plan: Planner
) -> Fix | None:
    """A turn by the first of its values that leads to a plan, after others; None when even the last
    doesn't."""
    # The strongest value first: where even that doesn't help, one plan has shown it instead of one
    # per value.
    last = _planned(spec, (*before, turn.strongest), plan)
    if last is None:
        return None
    for value in turn.values[:-1]:
        turned = (*before, turn._replace(values=[value]))
        option = _planned(spec, turned, plan)
        if option:
            return _fix(turned, option)
    return _fix((*before, turn.strongest), last)


def _planned(spec: GRPOJobSpec, turned: Sequence[Adjustment], plan: Planner) -> Option | None:
    """What the changed spec would be planned as; None if a change is not allowed or doesn't
    help."""
    try:
        for path, values, _ in turned:
            spec = with_value(spec, path, values[-1])
    except SpecInvalid:
        # A change may break another rule of the spec, such as divisibility; then it is not a fix.
        return None
    return plan(spec)


def _fix(turned: Sequence[Adjustment], option: Option) -> Fix:
    """The fix with the plan that it leads to."""
    changes = [Change(path=path, value=_written(values[-1])) for path, values, _ in turned]
    todo = " and ".join(map(_adjustment_message, turned))
    costs = "; ".join(turn.cost for turn in turned)
    footprint = option.footprint
    where = (
        f"{footprint.method.name} on {plural(option.place.world, 'GPU')}, "
        f"{gib(footprint.device)} per GPU"
    )
    return Fix(changes=changes, message=f"{todo} ({costs}): {where}")


def _adjustment_message(turn: Adjustment) -> str:
    """`set spec.placement.nodes to 2`, or `remove spec.placement.nodes`."""
    value = turn.values[-1]
    return f"remove {turn.path}" if value is None else f"set {turn.path} to {_written(value)}"


def _written(value: Any) -> str:
    """A value as YAML in one line."""
    if value is None:
        return "null"
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


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
    yield Adjustment("spec.training.maxCompletionLength", _halves(training.max_completion_length,
    SHORTEST),
               "cuts off longer completions")  # fmt: skip
    yield Adjustment("spec.training.maxPromptLength", _halves(training.max_prompt_length, SHORTEST),
               "leaves out longer prompts")  # fmt: skip


def _halves(number: int, least: int) -> list[int]:
    """Half of a number, half of that, and so on down to `least`."""
    return [number >> bits for bits in range(1, number.bit_length()) if number >> bits >= least]


def _smaller_adapters(spec: GRPOJobSpec, shape: Shape) -> Iterator[Adjustment]:
    """An adapter of lower rank, or on fewer modules where the model has those that are named."""
    yield Adjustment(
        "spec.adapter.rank", _halves(spec.adapter.rank, LEAST_RANK), "a smaller adapter"
    )
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
    if wanted.servers and wanted.servers.replicas > 1:
        fewer = [
            wanted.servers.replicas >> bits
            for bits in range(1, wanted.servers.replicas.bit_length())
        ]
        yield Adjustment("spec.generation.servers.replicas", fewer, "fewer engines, so more time")
    if wanted.engine in ("Colocated", "Servers") and not wanted.servers:
        yield Adjustment(
            "spec.generation.engine",
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
    if (
        training.per_device_train_batch_size is not None
        and training.per_device_train_batch_size > 1
    ):
        yield Adjustment(
            "spec.training.perDeviceTrainBatchSize", [None], "smaller micro-batches, the same step"
        )
    if training.ds3_gather_for_generation == "Enabled":
        yield Adjustment(
            "spec.training.ds3GatherForGeneration", ["Auto"], "slower generation where it is needed"
        )
    if spec.reference.strategy not in ("Auto", "None"):
        yield Adjustment(
            "spec.reference.strategy", ["Auto"], "another place for the same reference"
        )
    if (
        spec.reference.strategy == "Auto"
        and spec.reference.offload is None
        and spec.training.beta > 0
    ):
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
    if gpus.min > most:
        fewer = [size for size in reversed(divisors(step_completions(spec))) if size <= most]
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
"""Seconds of a step that nobody expects; then the plan says what they are spent on."""
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


def advice(search: Search, chosen: Option) -> list[str]:
    """Sentences about a chosen plan."""
    demand = search.demand
    return [*_too_slow(search, chosen), *_idle(demand, chosen), *_too_long(demand)]


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
            f"{head}: {faster.footprint.method.name} on {faster.place.name} would take "
            f"{faster.seconds:.0f} s; "
            f"{_way(chosen, faster)}"
        )
    elif chosen.seconds > LONG_STEP:
        yield (
            f"{spent}: fewer or shorter completions, a smaller model or larger GPUs would be faster"
        )


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
    """GPUs of the plan's nodes that it leaves idle only because the batch can't be split over
    them."""
    place = chosen.place
    spec = demand.spec
    most = demand.most_gpus or place.pool.gpus
    whole = min(place.nodes * place.pool.most_gpus_per_node, most)
    if whole <= place.world:
        return
    # A larger gang whose batch can be split was left out for another reason, such as the objective.
    larger = range(place.world + 1, whole + 1)
    if any(micro_batches(spec, world) for world in larger):
        return
    prompts = _prompts_for(spec, whole)
    yield (
        f"{whole - place.world} of {whole} GPUs stay idle: {step_completions(spec)} completions "
        "per step can't be "
        f"split over {whole}; spec.training.promptsPerStep: {prompts} would use all {whole}"
    )


def _prompts_for(spec: GRPOJobSpec, world: int) -> int:
    """The most prompts per step, up to the present ones, that so many processes can share; else the
    fewest above."""
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
    training = demand.spec.training
    positions = demand.positions
    length = demand.length
    if positions and length > positions:
        yield (
            f"spec.training.maxPromptLength {training.max_prompt_length} + maxCompletionLength "
            f"{training.max_completion_length} = {length} tokens, more than the model's "
            "max_position_embeddings "
            f"{positions}: it was never trained on such positions; lower one of them"
        )
