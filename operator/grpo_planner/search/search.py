"""The search: all ways of running a job in all places, without looking at all of them.

It goes through methods, pools and extents at a fixed global batch. A thousand nodes of twelve products have thousands
of options and a plan must take milliseconds, so what a cheap bound shows to be neither chosen nor shown is left out.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from ..hardware.pools import Place, Pool
from ..memory import Precision
from .choice import NEAR
from .footprints import Footprint, Footprints, Variants
from .methods import Method, methods
from .option import Option
from .steptime import step_seconds

WHOLE_NODES = 16
"""GPUs past which a gang takes whole nodes only."""
SPACING = 1.25
"""Least ratio of two extents past WHOLE_NODES."""

Extent = tuple[Place, Variants]
"""A method in one place, and its variants on so many processes."""


class Search:
    """All options of one demand on some pools."""

    def __init__(self, footprints: Footprints, pools: Sequence[Pool]) -> None:
        """Finds nothing yet; `footprints` may have served other searches of the same demand."""
        self._footprints, self._demand = footprints, footprints.demand
        self._methods = methods(self._demand.spec)
        self.pools = list(pools)
        self._places = {pool: list(self._places_in(pool)) for pool in pools}

    def options(self) -> list[Option]:
        """Options of each pool and method: those that may be chosen or shown, and where none fits, all misses."""
        found = []
        for pool in self._places:
            for method, precision in self._with_precision(pool, self._methods):
                extents = self._extents(pool, method, precision)
                found += self._promising(extents) or [self._best(*extent) for extent in extents]
        return found

    @property
    def feasible(self) -> bool:
        """Whether anything fits."""
        pairs = ((pool, pair) for pool in self._places for pair in self._possible(pool, self._methods))
        return any(self._fits(*extent) for pool, pair in pairs for extent in self._extents(pool, *pair))

    def fitting(self) -> list[Option]:
        """Options that may be chosen, of the methods that depart least from what was asked; no misses.

        Enough to choose from, and much less work than all options where little fits.
        """
        allowed = sorted(self._methods, key=lambda method: method.tier)
        for _, same_tier in groupby(allowed, key=lambda method: method.tier):
            found = [option for method in same_tier for pool in self._places for option in self._fitting(pool, method)]
            if found:
                return found
        return []

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method on every other extent of its pool."""
        method, precision = chosen.footprint.method, chosen.footprint.setup.precision
        found = self._extents(chosen.place.pool, method, precision)
        return [chosen if extent[0] == chosen.place else self._best(*extent) for extent in found]

    def _fitting(self, pool: Pool, method: Method) -> list[Option]:
        found: list[Option] = []
        for pair in self._possible(pool, [method]):
            found += self._promising(self._extents(pool, *pair))
        return [option for option in found if not option.shortage]

    def _possible(self, pool: Pool, allowed: Sequence[Method]) -> list[tuple[Method, Precision]]:
        """Methods that no bound rules out before any extent is looked at."""
        pairs = self._with_precision(pool, allowed) if self._places[pool] else []
        return [pair for pair in pairs if self._footprints.floor(*pair) <= pool.usable]

    def _promising(self, extents: Sequence[Extent]) -> list[Option]:
        """Of one method's extents in a pool, those that may be chosen or shown; empty where none fits.

        An objective takes the smallest extent that fits, the fastest, or any whose time is within NEAR of the fastest.
        An extent's fastest variant is a lower bound of its time whether or not it fits. So extents are looked at in the
        order of their bounds, and once a bound is past NEAR of the best time found, no later one can matter.
        """
        smallest = next((extent for extent in extents if self._fits(*extent)), None)
        if smallest is None:
            return []
        found = [self._best(*smallest)]
        least = found[0].seconds
        others = (extent for extent in extents if extent is not smallest)
        bounds = ((self._option(*extent, extent[1].fastest).seconds, extent) for extent in others)
        for bound, extent in sorted(bounds, key=itemgetter(0)):
            if bound > least * NEAR:
                break
            found.append(self._best(*extent))
            least = min(least, least if found[-1].shortage else found[-1].seconds)
        return found

    def _with_precision(self, pool: Pool, allowed: Sequence[Method]) -> list[tuple[Method, Precision]]:
        """Methods with the precision that a pool's GPUs give them, without those whose pinned dtype they lack."""
        pairs = ((method, self._demand.precision(method, pool.hardware)) for method in allowed)
        return [(method, precision) for method, precision in pairs if precision]

    def _extents(self, pool: Pool, method: Method, precision: Precision) -> list[Extent]:
        """A method in every place of a pool, smallest first.

        On one GPU, ZeRO has nobody to share with and only costs, unless it offloads.
        """
        return [
            (place, self._footprints.of(place.world, method, precision))
            for place in self._places[pool]
            if place.world > 1 or not method.zero or method.offload
        ]

    def _places_in(self, pool: Pool) -> Iterator[Place]:
        """A place for every number of GPUs that splits the batch evenly and is within the job's limits.

        Past WHOLE_NODES, only whole nodes, each number at least SPACING times the last: no one runs on 28 of 32.
        """
        demand, last = self._demand, 0.0
        most = min(pool.gpus, demand.most_gpus or pool.gpus)
        for world in self._footprints.worlds:
            if world > most:
                return
            pinned = world in (demand.fewest_gpus, demand.most_gpus)
            if world > WHOLE_NODES and not pinned and (world % pool.widest or world < last * SPACING):
                continue
            place = pool.place(world, demand.spec.nodes, demand.pod_cpu, demand.most_memory)
            if place:
                last = world
                yield place

    @staticmethod
    def _fits(place: Place, variants: Variants) -> bool:
        """Whether the leanest variant does; host memory first, which needs no prediction."""
        return variants.host(place.per_node) <= place.host_memory and variants.leanest.device <= place.pool.usable

    def _best(self, place: Place, variants: Variants) -> Option:
        """The fastest variant that fits; else the one that takes least."""
        usable = place.pool.usable
        if not self._fits(place, variants):
            return self._option(place, variants, variants.leanest)
        if variants.fastest.device <= usable:
            return self._option(place, variants, variants.fastest)
        fitting = [self._option(place, variants, footprint) for footprint in variants.fitting(usable)]
        return min(fitting, key=lambda option: (round(option.seconds, 6), option.footprint.setup.checkpointing))

    def _option(self, place: Place, variants: Variants, footprint: Footprint) -> Option:
        """One option with its numbers."""
        shape, setup, hardware = self._demand.shape, footprint.setup, place.pool.hardware
        seconds = step_seconds(shape, setup, hardware, place.nodes, footprint.calls)
        return Option(place, footprint, variants.host(place.per_node), seconds)
