"""Finds changes that would make a job fit, or fit in time, and verifies each by planning it.

"Nothing fits" helps only with a way out. Changes are ordered by their cost: pins that do not change
what is trained, more GPUs, how weights are kept, the adapter, then shorter sequences. Where no
single change helps, two are combined.

A change sets one field of a spec by its path, as `--what-if` does. The changed spec is parsed
again, so it is planned exactly as if the user had written it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.spec.generation import TENSOR_PARALLEL, EngineServersSpec

from ..hardware.pools import Pool
from ..model.shapes import Shape
from ..result.formatting import gib, plural
from ..result.result import Change, Fix
from ..search.batch import divisors, step_completions
from ..search.option import Option

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
    return _cheapest_fixes(spec, _turns(spec, shape, pools), plan)


def find_faster(spec: GRPOJobSpec, pools: Sequence[Pool], plan: Planner) -> list[Fix]:
    """The same for what fits, but takes longer than a job may."""
    return _cheapest_fixes(spec, _faster_turns(spec, pools), plan)


def _cheapest_fixes(spec: GRPOJobSpec, every: Iterable[Adjustment], plan: Planner) -> list[Fix]:
    turns = [turn for turn in every if turn.values]
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
    turns = [(*before, turn._replace(values=[value])) for value in turn.values]
    # The strongest value first: where even that doesn't help, one plan has shown it instead of one
    # per value.
    strongest = _option_with(spec, turns[-1], plan)
    if strongest is None:
        return None
    options = [strongest]

    def helps(index: int) -> bool:
        option = _option_with(spec, turns[index], plan)
        if option:
            options.append(option)
        return option is not None

    # Mostly one of the first values helps, so they are tried in growing steps. Then bisection, as
    # values grow in effect: the last option found is that of the mildest.
    least, most = 0, 0
    while most < len(turns) - 1 and not helps(most):
        least, most = most + 1, 2 * most + 1
    most = min(most, len(turns) - 1)
    mildest = bisect_left(range(most), True, lo=least, key=helps)
    return _fix(turns[mildest], options[-1])


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
    yield from _pins(spec, pools)
    yield from _places(spec, pools)
    if training.dtype == "Auto":
        yield Adjustment(
            "spec.training.dtype",
            ["bfloat16"],
            "weights in bfloat16, where small updates can round away",
        )
    if spec.adapter.use == "Never":
        yield ADAPTER
    else:
        yield from _smaller_adapters(spec, shape)
    yield _shorter_completions(spec)
    prompt_lengths = _halves(training.max_prompt_length, SHORTEST)
    yield Adjustment("spec.training.maxPromptLength", prompt_lengths, "leaves out longer prompts")


def _faster_turns(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[Adjustment]:
    """What may be tried to save time, cheapest first."""
    training = spec.training
    yield from _engines(spec, pools)
    yield from _places(spec, pools)
    if spec.adapter.use == "Never":
        yield ADAPTER
    if training.max_steps:
        yield Adjustment("spec.training.maxSteps", _halves(training.max_steps, 1), "fewer steps")
    yield _shorter_completions(spec)
    fewer_prompts = _halves(training.prompts_per_step, 1)
    yield Adjustment("spec.training.promptsPerStep", fewer_prompts, "smaller steps")


ADAPTER = Adjustment(
    "spec.adapter.use", ["IfNeeded"], "trains an adapter instead of all parameters"
)


def _shorter_completions(spec: GRPOJobSpec) -> Adjustment:
    training = spec.training
    # The mean that is expected can't be above the limit.
    shortest = max(SHORTEST, training.expected_completion_length or 0)
    lengths = _halves(training.max_completion_length, shortest)
    return Adjustment("spec.training.maxCompletionLength", lengths, "cuts off longer completions")


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


def _engines(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[Adjustment]:
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
    if wanted.servers:
        yield from _servers(wanted.servers, pools)
    if wanted.engine == "Transformers":
        yield Adjustment(ENGINE, ["Auto"], "an engine, whose weights are proven at every sync")
    elif wanted.engine != "Auto":
        yield Adjustment(
            ENGINE,
            ["Auto"],
            "another engine, or Transformers, which generates slower",
        )


def _servers(servers: EngineServersSpec, pools: Sequence[Pool]) -> Iterator[Adjustment]:
    """Fewer engines in pods of their own, or such on fewer or more GPUs each."""
    replicas, gpus = servers.replicas, servers.gpus_per_replica
    fewer_engines = _halves(replicas, 1)
    fewer_cost = "fewer engines, so more time"
    yield Adjustment("spec.generation.servers.replicas", fewer_engines, fewer_cost)
    path = "spec.generation.servers.gpusPerReplica"
    yield Adjustment(path, _halves(gpus, 1), "fewer GPUs for each engine, so more time")
    # The GPUs of an engine are on one node, and the trainer needs some, too.
    most = max((min(pool.most_gpus_per_node, pool.gpus - 1) for pool in pools), default=0)
    more = [size for size in TENSOR_PARALLEL if gpus < size and replicas * size <= most]
    yield Adjustment(path, more, "more GPUs for each engine")


def _pins(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[Adjustment]:
    """Settings that only say how, not what, to train."""
    training = spec.training
    yield from _engines(spec, pools)
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
    # Without their price GPUs are left out by this objective alone.
    if placement.objective == "Cheapest":
        yield Adjustment("spec.placement.objective", ["Balanced"], "no longer by price")
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
    divisible_sizes = [size for size in divisors(step_completions(spec)) if size <= most]
    if gpus.min > most:
        fewer = divisible_sizes[::-1]
        yield Adjustment("spec.placement.gpus.min", fewer, "fewer GPUs, so more time")
    if gpus.max:
        more = [size for size in divisible_sizes if size > gpus.max]
        yield Adjustment("spec.placement.gpus.max", more, "more GPUs")


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
