"""The search: all ways of running a job in all places, without looking at all of them.

It goes through methods, pools and extents at a fixed global batch. A thousand nodes of twelve
products have thousands of options and a plan must take milliseconds, so what a cheap bound shows to
be neither chosen nor shown is left out.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from ..hardware.pools import Place, Pool
from ..memory.setup import Engine, Precision, Setup
from ..time.step_time import StepTime, step_time
from .demand import Demand
from .engines import Engines
from .footprints import Footprint, Footprints, Variants
from .methods import Method, methods
from .option import (
    NEARLY_FULL,
    ROOMY,
    Objective,
    Option,
    Score,
    beside,
    choose,
    is_as_good,
    precedence,
    score,
    score_of,
)

WHOLE_NODES = 16
"""GPUs past which a gang takes whole nodes only."""
SPACING = 1.25
"""Least ratio of two extents past WHOLE_NODES."""

SLOW, FAR = 60.0, 2.0
"""Seconds of a step from which a plan that would be FAR times as fast is worth a word."""

Extent = tuple[Place, Method, Precision]
"""A method in one place."""


class Search:
    """All options of one demand on some pools."""

    def __init__(
        self, footprints: Footprints, pools: Sequence[Pool], server_pools: Sequence[Pool] = ()
    ) -> None:
        """Finds nothing yet; `footprints` may have served other searches of the same demand.

        `server_pools`: where engines may be that have a product of their own.
        """
        self._footprints, self._demand = footprints, footprints.demand
        self.engines = Engines(self._demand, server_pools)
        self._settled: dict[Extent, Variants] = {}
        self._engined: dict[tuple[Extent, Engine | None], Option] = {}
        self._methods = methods(self._demand.spec)
        self._objective: Objective = self._demand.spec.placement.objective
        self.pools = list(pools)
        self._places = {pool: list(self._places_in(pool)) for pool in pools}

    @property
    def demand(self) -> Demand:
        """What the job asks for."""
        return self._demand

    @property
    def has_place(self) -> bool:
        """Whether a gang has a place at all, be there memory enough or not."""
        return any(self._places.values())

    def options(self) -> list[Option]:
        """Options of each pool and method: those that may be chosen or shown, and where none fits,
        all misses."""
        found: list[Option] = []
        for pool in self._places:
            for method, precision in self._with_precision(pool, self._methods):
                extents = self._extents(pool, method, precision)
                found += self._promising(extents) or self._misses(extents)
        return found

    @property
    def is_feasible(self) -> bool:
        """Whether anything fits."""
        pairs = (
            (pool, pair) for pool in self._places for pair in self._possible(pool, self._methods)
        )
        return any(
            self._fits(*extent) for pool, pair in pairs for extent in self._extents(pool, *pair)
        )

    def fitting(self) -> list[Option]:
        """Options that may be chosen, of the methods that depart least from what was asked; no
        misses.

        Enough to choose from, and much less work than all options where little fits.
        """
        allowed = sorted(self._methods, key=lambda method: method.tier)
        for _, same_tier in groupby(allowed, key=lambda method: method.tier):
            found = [
                option
                for method in same_tier
                for pool in self._places
                for option in self._fitting(pool, method)
            ]
            if found:
                return found
        return []

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method on every other extent of its pool."""
        method, precision = chosen.footprint.method, chosen.footprint.setup.precision
        found: list[Option] = []
        for extent in self._extents(chosen.place.pool, method, precision):
            fitting = self._good(*extent)
            if extent[0] == chosen.place:
                # A fuller variant that is faster is shown beside the chosen one.
                found += [chosen, *(o for o in fitting if o.seconds < chosen.seconds)]
            else:
                best = choose(fitting, self._objective)
                found += [best] if best else self._misses([extent])
        return found

    def with_engine(self, option: Option, engine: Engine | None) -> Option:
        """The same method in the same place with that engine: the best that fits, else what takes
        least."""
        extent = option.place, option.footprint.method, option.footprint.setup.precision
        if (extent, engine) not in self._engined:
            self._engined[extent, engine] = self._best_with(*extent, engine)
        return self._engined[extent, engine]

    def _best_with(
        self, place: Place, method: Method, precision: Precision, engine: Engine | None
    ) -> Option:
        variants = self._footprints.variants(place.world, method, precision, engine)
        best = choose(self._good_of(place, variants), self._objective)
        return best or self._option(place, variants, variants.leanest)

    def sooner(self, chosen: Option) -> Option | None:
        """On the same GPUs, what takes at most 1/FAR of the time, on more nodes or with other
        methods; None if nothing.

        Of several, what departs least from what was asked.
        """
        if chosen.seconds < SLOW:
            return None
        pool = chosen.place.pool
        found: list[Option] = []
        for pair in self._possible(pool, self._methods):
            options = self._promising(self._extents(pool, *pair), "Knee")
            found += [option for option in options if option.seconds * FAR <= chosen.seconds]
        return choose(found, "Knee")

    def sizes(self) -> list[Option]:
        """For every number of GPUs the best of what fits and departs least from what was asked,
        fewest GPUs first."""
        fitting = [
            option
            for pool in self._places
            for pair in self._possible(pool, self._methods)
            for extent in self._extents(pool, *pair)
            for option in self._good(*extent)
        ]
        tier = min((option.tier for option in fitting), default=0)
        by_world: dict[int, list[Option]] = {}
        for option in fitting:
            if option.tier == tier:
                by_world.setdefault(option.place.world, []).append(option)
        best = (choose(options, self._objective) for _, options in sorted(by_world.items()))
        return [option for option in best if option]

    def _fitting(self, pool: Pool, method: Method) -> list[Option]:
        found: list[Option] = []
        for pair in self._possible(pool, [method]):
            found += self._promising(self._extents(pool, *pair))
        return [option for option in found if not option.shortage]

    def _possible(self, pool: Pool, allowed: Sequence[Method]) -> list[tuple[Method, Precision]]:
        """Methods that no bound rules out before any extent is looked at."""
        pairs = self._with_precision(pool, allowed) if self._places[pool] else []
        engined = not self.engines.why_none
        return [
            pair
            for pair in pairs
            if self._footprints.floor(*pair, engined=engined) <= pool.usable_bytes
        ]

    def _promising(
        self, extents: Sequence[Extent], objective: Objective | None = None
    ) -> list[Option]:
        """Of one method's extents in a pool, those that may be chosen or shown; empty where none
        fits.

        What an objective compares first needs no times: where something fits, whatever comes later
        can't matter.
        """
        aim = objective or self._objective

        def first(extent: Extent) -> int:
            return precedence(aim, extent[0])

        for _, equals in groupby(sorted(extents, key=first), key=first):
            found = self._best_of([extent for extent in equals if self._fits(*extent)], aim)
            if found:
                return found
        return []

    def _best_of(self, extents: Sequence[Extent], aim: Objective) -> list[Option]:
        """Options of extents that fit, of equal precedence: those that no other excludes.

        An extent's fastest variant is a lower bound of its time whether or not it fits, and bounds
        its score. So extents are looked at in the order of their bounds, and once a bound is no tie
        with the best score found, no later one can matter.
        """
        found: list[Option] = []
        least: Score | None = None
        bounds = ((self._bound(aim, *extent), extent) for extent in extents)
        for bound, (place, method, precision) in sorted(bounds, key=itemgetter(0)):
            if least is not None and not is_as_good(aim, bound, least):
                break
            variants = self._variants(place, method, precision)
            options = self._with_room(
                self._fastest(place, variants, place.pool.usable_bytes), variants
            )
            reached = min(score_of(aim, option) for option in options)
            least = min(least or reached, reached)
            found += options if is_as_good(aim, reached, least) else options[:1]
        return found

    def _bound(
        self, objective: Objective, place: Place, method: Method, precision: Precision
    ) -> Score:
        """The best score that any variant can have."""
        setup, calls = self._variants(place, method, precision).quickest
        seconds, own = (
            self._time(place, setup, calls).total,
            beside(setup.engine, self._servers(place, setup)),
        )
        return score(objective, place, seconds, beside=own)

    def _with_precision(
        self, pool: Pool, allowed: Sequence[Method]
    ) -> list[tuple[Method, Precision]]:
        """Methods with the precision that a pool's GPUs give them, without those whose pinned dtype
        they lack."""
        pairs = ((method, self._demand.precision(method, pool.hardware)) for method in allowed)
        return [(method, precision) for method, precision in pairs if precision]

    def _extents(self, pool: Pool, method: Method, precision: Precision) -> list[Extent]:
        """A method in every place of a pool, smallest first.

        On one GPU, ZeRO has nobody to share with and only costs, unless it offloads.
        """
        return [
            (place, method, precision)
            for place in self._places[pool]
            if (place.world > 1 or not method.zero or method.offload)
            and self.engines.engines_to_try(place, precision)
        ]

    def _variants(self, place: Place, method: Method, precision: Precision) -> Variants:
        """The variants of an extent with the engine that it may have."""
        extent = (place, method, precision)
        known = self._settled.get(extent)
        if known is None:
            tried = self.engines.engines_to_try(place, precision)
            known = self._settled[extent] = self._footprints.first(place, method, precision, tried)
        return known

    def _places_in(self, pool: Pool) -> Iterator[Place]:
        """A place for every number of GPUs that splits the batch evenly and is within the job's
        limits.

        Past WHOLE_NODES, only whole nodes, each number at least SPACING times the last: no one runs
        on 28 of 32.
        """
        demand, last = self._demand, 0.0
        most = min(pool.gpus, demand.most_gpus or pool.gpus)
        for world in self._footprints.worlds:
            if world > most:
                return
            pinned = world in (demand.fewest_gpus, demand.most_gpus)
            if (
                world > WHOLE_NODES
                and not pinned
                and (world % pool.most_gpus_per_node or world < last * SPACING)
            ):
                continue
            place = pool.place(world, demand.spec.nodes, demand.pod_cpu, demand.most_memory)
            if place:
                last = world
                yield place

    def _fits(self, place: Place, method: Method, precision: Precision) -> bool:
        """Whether the leanest variant does."""
        return self._variants(place, method, precision).may_fit(place)

    def _good(self, place: Place, method: Method, precision: Precision) -> list[Option]:
        """The fastest variant that fits, with what has more room and is as good; [] if none
        fits."""
        variants = self._variants(place, method, precision)
        return self._good_of(place, variants)

    def _good_of(self, place: Place, variants: Variants) -> list[Option]:
        """The same of variants with one engine."""
        if not variants.may_fit(place):
            return []
        return self._with_room(self._fastest(place, variants, place.pool.usable_bytes), variants)

    def _with_room(self, best: Option, variants: Variants) -> list[Option]:
        """The fastest variant, and where that fills the GPU, the fastest of those that leave it
        more room."""
        found = [best]
        for share in () if self._objective == "Fastest" else (NEARLY_FULL, ROOMY):
            limit = int(share * best.place.pool.usable_bytes)
            if found[-1].footprint.device > limit >= variants.leanest.device:
                found.append(self._fastest(best.place, variants, limit))
        return found

    def _misses(self, extents: Sequence[Extent]) -> list[Option]:
        """Of each extent the variant that takes least."""
        every = ((extent[0], self._variants(*extent)) for extent in extents)
        return [self._option(place, variants, variants.leanest) for place, variants in every]

    def _fastest(self, place: Place, variants: Variants, limit: int) -> Option:
        """The fastest variant that takes no more than `limit` bytes of a GPU, where the leanest
        does."""
        if variants.fastest.device <= limit:
            return self._option(place, variants, variants.fastest)
        fitting = [
            self._option(place, variants, footprint) for footprint in variants.fitting(limit)
        ]
        return min(
            fitting,
            key=lambda option: (round(option.seconds, 6), option.footprint.setup.checkpointing),
        )

    def _option(self, place: Place, variants: Variants, footprint: Footprint) -> Option:
        """One option with its numbers."""
        time = self._time(place, footprint.setup, footprint.calls)
        return Option(
            place,
            footprint,
            variants.host(place.per_node),
            time,
            self._servers(place, footprint.setup),
        )

    def _time(self, place: Place, setup: Setup, calls: float) -> StepTime:
        servers = self._servers(place, setup)
        own = servers.hardware if servers else None
        return step_time(
            self._demand.shape, setup, place.pool.hardware, place.nodes, calls, servers=own
        )

    def _servers(self, place: Place, setup: Setup) -> Pool | None:
        """Where the engines of a setup are that have GPUs of their own."""
        return (
            self.engines.server_pool(place)
            if setup.engine and setup.engine.kind == "Servers"
            else None
        )
