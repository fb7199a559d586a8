"""An oracle of the planner's choice: every candidate, each worked out by itself.

It imports nothing of grpo_planner.search. What may be combined is stated here once more, from
docs/explanation/strategies.md and docs/explanation/generation.md, so that a candidate which the
search forgets or prunes by mistake is found. Only jobs on up to 16 GPUs of a pool: past that the
search takes whole nodes, in steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.hardware.pools import Place, build_pools
from grpo_planner.memory.host import host_bytes
from grpo_planner.memory.phases import MARGIN, WORKSPACES, Predictor, device_bytes
from grpo_planner.memory.setup import Engine, Precision, Setup, Strategy, ZeroStage
from grpo_planner.model.architecture import ModelFacts, ResolvedModel, resolve_model
from grpo_planner.model.shapes import Shape
from grpo_planner.time.constants import stored_fit
from grpo_planner.time.step_time import step_time
from tests.unit.planning import counted_risk

MOST_GPUS = 16
MOST_SEQUENCES = 16
STAGES: tuple[ZeroStage, ...] = (0, 2, 3)
STRATEGIES: tuple[Strategy, ...] = ("Clone", "Sharded", "Offload", "Adapter", "None")


class Way(NamedTuple):
    """What is trained, how it is sharded and where the reference is."""

    lora: bool
    zero: ZeroStage
    offload: bool
    strategy: Strategy
    eight_bit: bool


@dataclass(frozen=True)
class Candidate:
    """One setting of everything, in one place."""

    way: Way
    place: Place
    setup: Setup
    seconds: float
    share: float
    """Of a GPU's memory."""

    @property
    def tier(self) -> int:
        """How far it departs from what was asked for."""
        return 2 if self.way.lora else int(self.way.eight_bit)

    @property
    def risk(self) -> float:
        """By how much longer its time counts."""
        return counted_risk(
            self.share,
            offloads=self.way.offload,
            strategy=self.way.strategy,
            offloads_base=self.setup.engine is not None and self.setup.engine.offloads_base,
            nodes=self.place.nodes,
            zero=self.way.zero,
        )

    @property
    def is_in_time(self) -> bool:
        """True if a step takes at most six hours by the low end of its range."""
        return self.seconds * stored_fit().low <= 6 * 3600

    @property
    def counted_seconds(self) -> float:
        """Its time with what may go wrong."""
        return self.seconds * self.risk

    def beats(self, other: "Candidate") -> bool:
        """True if it is better in both time and GPU-seconds, of what is trained alike."""
        faster = self.counted_seconds * (1 + 1e-9) < other.counted_seconds
        gpu_seconds = self.place.world * self.counted_seconds
        other_gpu_seconds = other.place.world * other.counted_seconds
        return self.tier == other.tier and faster and gpu_seconds * (1 + 1e-9) < other_gpu_seconds

    def score(self, objective: str) -> tuple[float, ...]:
        """Tier, and what the objective wants little of."""
        gpus = self.place.world
        counted = self.counted_seconds
        scores = {
            "Balanced": (0, sqrt(gpus) * counted),
            "Fastest": (0, self.seconds),
            "FewestGPUs": (gpus, counted),
            "Cheapest": (0, self.place.pool.price * gpus * counted),
        }
        return (self.tier, *scores[objective])

    def is_of(self, plan: ExecutionPlan) -> bool:
        """True if the plan has these settings."""
        setup, engine = self.setup, self.setup.engine
        published = plan.engine
        same_engine = (engine is None) == (published is None)
        if engine and published:
            at_once = self.setup.generation_batch * engine.tensor_parallel
            at_once = min(at_once, engine.most_sequences or at_once)
            same_engine = (
                engine.tensor_parallel, engine.sleeps, engine.offloads_base, at_once,
            ) == (
                published.tensor_parallel, published.sleep, published.offload_base,
                published.max_sequences,
            )  # fmt: skip
        mine = (
            "LoRA" if self.way.lora else "Full", self.way.zero, self.way.offload,
            self.way.strategy, self.way.eight_bit, self.place.pool.label, self.place.nodes,
            self.place.per_node, setup.micro_batch, setup.checkpointing, setup.gather,
        )  # fmt: skip
        theirs = (
            plan.method, plan.zero_stage, plan.offload == "CPU", plan.strategy,
            plan.optimizer == "AdamW8bit", plan.gpu_product, plan.nodes, plan.gpus_per_node,
            plan.micro_batch, plan.gradient_checkpointing, plan.gather_for_generation,
        )  # fmt: skip
        if engine is None and published is None:
            generated = plan.micro_batch * plan.steps_per_generation
            at_once = plan.generation_sub_batch or generated
            same_engine = at_once == setup.generation_batch
        return mine == theirs and same_engine


def ways(spec: GRPOJobSpec) -> Iterator[Way]:
    """Every combination that can be trained and that the spec allows."""
    wanted, beta = spec.reference.strategy, spec.training.beta
    optimizer = spec.training.optimizer
    for way in map(
        Way._make, product((False, True), STAGES, (False, True), STRATEGIES, (False, True))
    ):
        if way.eight_bit and (optimizer == "AdamW" or way.zero):
            continue
        if not way.eight_bit and optimizer == "AdamW8bit":
            continue
        if way.lora:
            consents = spec.adapter.use != "Never" and wanted in ("Auto", "Adapter", "None")
            fits_beta = way.strategy == ("None" if beta == 0 else "Adapter")
            # An adapter's moments are small: Auto keeps them in 32 bits.
            keeps_moments = not way.eight_bit or optimizer == "AdamW8bit"
            if consents and fits_beta and keeps_moments and way.zero != 2 and not way.offload:
                yield way
            continue
        if spec.adapter.use == "Always" or way.strategy == "Adapter":
            continue
        if way.offload and not way.zero:
            continue
        if (way.strategy == "None") != (beta == 0):
            continue
        if beta and wanted not in ("Auto", way.strategy):
            continue
        if way.strategy == "Clone" and way.zero == 3:
            continue
        if way.strategy == "Sharded" and way.zero != 3:
            continue
        yield way


def engines(spec: GRPOJobSpec, shape: Shape, per_node: int, way: Way) -> Iterator[Engine | None]:
    """Every engine that may sample beside a process, and None where Transformers may."""
    wanted = spec.generation
    if wanted.engine in ("Auto", "Transformers"):
        yield None
    if wanted.engine == "Transformers":
        return
    training = spec.training
    length = training.max_prompt_length + training.max_completion_length
    for gpus, sleeps in product((1, 2, 4, 8, 16), (True, False)):
        splits = shape.heads % gpus == 0 and shape.intermediate % gpus == 0
        splits_keys = shape.kv_heads % gpus == 0 or gpus % shape.kv_heads == 0
        is_open = wanted.sleep in (None, sleeps) and wanted.tensor_parallel in (None, gpus)
        if not (splits and splits_keys and is_open and per_node % gpus == 0):
            continue
        # A frozen base that lies whole on the GPU may leave it while an engine is awake there.
        for offloads in (False, True) if way.lora and not way.zero and sleeps else (False,):
            yield Engine(
                kind="Colocated",
                length=length,
                tensor_parallel=gpus,
                sleeps=sleeps,
                offloads_base=offloads,
                most_sequences=wanted.sequences_at_a_time or 0,
            )


def candidates(spec: GRPOJobSpec, inventory: Inventory) -> Iterator[Candidate]:
    """Every candidate that fits on empty nodes."""
    model = resolve_model(spec.model, ModelFacts())
    shape = model.shape
    predictor = Predictor(shape, WORKSPACES)
    pools, _ = build_pools(inventory, spec)
    completions = spec.training.prompts_per_step * spec.training.num_generations
    sizes = range(1, MOST_GPUS + 1)
    for pool, world, count in product(pools, sizes, sizes):
        if completions % world or world > pool.gpus or spec.placement.nodes not in (None, count):
            continue
        place = pool.place(world, count, None, None)
        if place is None:
            continue
        for way in ways(spec):
            if world == 1 and way.zero and not way.offload:
                continue
            for engine in engines(spec, shape, place.per_node, way):
                job = _Job(spec, model, predictor, way)
                for narrower in _by_halves(spec, engine):
                    fitting = list(_with_engine(job, place, narrower))
                    yield from fitting
                    if fitting:
                        break


def _by_halves(spec: GRPOJobSpec, engine: Engine | None) -> Iterator[Engine | None]:
    """An engine, then with ever fewer completions at a time than it has GPUs: for where no GPU has
    room for one completion of each."""
    yield engine
    if engine is None or spec.generation.sequences_at_a_time:
        return
    at_once = engine.tensor_parallel // 2
    while at_once:
        yield replace(engine, most_sequences=at_once)
        at_once //= 2


class _Job(NamedTuple):
    """A job that is trained in one way."""

    spec: GRPOJobSpec
    model: ResolvedModel
    predictor: Predictor
    way: Way


def _with_engine(job: _Job, place: Place, engine: Engine | None) -> Iterator[Candidate]:
    """Every setting of the knobs that fits in a place with an engine."""
    spec, model, predictor, way = job
    shape, pool, world = model.shape, place.pool, place.world
    completions = spec.training.prompts_per_step * spec.training.num_generations
    for setup in _setups(spec, way, _precision(spec, way), world, engine):
        # A pod asks for what the smallest micro-batch needs, whichever is taken.
        rows = completions // world
        smallest = replace(setup, micro_batch=1, accumulation=rows)
        if host_bytes(shape, smallest, place.per_node) > place.host_memory:
            return
        prediction = predictor.predict(setup)
        margin = MARGIN["Estimated" if shape.experts else model.source]
        device = device_bytes(prediction, world, margin, expandable=True)
        if device > pool.usable_bytes:
            continue
        calls = _calls(setup, rows)
        time = step_time(shape, setup, pool.hardware, place.nodes, calls)
        yield Candidate(way, place, setup, time.total, device / pool.usable_bytes)


def _calls(setup: Setup, rows: int) -> float:
    """Calls of generate, or fillings of an engine that its GPUs share; `rows` are one process's."""
    engine, limit = setup.engine, setup.generation_batch
    if engine is None:
        return -(-rows // limit)
    gpus = engine.tensor_parallel
    return rows * gpus / min(limit * gpus, engine.most_sequences or limit * gpus)


def _precision(spec: GRPOJobSpec, way: Way) -> Precision:
    if spec.training.dtype == "float32":
        return "float32" if way.zero else "mixed"
    narrow = way.zero or way.lora or spec.training.dtype == "bfloat16"
    return "bfloat16" if narrow else "mixed"


def _expected(spec: GRPOJobSpec) -> int:
    """Mean tokens of a completion: what the spec says, else the published share of the limit."""
    limit = spec.training.max_completion_length
    usual = max(1, round(stored_fit().share * limit))
    return spec.training.expected_completion_length or usual


def _setups(
    spec: GRPOJobSpec, way: Way, precision: Precision, world: int, engine: Engine | None
) -> Iterator[Setup]:
    """Every setting of the knobs."""
    training = spec.training
    share = training.prompts_per_step * training.num_generations // world
    micro_batches = [size for size in range(1, MOST_SEQUENCES + 1) if share % size == 0]
    # Of the sizes that need the same rounds, the smallest takes least and is no slower.
    at_once = sorted({-(-share // rounds) for rounds in range(1, share + 1)})
    if pinned := spec.generation.sequences_at_a_time:
        at_once = [min(share, -(-pinned // (engine.tensor_parallel if engine else 1)))]
    checkpointing = {"Auto": (False, True), "Enabled": (True,), "Disabled": (False,)}
    gathers = (True, False) if way.zero == 3 and engine is None else (True,)
    open_knobs = product(
        micro_batches, at_once, checkpointing[training.gradient_checkpointing], gathers
    )
    for micro_batch, generation_batch, recomputes, gather in open_knobs:
        yield Setup(
            precision=precision,
            prompt=training.max_prompt_length,
            completion=training.max_completion_length,
            expected=_expected(spec),
            micro_batch=micro_batch,
            accumulation=share // micro_batch,
            generation_batch=generation_batch,
            world=world,
            zero=way.zero,
            offload=way.offload,
            lora_rank=spec.adapter.rank if way.lora else 0,
            lora_targets=tuple(spec.adapter.target_modules),
            eight_bit=way.eight_bit,
            checkpointing=recomputes,
            gather=gather,
            reference=way.strategy,
            # TRL compares an engine's log-probabilities with the policy's own.
            scores_old_policy=engine is not None and training.has_engine_comparison,
            engine=engine,
        )
