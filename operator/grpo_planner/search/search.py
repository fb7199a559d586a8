"""The search: every way of running a job in every place, without looking at all of them.

A candidate is a method in a place with an engine, at every setting of its knobs and a fixed global
batch. A thousand nodes of twelve products have tens of thousands, and a plan must take
milliseconds. So one loop goes through them in the order of a lower bound of their score. It stops
where the bound has reached the best score found: nothing later can be better. It begins with whole
sites, of which most are never looked into.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, count, groupby, product
from math import inf

from grpo_api.text.timing import DAY, HOUR

from ..hardware.pools import Place, Pool
from ..memory.host import ENGINE_PROCESS
from ..memory.setup import Engine, Precision
from ..time.measured_runs import StepCorrection
from .batch import whole_node_gpus
from .demand import Demand
from .engines import Engines
from .extent import Candidate, EnginedExtent, Entry, Extent, Site, Times
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
"""GPUs past which a gang takes whole nodes only, as far as its batch can be split over them."""
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
        self._all: dict[tuple[int, int], list[Extent]] = {}
        self._sites: dict[tuple[int, int], Site] = {}
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
        """True if the GPUs have a place for the gang, with enough memory or not."""
        return any(self._places.values())

    @property
    def is_feasible(self) -> bool:
        """True if anything fits."""
        return any(map(self._may_fit, self._roomy_extents(self._all_places, self._methods)))

    def has_fitting(self, is_wanted: Callable[[int], bool], tier: int) -> bool:
        """True if a method of the tier fits on a number of GPUs that the job asks for."""
        of_tier = [method for method in self._methods if method.tier == tier]
        places = (place for place in self._all_places if is_wanted(place.world))
        return any(map(self._may_fit, self._roomy_extents(places, of_tier)))

    def _may_fit(self, extent: Extent) -> bool:
        """True if an extent fits with any engine."""
        return extent.may_train and any(
            variants.may_fit(extent.place) for variants in extent.variants
        )

    @cached_property
    def choice(self) -> Option | None:
        """What the job is planned as: the best option that takes no longer than a job may, by the
        low end of its range; None where none fits, or none in time."""

        def is_in_time(seconds: float, correction: StepCorrection | None) -> bool:
            return least_seconds(seconds, correction) <= self.most_seconds

        # Few jobs come near the limit, so the search without it, which prunes more, goes first.
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
        """For a job that nothing fits: of each extent of each pool and method the option that lacks
        least."""
        groups = product(self._places, self._methods)
        extents = (extent for group in groups for extent in self._extents(*group))
        return list(map(self._nearest_option, extents))

    def comparable_options(self, chosen: Option) -> list[Option]:
        """The alternatives that the chosen option is shown with: the best of every other method in
        its pool and of every other pool, or the one that lacks least there."""
        own_pool, own_method = chosen.place.pool, chosen.footprint.method
        groups = [(own_pool, [method]) for method in self._methods if method != own_method]
        groups += [(pool, self._methods) for pool in self._places if pool is not own_pool]
        options: list[Option] = []
        for pool, of_group in groups:
            best = self.best(self._places[pool], of_group)
            if best:
                options.append(best)
                continue
            extents = (extent for method in of_group for extent in self._extents(pool, method))
            options += map(self._nearest_option, extents)
        return options

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method's best on every other extent of its pool, all of which
        a user wants to compare, also those that can't win."""
        method = chosen.footprint.method
        options: list[Option] = [chosen]
        for extent in self._extents(chosen.place.pool, method):
            if extent.place == chosen.place:
                continue
            best = self._best_of([extent], self._objective)
            options.append(best or self._nearest_option(extent))
        return options

    def rivals(self, chosen: Option) -> list[Option]:
        """The chosen method in its place with other engines: of each kind, asleep and awake, with
        and without an offloaded base, the best that fits, else what takes least."""
        footprint = chosen.footprint
        extents = self._extents(chosen.place.pool, footprint.method)
        extent = next(extent for extent in extents if extent.place == chosen.place)
        own_sort = _sort_of_engine(footprint.setup.engine)
        by_sort: dict[object, list[Option]] = {}
        for variants in extent.variants:
            best_option = choose(self._options_with(extent, variants), self._objective)
            option = best_option or self._leanest_option(extent, variants)
            by_sort.setdefault(_sort_of_engine(variants.engine), []).append(option)
        by_sort.pop(own_sort, None)
        best: list[Option] = []
        for options in by_sort.values():
            leanest = min(options, key=lambda option: option.device_share)
            best.append(choose(options, self._objective) or leanest)
        return best

    def sooner(self, chosen: Option) -> Option | None:
        """On the same GPUs, what takes at most 1/FAR of the time, on more of them or with other
        methods; None if nothing.

        Of several, what departs least from what was asked.
        """
        if chosen.seconds < SLOW:
            return None
        places = self._places[chosen.place.pool]
        limit = chosen.seconds / FAR
        for of_tier in self._by_tier(self._methods):
            # The search for the fastest is short, and no other is in time if that is not.
            fastest = self.best(places, of_tier, "Fastest")
            if fastest and fastest.seconds <= limit:
                return self.best(
                    places, of_tier, "Balanced", is_in_time=lambda seconds, _: seconds <= limit
                )
        return None

    def sizes(self) -> list[Option]:
        """For every number of GPUs the best of what fits and departs least from what was asked,
        fewest GPUs first."""
        by_world: dict[int, list[Place]] = {}
        for place in self._all_places:
            by_world.setdefault(place.world, []).append(place)
        best = [self.best(places) for _, places in sorted(by_world.items())]
        fitting = [option for option in best if option]
        # A curve over tiers would set the time of an adapter against that of full training.
        tier = min((option.tier for option in fitting), default=0)
        return [option for option in fitting if option.tier == tier]

    def best(
        self,
        places: Iterable[Place] | None = None,
        of_methods: Iterable[Method] | None = None,
        objective: Objective | None = None,
        *,
        is_in_time: TimeLimit | None = None,
    ) -> Option | None:
        """The best option in these places (default: all) by these methods (default: all) within the
        time limit, or None.

        A lower tier is tried first. `of_methods`: one method, or all of some tiers.
        """
        wanted = self._all_places if places is None else places
        everywhere = list(wanted)
        for of_tier in self._by_tier(self._methods if of_methods is None else of_methods):
            candidates: Iterable[Candidate]
            if of_methods and len(of_tier) == 1:
                # An extent's own bound is tighter than its site's, and as cheap.
                candidates = self._roomy_extents(everywhere, of_tier)
            else:
                sites = (self._site(place, of_tier) for place in everywhere)
                roomy = (site for site in sites if site.methods)
                candidates = roomy
                if is_in_time:
                    least = self._times.least_products
                    candidates = (site for site in roomy if is_in_time(least(site), None))
            if best := self._best_of(candidates, objective or self._objective, is_in_time):
                return best
        return None

    @staticmethod
    def _by_tier(of_methods: Iterable[Method]) -> list[list[Method]]:
        """The methods by how far they depart from what was asked, the nearest first."""
        by_tier = sorted(of_methods, key=lambda method: method.tier)
        return [list(group) for _, group in groupby(by_tier, key=lambda method: method.tier)]

    def _site(self, place: Place, of_tier: Sequence[Method]) -> Site:
        """A place with those of all methods of a tier that may have room on its GPUs."""
        key = (id(place), of_tier[0].tier)
        if key not in self._sites:
            hardware = place.pool.hardware
            roomy = tuple(method for method in of_tier if self._has_room(place, method))
            precisions = (self._demand.precision(method, hardware) for method in roomy)
            # Those of the simplest method that trains the same bound all of them.
            simplest = replace(of_tier[0], zero=0, offload=False)
            stand_ins = [
                Extent(place, simplest, precision, self._footprints, self.engines)
                for precision in dict.fromkeys(precisions)
                if precision
            ]
            self._sites[key] = Site(place, roomy, stand_ins)
        return self._sites[key]

    def _best_of(
        self,
        candidates: Iterable[Candidate],
        aim: Objective,
        is_in_time: TimeLimit | None = None,
    ) -> Option | None:
        """The same of candidates whose methods depart equally from what was asked.

        Entries wait in the order of a lower bound of their score: first a site, bounded by what
        every method has to do there, then each of its extents, bounded by its fastest settings and
        the fastest engine of its place, then the extent with each engine. An entry whose bound is
        above the best score reached can hold nothing better, nor can those after it.
        """
        serial = count()
        waiting = [
            Entry(self._bound(aim, candidate), next(serial), candidate) for candidate in candidates
        ]
        heapq.heapify(waiting)
        best: Option | None = None
        while waiting:
            entry = heapq.heappop(waiting)
            # The heap gives the lowest bound first, so nothing after this entry can be better. An
            # equal bound is still tried: an equal score may be preferred.
            if best and entry.bound > score_of(aim, best):
                break
            if isinstance(entry.candidate, EnginedExtent):
                options = self._options_with(*entry.candidate)
                if is_in_time:
                    options = [
                        option
                        for option in options
                        if is_in_time(option.seconds, option.correction)
                    ]
                best = choose([best, *options] if best else options, aim)
                continue
            for part in self._parts(entry.candidate):
                heapq.heappush(waiting, Entry(self._bound(aim, part), next(serial), part))
        return best

    def _parts(self, whole: Site | Extent) -> Iterator[Extent | EnginedExtent]:
        """The extents of a site, or an extent with each engine if it can train."""
        if isinstance(whole, Site):
            for method in whole.methods:
                yield from self._extents_at(whole.place, method)
        elif whole.may_train:
            for variants in whole.variants:
                yield EnginedExtent(whole, variants)

    def _bound(self, aim: Objective, candidate: Candidate) -> Score:
        """The best score that a candidate can have."""
        if isinstance(candidate, EnginedExtent):
            return self._bound_with(aim, *candidate)
        place = candidate.place
        if isinstance(candidate, Extent):
            risk = place_risk(place, candidate.method)
            return score(aim, place, self._times.least_step(candidate), risk)
        risk = place_risk(place, candidate.stand_ins[0].method)
        return score(aim, place, self._times.least_step_at(candidate), risk)

    def _bound_with(self, aim: Objective, extent: Extent, variants: Variants) -> Score:
        """The best score that an extent can have with the engine of these variants.

        Training is as fast as in the room of a GPU without an engine, which only takes of it. Of a
        GPU filled to each of SHARES, the best is taken, as each counts otherwise.
        """
        place, method = extent.place, extent.method
        sampling = self._times.least_sampling(extent, variants)
        gpus_beside = beside(variants.engine, self._times.servers(place, variants.engine))
        risk = place_risk(place, method, variants.engine)
        return min(
            score(aim, place, training + sampling, risk * crowded, beside=gpus_beside)
            for training, crowded in self._times.fitting_training(extent, variants)
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
            # The fastest settings fit with this much room: others are slower and no roomier that
            # counts.
            if variants.fastest.device <= limit:
                footprints[id(variants.fastest)] = variants.fastest
                break
            if variants.leanest.device <= limit:
                footprints |= {id(footprint): footprint for footprint in variants.fitting(limit)}
        for footprint in footprints.values():
            yield self._option(extent, variants, footprint)
            setup = footprint.setup
            if variants.engine:
                continue
            # A smaller batch takes less, so that only the fastest may be better.
            _, size = self._times.fastest_batch(extent, variants, setup)
            if size < setup.generation_batch:
                yield self._option(extent, variants, variants.footprint_of(setup, size))

    def _roomy_extents(
        self, places: Iterable[Place], of_methods: Iterable[Method]
    ) -> Iterator[Extent]:
        """The extents of places by methods that may have room there."""
        for place, method in product(places, of_methods):
            if self._has_room(place, method):
                yield from self._extents_at(place, method)

    def _has_room(self, place: Place, method: Method) -> bool:
        """True if the policy and the passes of a method have room on the GPUs of a place."""
        precision = self._demand.precision(method, place.pool.hardware)
        if precision is None:
            return False
        # One lower bound per method and precision can rule out a whole product.
        engined = not self.engines.why_none
        floor = self._footprints.floor(method, precision, place.world, engined=engined)
        return floor <= place.pool.usable_bytes

    @property
    def _all_places(self) -> Iterator[Place]:
        """The places of all pools."""
        return chain.from_iterable(self._places.values())

    def _extents(self, pool: Pool, method: Method) -> Iterator[Extent]:
        """A method in every place of a pool that something may sample in, smallest first."""
        for place in self._places[pool]:
            yield from self._extents_at(place, method)

    def _extents_at(self, place: Place, method: Method) -> Sequence[Extent]:
        """A method in a place that something may sample in; none where the GPUs lack its pinned
        dtype.

        On one GPU, ZeRO has nobody to share with and only costs, unless it offloads.
        """
        key = (id(place), id(method))
        if key not in self._all:
            precision = self._demand.precision(method, place.pool.hardware)
            # On one GPU ZeRO has no other rank to share with. It only costs, unless it offloads.
            has_use = place.world > 1 or not method.zero or method.offload
            extents: Iterable[Extent] = ()
            if precision and has_use and self.engines.candidates(place, precision):
                extents = self._extents_with_memory(place, method, precision)
            self._all[key] = list(extents)
        return self._all[key]

    def _extents_with_memory(
        self, place: Place, method: Method, precision: Precision
    ) -> Iterator[Extent]:
        """A method on as many GPUs as a place has: there, or on as few nodes more as it needs for
        its host memory."""
        extent = Extent(place, method, precision, self._footprints, self.engines)
        variants = extent.without_engine
        has_engine = self.engines.candidates(place, precision)[0] is not None
        engine_bytes = ENGINE_PROCESS if has_engine else 0
        # The same GPUs on more nodes have more host memory and slower links. So the first number of
        # nodes with enough memory is the only one that may be better.
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
        if wider and wider is not place and self.engines.candidates(wider, precision):
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
        limits."""
        demand, last = self._demand, 0.0
        most = min(pool.gpus, demand.most_gpus or pool.gpus)
        per_node = whole_node_gpus(demand.spec, pool.most_gpus_per_node)
        for world in self._footprints.worlds:
            if world > most:
                return
            # Each place is searched with all methods. Past WHOLE_NODES neighbouring numbers differ
            # by little, and a part of a node would keep its rest from other jobs.
            pinned = world in (demand.fewest_gpus, demand.most_gpus)
            if world > WHOLE_NODES and not pinned and (world % per_node or world < last * SPACING):
                continue
            place = pool.place(world, demand.spec.nodes, demand.pod_cpu, demand.most_memory)
            if place:
                last = world
                yield place

    def _nearest_option(self, extent: Extent) -> Option:
        """The option of an extent which takes least; where even training does not fit, with any
        engine."""
        if not extent.may_train:
            return self._leanest_option(extent, extent.variants_with(extent.candidates[-1]))
        leanest = min(extent.variants, key=lambda variants: variants.leanest.device)
        return self._leanest_option(extent, leanest)

    def _leanest_option(self, extent: Extent, variants: Variants) -> Option:
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
