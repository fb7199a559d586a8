"""The search: every way of running a job in every place, without looking at all of them.

A candidate is a method in a place with an engine, at every setting of its knobs and a fixed global
batch. A thousand nodes of twelve products have tens of thousands, and a plan must take
milliseconds. So one loop goes through them in the order of a lower bound of their score, and stops
where the bound has reached the best score found: nothing later can be better.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count, groupby, product
from math import inf

from grpo_api.text.timing import DAY, HOUR

from ..hardware.pools import Place, Pool
from ..memory.host import ENGINE_PROCESS
from ..memory.setup import Engine, Precision
from ..time.measured_runs import StepCorrection
from .demand import Demand
from .engines import Engines
from .extent import Entry, Extent, Times
from .footprints import Footprint, Footprints, Variants
from .methods import Method, methods
from .option import (
    SHARES,
    Objective,
    Option,
    Score,
    beside,
    choose,
    least_seconds,
    place_risk,
    score,
    score_of,
)

WHOLE_NODES = 16
"""GPUs past which a gang takes whole nodes only."""
SPACING = 1.25
"""Least ratio of two extents past WHOLE_NODES."""

LONGEST_STEP, LONGEST_RUN = 6 * HOUR, 90 * DAY
"""Seconds of a step and of all steps past which a plan is refused, unless placement.allowSlow."""
SLOW, FAR = 60.0, 2.0
"""Seconds of a step from which a plan that would be FAR times as fast is worth a word."""

TimeLimit = Callable[[float, StepCorrection | None], bool]
"""Whether a step of these seconds, with what was measured on its GPUs, is short enough. Where one
is, shorter ones are, too."""


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
        self._all: dict[tuple[Pool, Method], list[Extent]] = {}
        self._times = Times(self._demand, self.engines)
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

    @property
    def is_feasible(self) -> bool:
        """Whether anything fits."""
        return any(map(self._may_fit, self._roomy_extents))

    def has_fitting(self, is_wanted: Callable[[int], bool], tier: int) -> bool:
        """Whether a method of the tier fits on a number of GPUs that is wanted."""
        return any(
            is_wanted(extent.place.world) and self._may_fit(extent)
            for extent in self._roomy_extents
            if extent.method.tier == tier
        )

    def _may_fit(self, extent: Extent) -> bool:
        """Whether an extent fits with any engine."""
        return extent.may_train and any(
            variants.may_fit(extent.place) for variants in extent.variants
        )

    @cached_property
    def choice(self) -> Option | None:
        """What the job is planned as: the best option that takes no longer than a job may, by the
        low end of its range; None where none fits, or none in time."""

        def is_in_time(seconds: float, correction: StepCorrection | None) -> bool:
            return least_seconds(seconds, correction) <= self.most_seconds

        trainable = (extent for extent in self._roomy_extents if extent.may_train)
        if not any(self._may_be_in_time(extent, is_in_time) for extent in trainable):
            return None
        best = self.best()
        if best is None or is_in_time(best.seconds, best.correction):
            return best
        return self.best(is_in_time=is_in_time)

    @cached_property
    def most_seconds(self) -> float:
        """Longest step that a plan may have."""
        spec = self._demand.spec
        if spec.placement.allow_slow:
            return inf
        steps = spec.training.max_steps
        return min(LONGEST_STEP, LONGEST_RUN / steps) if steps else LONGEST_STEP

    def misses(self) -> list[Option]:
        """Of each extent of each pool and method what lacks least; for a job that nothing fits."""
        return [self._miss(extent) for extent in self._all_extents]

    def comparable_options(self, chosen: Option) -> list[Option]:
        """What the chosen option is shown beside: the best of every other method in its pool, and
        of every other pool, or what lacks least there."""
        own = chosen.place.pool
        groups = [list(self._extents(own, method)) for method in self._methods]
        groups += [
            [extent for method in self._methods for extent in self._extents(pool, method)]
            for pool in self._places
            if pool is not own
        ]
        found: list[Option] = []
        for extents in groups:
            best = self.best(extents)
            found += [best] if best else [self._miss(extent) for extent in extents]
        return found

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method's best on every other extent of its pool."""
        method = chosen.footprint.method
        found: list[Option] = [chosen]
        for extent in self._extents(chosen.place.pool, method):
            if extent.place == chosen.place:
                continue
            found.append(self.best([extent]) or self._miss(extent))
        return found

    def rivals(self, chosen: Option) -> list[Option]:
        """The chosen method in its place with other engines: of each kind, asleep and awake, with
        and without an offloaded base, the best that fits, else what takes least."""
        footprint = chosen.footprint
        extents = self._extents(chosen.place.pool, footprint.method)
        extent = next(extent for extent in extents if extent.place == chosen.place)
        own = _sort_of_engine(footprint.setup.engine)
        by_sort: dict[object, list[Option]] = {}
        for variants in extent.variants:
            best_option = choose(self._options_with(extent, variants), self._objective)
            option = best_option or self._leanest(extent, variants)
            by_sort.setdefault(_sort_of_engine(variants.engine), []).append(option)
        by_sort.pop(own, None)
        best = (
            choose(options, self._objective) or min(options, key=lambda option: option.device_share)
            for options in by_sort.values()
        )
        return list(best)

    def sooner(self, chosen: Option) -> Option | None:
        """On the same GPUs, what takes at most 1/FAR of the time, on more of them or with other
        methods; None if nothing.

        Of several, what departs least from what was asked.
        """
        if chosen.seconds < SLOW:
            return None
        pool = chosen.place.pool
        limit = chosen.seconds / FAR
        for tier in sorted({method.tier for method in self._methods}):
            extents = [
                extent
                for method in self._methods
                if method.tier == tier
                for extent in self._extents(pool, method)
                if self._times.least_step(extent) <= limit
            ]
            # The fastest is found soon. Only where it is fast enough, others are, too.
            fastest = self.best(extents, "Fastest")
            if fastest and fastest.seconds <= limit:
                return self.best(
                    extents, "Balanced", is_in_time=lambda seconds, _: seconds <= limit
                )
        return None

    def sizes(self) -> list[Option]:
        """For every number of GPUs the best of what fits and departs least from what was asked,
        fewest GPUs first."""
        by_world: dict[int, list[Extent]] = {}
        for extent in self._all_extents:
            by_world.setdefault(extent.place.world, []).append(extent)
        best = [self.best(extents) for _, extents in sorted(by_world.items())]
        fitting = [option for option in best if option]
        tier = min((option.tier for option in fitting), default=0)
        return [option for option in fitting if option.tier == tier]

    def best(
        self,
        extents: Iterable[Extent] | None = None,
        objective: Objective | None = None,
        *,
        is_in_time: TimeLimit | None = None,
    ) -> Option | None:
        """The best option that fits of these extents, or of all, and is in time; None where none
        is.

        Methods that depart more from what was asked are looked at where none that departs less
        has such an option.
        """
        aim = objective or self._objective
        every = self._roomy_extents if extents is None else extents
        by_tier = sorted(every, key=lambda extent: extent.method.tier)
        for _, same_tier in groupby(by_tier, key=lambda extent: extent.method.tier):
            if best := self._best_of(same_tier, aim, is_in_time):
                return best
        return None

    def _best_of(
        self, extents: Iterable[Extent], aim: Objective, is_in_time: TimeLimit | None
    ) -> Option | None:
        """The same of extents whose methods depart equally from what was asked.

        Entries wait in the order of a lower bound of their score: first an extent, bounded by its
        fastest settings and the fastest engine of its place, then the extent with each engine. An
        entry whose bound is above the best score reached can hold nothing better, nor can those
        after it. An extent that can't be in time is left out.
        """
        serial = count()
        waiting = [
            Entry(self._bound(aim, extent), next(serial), extent, None)
            for extent in extents
            if (is_in_time is None or self._may_be_in_time(extent, is_in_time)) and extent.may_train
        ]
        heapq.heapify(waiting)
        best: Option | None = None
        while waiting:
            entry = heapq.heappop(waiting)
            if best and entry.bound > score_of(aim, best):
                break
            extent = entry.extent
            if entry.variants is None:
                for variants in extent.variants:
                    bound = self._bound_with(aim, extent, variants)
                    heapq.heappush(waiting, Entry(bound, next(serial), extent, variants))
                continue
            options = self._options_with(extent, entry.variants)
            if is_in_time:
                options = [
                    option for option in options if is_in_time(option.seconds, option.correction)
                ]
            best = choose([best, *options] if best else options, aim)
        return best

    def _may_be_in_time(self, extent: Extent, is_in_time: TimeLimit) -> bool:
        """Whether the fastest training of an extent is in time, with any engine of its place."""
        # Not its sampling: of completions far below their limit, fewer at a time may be faster.
        seconds = self._times.least_training(extent)
        return any(
            is_in_time(seconds, self._times.correction(extent.place, engine))
            for engine in extent.candidates
        )

    def _bound(self, aim: Objective, extent: Extent) -> Score:
        """The best score that an extent can have."""
        risk = place_risk(extent.place, extent.method)
        return score(aim, extent.place, self._times.least_step(extent), risk)

    def _bound_with(self, aim: Objective, extent: Extent, variants: Variants) -> Score:
        """The best score that an extent can have with the engine of these variants.

        Training is as fast as in the room of a GPU without an engine, which only takes of it. Of a
        GPU filled to each of SHARES, the best is taken, as each counts otherwise.
        """
        place, method = extent.place, extent.method
        setup, calls = variants.quickest
        sampling = sum(self._times.sampling(extent, setup, calls))
        gpus_beside = beside(variants.engine, self._times.servers(place, variants.engine))
        risk = place_risk(place, method, variants.engine)
        return min(
            score(aim, place, training + sampling, risk * crowded, beside=gpus_beside)
            for training, crowded in self._times.fitting_training(extent)
        )

    def _options_with(self, extent: Extent, variants: Variants) -> list[Option]:
        """What fits of an extent with the engine of these variants, as far as it may be chosen."""
        if variants not in extent.options:
            fits = variants.may_fit(extent.place)
            options = self._fitting_options(extent, variants) if fits else ()
            extent.options[variants] = list(options)
        return extent.options[variants]

    def _fitting_options(self, extent: Extent, variants: Variants) -> Iterator[Option]:
        """The fastest options that fill a GPU up to each of SHARES: a score weighs time against
        room."""
        usable = extent.place.pool.usable_bytes
        footprints: dict[int, Footprint] = {}
        for share in SHARES:
            limit = int(share * usable)
            if variants.fastest.device <= limit:
                footprints[id(variants.fastest)] = variants.fastest
                break
            if variants.leanest.device <= limit:
                footprints |= {id(footprint): footprint for footprint in variants.fitting(limit)}
        for footprint in footprints.values():
            yield self._option(extent, variants, footprint)

    @cached_property
    def _roomy_extents(self) -> list[Extent]:
        """All extents but those of GPUs that are too small for what the passes of a method take on
        any number of them."""
        engined = not self.engines.why_none
        extents: list[Extent] = []
        for pool, method in product(self._places, self._methods):
            precision = self._demand.precision(method, pool.hardware)
            if precision and self._footprints.worlds:
                floor = self._footprints.floor(method, precision, engined=engined)
                if floor <= pool.usable_bytes:
                    extents += self._extents(pool, method)
        return extents

    @property
    def _all_extents(self) -> list[Extent]:
        """The extents of all methods in all pools."""
        groups = product(self._places, self._methods)
        return [extent for group in groups for extent in self._extents(*group)]

    def _extents(self, pool: Pool, method: Method) -> Sequence[Extent]:
        """A method in every place of a pool that something may sample in, smallest first."""
        key = (pool, method)
        if key not in self._all:
            self._all[key] = list(self._extents_of(pool, method))
        return self._all[key]

    def _extents_of(self, pool: Pool, method: Method) -> Iterator[Extent]:
        """The same, worked out; none where the pool's GPUs lack its pinned dtype.

        On one GPU, ZeRO has nobody to share with and only costs, unless it offloads.
        """
        precision = self._demand.precision(method, pool.hardware)
        if precision is None:
            return
        for place in self._places[pool]:
            has_use = place.world > 1 or not method.zero or method.offload
            if has_use and self.engines.candidates(place, precision):
                yield from self._extents_with_memory(place, method, precision)

    def _extents_with_memory(
        self, place: Place, method: Method, precision: Precision
    ) -> Iterator[Extent]:
        """A method on as many GPUs as a place has: there, or on as few nodes more as it needs for
        its host memory. More nodes help with nothing else."""
        extent = Extent(place, method, precision, self._footprints, self.engines)
        variants = extent.without_engine
        has_engine = self.engines.candidates(place, precision)[0] is not None
        engine_bytes = ENGINE_PROCESS if has_engine else 0
        wider: Place | None = place
        while wider:
            per_node, memory = wider.per_node, wider.host_memory
            if variants.host(per_node) + per_node * engine_bytes <= memory:
                break
            wider = self._next_wider(wider)
        # Without an engine the first place may do, with one the wider.
        fits = variants.host(place.per_node) <= place.host_memory
        if fits or wider is None:
            yield extent
        if wider and wider is not place:
            yield Extent(wider, method, precision, self._footprints, self.engines)

    def _next_wider(self, place: Place) -> Place | None:
        """As many GPUs on the next larger number of nodes; None if the pool has too few nodes."""
        demand = self._demand
        if demand.spec.nodes:
            return None
        for per_node in range(place.per_node - 1, 0, -1):
            if place.world % per_node == 0:
                nodes = place.world // per_node
                return place.pool.place(place.world, nodes, demand.pod_cpu, demand.most_memory)
        return None

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

    def _miss(self, extent: Extent) -> Option:
        """The option of an extent which takes least; where even training does not fit, with any
        engine."""
        if not extent.may_train:
            return self._leanest(extent, extent.variants_with(extent.candidates[-1]))
        leanest = min(extent.variants, key=lambda variants: variants.leanest.device)
        return self._leanest(extent, leanest)

    def _leanest(self, extent: Extent, variants: Variants) -> Option:
        """The option with the engine of these variants which takes least."""
        return self._option(extent, variants, variants.leanest)

    def _option(self, extent: Extent, variants: Variants, footprint: Footprint) -> Option:
        """One option with its numbers."""
        place = extent.place
        return Option(
            place,
            footprint,
            variants.host(place.per_node),
            self._times.step(extent, footprint.setup, footprint.calls),
            self._times.servers(place, footprint.setup.engine),
            self._times.correction(place, footprint.setup.engine),
        )


def _sort_of_engine(engine: Engine | None) -> tuple[str, bool, bool]:
    """What two engines share that differ only in their GPUs."""
    if engine is None:
        return "Transformers", False, False
    return engine.kind, engine.sleeps, engine.offloads_base
