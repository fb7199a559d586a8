"""The search: which candidates there are, which fit, and which is best.

Exists as the planner's inner loop. Enumerates GPUs, nodes, ZeRO, offload and optimizer, and in each the variants of
needs.py, at a fixed global batch; keeps the best of each family; ranks them as the objective says. Used by plan.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

from . import batch
from .demand import Method, methods
from .memory import Precision, Prediction, Setup
from .needs import Family, Need, Needs
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


class Place(NamedTuple):
    """Where a family would run."""

    pool: Pool
    layout: Layout
    room: int
    """Bytes of host memory that one pod can have."""


Placed = tuple[Place, Family]


class Search:
    """All candidates of one demand on some pools."""

    def __init__(self, needs: Needs, pools: Sequence[Pool]) -> None:
        """Finds nothing yet; `needs` may have served other searches of the same demand."""
        self._needs, self._demand = needs, needs.demand
        self._places = {pool: list(self._places_in(pool)) for pool in pools}

    def families(self) -> list[Option]:
        """Candidates of each pool and method: those that may be chosen or shown, and where none fits, all misses."""
        found = []
        for pool in self._places:
            for method, precision in self._with_precision(pool, methods(self._demand.spec)):
                placed = self._placed(pool, method, precision)
                found += self._promising(placed) or [self._best(*one) for one in placed]
        return found

    @property
    def feasible(self) -> bool:
        """Whether anything fits."""
        pairs = ((pool, pair) for pool in self._places for pair in self._possible(pool, methods(self._demand.spec)))
        return any(self._fits(*one) for pool, pair in pairs for one in self._placed(pool, *pair))

    def fitting(self) -> list[Option]:
        """Candidates that may be chosen, of the methods that depart least from what was asked; no misses.

        Enough to choose from, and much less work than all families where little fits.
        """
        allowed = sorted(methods(self._demand.spec), key=lambda method: method.tier)
        for _, alike in groupby(allowed, key=lambda method: method.tier):
            found = [option for method in alike for pool in self._places for option in self._fitting(pool, method)]
            if found:
                return found
        return []

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method on every other extent of its pool."""
        placed = self._placed(chosen.pool, chosen.method, chosen.setup.precision)
        return [chosen if place.layout == chosen.layout else self._best(place, family) for place, family in placed]

    def _fitting(self, pool: Pool, method: Method) -> list[Option]:
        found: list[Option] = []
        for pair in self._possible(pool, [method]):
            found += self._promising(self._placed(pool, *pair))
        return [option for option in found if not option.shortage]

    def _possible(self, pool: Pool, allowed: Sequence[Method]) -> list[tuple[Method, Precision]]:
        """Methods that no bound rules out before any extent is looked at."""
        pairs = self._with_precision(pool, allowed) if self._places[pool] else []
        return [pair for pair in pairs if self._needs.floor(*pair) <= pool.usable]

    def _promising(self, placed: Sequence[Placed]) -> list[Option]:
        """Of one method's extents in a pool, those that may be chosen or shown; empty where none fits.

        The smallest that fits may be chosen for its few GPUs, the fastest for its time, and within NEAR of that any. No
        variant is faster than its extent's fastest, so an extent whose fastest is too slow needs no closer look.
        """
        smallest = next((one for one in placed if self._fits(*one)), None)
        if smallest is None:
            return []
        found = [self._best(*smallest)]
        least = found[0].seconds
        bounds = ((self._option(*one, one[1].fastest).seconds, one) for one in placed if one is not smallest)
        for bound, one in sorted(bounds, key=itemgetter(0)):
            if bound > least * NEAR:
                break
            found.append(self._best(*one))
            least = min(least, least if found[-1].shortage else found[-1].seconds)
        return found

    def _with_precision(self, pool: Pool, allowed: Sequence[Method]) -> list[tuple[Method, Precision]]:
        """Methods with the precision that a pool's GPUs give them, without those whose pinned dtype they lack."""
        pairs = ((method, self._demand.precision(method, pool.hardware)) for method in allowed)
        return [(method, precision) for method, precision in pairs if precision]

    def _placed(self, pool: Pool, method: Method, precision: Precision) -> list[Placed]:
        """A method on every extent of a pool, but for ZeRO without offload on one GPU; smallest first."""
        return [
            (place, self._needs.of(place.layout.world, method, precision))
            for place in self._places[pool]
            if place.layout.world > 1 or not method.zero or method.offload
        ]

    def _places_in(self, pool: Pool) -> Iterator[Place]:
        for layout in self._layouts(pool):
            room = pool.host_room(layout, self._demand.pod_cpu) or 0
            yield Place(pool, layout, min(room, self._demand.most_memory or room))

    def _layouts(self, pool: Pool) -> Iterator[Layout]:
        """Every extent that splits the batch evenly and is within the job's limits.

        Past WHOLE_NODES, only extents of whole nodes, each at least SPACING times the last: no one runs on 28 of 32.
        """
        demand, last = self._demand, 0.0
        most = min(pool.gpus, demand.most_gpus or pool.gpus)
        for world in self._needs.worlds:
            if world > most:
                return
            pinned = world in (demand.fewest_gpus, demand.most_gpus)
            if world > WHOLE_NODES and not pinned and (world % pool.widest or world < last * SPACING):
                continue
            layout = pool.layout(world, demand.spec.placement.nodes, demand.pod_cpu)
            if layout:
                last = world
                yield layout

    @staticmethod
    def _fits(place: Place, family: Family) -> bool:
        """Whether the leanest variant does."""
        return family.host(place.layout.per_node) <= place.room and family.leanest.device <= place.pool.usable

    def _best(self, place: Place, family: Family) -> Option:
        """The fastest variant that fits; else the one that needs least."""
        usable = place.pool.usable
        if not self._fits(place, family):
            return self._option(place, family, family.leanest)
        if family.fastest.device <= usable:
            return self._option(place, family, family.fastest)
        fitting = [self._option(place, family, need) for need in family.fitting(usable)]
        return min(fitting, key=lambda option: (round(option.seconds, 6), option.setup.checkpointing))

    def _option(self, place: Place, family: Family, need: Need) -> Option:
        """One candidate with its numbers."""
        pool, layout, room = place
        calls = math.ceil(need.split.generation_batch / need.setup.generation_batch) / self._needs.updates
        return Option(
            pool, layout, family.method, need.setup, need.split, need.prediction, need.device,
            family.host(layout.per_node), room,
            step_seconds(self._demand.shape, need.setup, pool.hardware, layout, calls),
        )  # fmt: skip


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
