"""The search: which candidates there are, which fit, and which is best.

Exists as the planner's inner loop. Enumerates GPUs, nodes, ZeRO, offload, optimizer, checkpointing, micro-batch and
gather at a fixed global batch; keeps the best of each family; ranks them as the objective says. Used by plan.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from . import batch
from .demand import MOST_SEQUENCES, Demand, Method, methods
from .memory import Prediction, Setup, predict
from .memory.device import device_bytes, host_bytes
from .pools import Layout, Pool
from .steptime import step_seconds

NEAR = 1.05
"""Balanced takes fewer GPUs where that costs at most this factor in time."""
WHOLE_NODES = 16
"""GPUs past which a gang takes whole nodes only."""
SPACING = 1.25
"""Least ratio of two extents past WHOLE_NODES."""


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate with its numbers."""

    pool: Pool
    layout: Layout
    method: Method
    setup: Setup
    split: batch.BatchSplit
    prediction: Prediction
    device: int
    """Bytes that one GPU must have."""
    host: int
    """Bytes of host memory that one pod must have."""
    host_room: int
    """Bytes of host memory that one pod can have."""
    seconds: float
    """Time of one step."""

    @property
    def shortage(self) -> Literal["DeviceMemory", "HostMemory"] | None:
        """What it doesn't fit, if anything."""
        if self.device > self.pool.usable:
            return "DeviceMemory"
        return "HostMemory" if self.host > self.host_room else None

    @property
    def preference(self) -> tuple[object, ...]:
        """Among equals: fewer GPUs, no offload, lower stage, fewer nodes, less time, then anything that is stable."""
        method = self.method
        return (
            self.layout.world, method.offload, method.reference == "Offload", method.zero, self.layout.nodes,
            round(self.seconds, 6), self.pool.label, self.pool.resource, self.pool.selector, method.name,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings inside a family."""

    gather: bool
    generation_batch: int
    checkpointing: bool
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may be tried for each setting, from fastest to leanest."""

    gather: tuple[bool, ...]
    generation_batch: tuple[int, ...]
    checkpointing: tuple[bool, ...]
    micro_batch: tuple[int, ...]

    @property
    def fastest(self) -> Variant:
        """Nothing that saves memory."""
        return Variant(self.gather[0], self.generation_batch[0], self.checkpointing[0], self.micro_batch[0])

    @property
    def leanest(self) -> Variant:
        """Everything that saves memory."""
        return Variant(self.gather[-1], self.generation_batch[-1], self.checkpointing[-1], self.micro_batch[-1])


class Search:
    """All candidates of one demand on some pools."""

    def __init__(self, demand: Demand, pools: Sequence[Pool]) -> None:
        """Finds nothing yet; call `families`."""
        self._demand = demand
        self._pools = pools
        self._predictions: dict[Setup, Prediction] = {}
        self._knobs: dict[tuple[int, bool], Knobs] = {}

    def families(self) -> list[Option]:
        """The best candidate of each (pool, extent, method), or its closest miss."""
        allowed = methods(self._demand.spec)
        found = []
        for pool in self._pools:
            for layout in self._layouts(pool):
                for method in allowed:
                    option = self._best(pool, layout, method)
                    if option:
                        found.append(option)
        return found

    def _layouts(self, pool: Pool) -> Iterator[Layout]:
        """Every extent that splits the batch evenly and is within the job's limits.

        Past WHOLE_NODES, only extents of whole nodes, each at least SPACING times the last: no one runs on 28 of 32.
        """
        demand, spec = self._demand, self._demand.spec
        most = min(pool.gpus, demand.most_gpus or pool.gpus)
        last = 0.0
        for world in batch.divisors(batch.step_completions(spec)):
            if not demand.fewest_gpus <= world <= most:
                continue
            pinned = world in (demand.fewest_gpus, demand.most_gpus)
            if world > WHOLE_NODES and not pinned and (world % pool.widest or world < last * SPACING):
                continue
            layout = pool.layout(world, spec.placement.nodes, demand.pod_cpu)
            if layout and batch.micro_batches(spec, world, MOST_SEQUENCES):
                last = world
                yield layout

    def _best(self, pool: Pool, layout: Layout, method: Method) -> Option | None:
        """The fastest variant that fits; else the one that needs least."""
        if layout.world == 1 and method.zero and not method.offload:
            return None
        key = (layout.world, method.zero == 3)
        if key not in self._knobs:
            self._knobs[key] = self._tried(*key)
        knobs = self._knobs[key]
        fastest = self._option(pool, layout, method, knobs.fastest)
        if fastest is None or not fastest.shortage:
            return fastest
        leanest = self._option(pool, layout, method, knobs.leanest)
        if leanest is None or leanest.shortage:
            return leanest
        fitting = list(self._fitting(pool, layout, method, knobs))
        return min(fitting, key=lambda option: (round(option.seconds, 6), option.setup.checkpointing))

    def _fitting(self, pool: Pool, layout: Layout, method: Method, knobs: Knobs) -> Iterator[Option]:
        """For each choice of gathering and checkpointing, the largest generation and micro-batch that fit.

        Generation doesn't depend on how the update runs, so its batch is settled first; not gathering is only tried
        where gathering leaves no room for the whole generation batch.
        """
        lean = knobs.leanest
        for gather in knobs.gather:
            sizes = [Variant(gather, size, lean.checkpointing, lean.micro_batch) for size in knobs.generation_batch]
            generated = self._first_fit(pool, layout, method, sizes)
            if generated is None:
                continue
            size = generated.setup.generation_batch
            for checkpointing in knobs.checkpointing:
                tried = [Variant(gather, size, checkpointing, micro) for micro in knobs.micro_batch]
                option = self._first_fit(pool, layout, method, tried)
                if option:
                    yield option
            if size == knobs.generation_batch[0]:
                return

    def _first_fit(self, pool: Pool, layout: Layout, method: Method, variants: Sequence[Variant]) -> Option | None:
        """The first variant that fits; they are ordered by falling memory, so bisection finds it."""
        best, low, high = None, 0, len(variants)
        middle = 0
        while low < high:
            option = self._option(pool, layout, method, variants[middle])
            if option and not option.shortage:
                best, high = option, middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return best

    def _tried(self, world: int, gathers: bool) -> Knobs:
        """What the spec's pins leave open."""
        training = self._demand.spec.training
        micros = sorted(batch.micro_batches(self._demand.spec, world, MOST_SEQUENCES), reverse=True)
        saved = {"Auto": (False, True), "Enabled": (True,), "Disabled": (False,)}[training.gradient_checkpointing]
        gather = {"Auto": (True, False), "Enabled": (True,), "Disabled": (False,)}[training.ds3_gather_for_generation]
        whole = batch.split(self._demand.spec, world, micros[0]).generation_batch
        sizes = tuple(whole >> bits for bits in range(whole.bit_length()))
        return Knobs(gather if gathers else (True,), sizes, saved, tuple(micros))

    def _option(self, pool: Pool, layout: Layout, method: Method, variant: Variant) -> Option | None:
        """One candidate with its numbers; None if the GPU lacks a pinned dtype."""
        demand = self._demand
        precision = demand.precision(method, pool.hardware)
        if precision is None:
            return None
        training = demand.spec.training
        parts = batch.split(demand.spec, layout.world, variant.micro_batch)
        steps = batch.generations_ahead(demand.spec) * training.num_iterations
        setup = Setup(
            precision, training.max_prompt_length, training.max_completion_length, variant.micro_batch,
            parts.gradient_accumulation, variant.generation_batch, layout.world, method.zero, method.offload,
            demand.spec.adapter.rank if method.lora else 0, method.eight_bit, variant.checkpointing, variant.gather,
            method.reference, steps > 1,
        )  # fmt: skip
        prediction = self._predict(setup)
        calls = math.ceil(parts.generation_batch / variant.generation_batch) / steps
        room = pool.host_room(layout, demand.pod_cpu) or 0
        return Option(
            pool, layout, method, setup, parts, prediction,
            device_bytes(prediction, layout.world, demand.margin),
            host_bytes(demand.shape, setup, layout.per_node),
            min(room, demand.pod_memory or room),
            step_seconds(demand.shape, setup, pool.hardware, layout, calls),
        )  # fmt: skip

    def _predict(self, setup: Setup) -> Prediction:
        """The memory of a setup, which doesn't depend on the pool."""
        if setup not in self._predictions:
            demand = self._demand
            self._predictions[setup] = predict(demand.shape, setup, demand.reward_bytes, demand.scoring_bytes)
        return self._predictions[setup]


def choose(options: Sequence[Option], objective: Literal["Balanced", "Fastest", "FewestGPUs"]) -> Option | None:
    """The best that fits: first by what is trained, then by the objective; None if nothing fits."""
    fitting = [option for option in options if not option.shortage]
    if not fitting:
        return None
    tier = min(option.method.tier for option in fitting)
    fitting = [option for option in fitting if option.method.tier == tier]
    if objective == "FewestGPUs":
        return min(fitting, key=lambda option: option.preference)
    fastest = min(option.seconds for option in fitting)
    allowed = NEAR if objective == "Balanced" else 1.0
    return min((o for o in fitting if o.seconds <= fastest * allowed), key=lambda option: option.preference)


def closest_miss(options: Sequence[Option]) -> Option | None:
    """What comes nearest to fitting: least missing share of device, then of host memory."""

    def missing(option: Option) -> tuple[float, tuple[object, ...]]:
        device = max(0.0, option.device / max(1, option.pool.usable) - 1)
        host = max(0.0, option.host / max(1, option.host_room) - 1)
        return device + host, option.preference

    return min(options, key=missing, default=None)


def notable(options: Sequence[Option], chosen: Option | None) -> list[Option]:
    """What is worth showing: of each pool and method the best extent, and the chosen method's other extents."""
    best: dict[tuple[str, str, str], Option] = {}
    for option in options:
        key = (option.pool.label, option.pool.resource, option.method.name)
        known = best.get(key)
        if known is None or _closeness(option) < _closeness(known):
            best[key] = option
    shown = {id(option) for option in best.values()}
    return [
        option
        for option in options
        if id(option) in shown or (chosen and option.method == chosen.method and option.pool is chosen.pool)
    ]


def _closeness(option: Option) -> tuple[bool, float, tuple[object, ...]]:
    """Smaller is better: what fits by time, then what does not by how much it lacks."""
    lacks = option.device / max(1, option.pool.usable) + option.host / max(1, option.host_room)
    return option.shortage is not None, lacks if option.shortage else option.seconds, option.preference
