"""The search: every way of running a job in every place, without looking at all of them.

A candidate is a method in a place with an engine, at every setting of its knobs and a fixed global
batch. A thousand nodes of twelve products have tens of thousands, and a plan must take
milliseconds. So one loop goes through them in the order of a lower bound of their score, and stops
where the bound has reached the best score found: nothing later can be better.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import count, groupby
from typing import NamedTuple

from ..hardware.pools import Place, Pool
from ..memory.setup import Engine, Precision, Setup
from ..time.step_time import SamplingTime, StepTime, sampling_time, training_time
from ..time.training import TrainingTime
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
    place_risk,
    score,
    score_of,
)

WHOLE_NODES = 16
"""GPUs past which a gang takes whole nodes only."""
SPACING = 1.25
"""Least ratio of two extents past WHOLE_NODES."""

SLOW, FAR = 60.0, 2.0
"""Seconds of a step from which a plan that would be FAR times as fast is worth a word."""


class Extent(NamedTuple):
    """A method in one place."""

    place: Place
    method: Method
    precision: Precision


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
        self._best: dict[tuple[Objective, Extent, Engine | None], Option | None] = {}
        self._generation: dict[tuple[object, ...], float] = {}
        self._training: dict[tuple[object, ...], TrainingTime] = {}
        self._sampling: dict[tuple[object, ...], SamplingTime] = {}
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
        return any(
            self._variants(extent, engine).may_fit(extent.place)
            for extent in self._all_extents(self._methods)
            if self._has_room_for_passes(extent) and self._may_train(extent)
            for engine in self._candidates(extent)
        )

    def misses(self) -> list[Option]:
        """Of each extent of each pool and method what lacks least; for a job that nothing fits."""
        return [self._miss(extent) for extent in self._all_extents(self._methods)]

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
            found += self._explore(extents) or [self._miss(extent) for extent in extents]
        return found

    def fitting(self) -> list[Option]:
        """Options that may be chosen, of the methods that depart least from what was asked; no
        misses.

        Enough to choose from, and much less work than all options where little fits.
        """
        allowed = sorted(self._methods, key=lambda method: method.tier)
        for _, same_tier in groupby(allowed, key=lambda method: method.tier):
            found = self._explore(self._all_extents(list(same_tier)))
            if found:
                return found
        return []

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method's best on every other extent of its pool."""
        method = chosen.footprint.method
        found: list[Option] = [chosen]
        for extent in self._extents(chosen.place.pool, method):
            if extent.place == chosen.place:
                continue
            best = choose(self._explore([extent]), self._objective)
            found.append(best or self._miss(extent))
        return found

    def rivals(self, chosen: Option) -> list[Option]:
        """The chosen method in its place with other engines: of each kind, asleep and awake, the
        best that fits, else what takes least."""
        footprint = chosen.footprint
        extent = Extent(chosen.place, footprint.method, footprint.setup.precision)
        own = _sort_of_engine(footprint.setup.engine)
        by_sort: dict[object, list[Option]] = {}
        for engine in self._candidates(extent):
            best_option = self._best_with(self._objective, extent, engine)
            option = best_option or self._leanest(extent, engine)
            by_sort.setdefault(_sort_of_engine(engine), []).append(option)
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
        found: list[Option] = []
        for method in self._methods:
            extents = self._extents(chosen.place.pool, method)
            options = self._explore(extents, "Balanced")
            found += [option for option in options if option.seconds * FAR <= chosen.seconds]
        return choose(found, "Balanced")

    def sizes(self) -> list[Option]:
        """For every number of GPUs the best of what fits and departs least from what was asked,
        fewest GPUs first."""
        by_world: dict[int, list[Extent]] = {}
        for extent in self._all_extents(self._methods):
            by_world.setdefault(extent.place.world, []).append(extent)
        best = [
            choose(self._explore(extents), self._objective)
            for _, extents in sorted(by_world.items())
        ]
        fitting = [option for option in best if option]
        tier = min((option.tier for option in fitting), default=0)
        return [option for option in fitting if option.tier == tier]

    def _explore(
        self, extents: Iterable[Extent], objective: Objective | None = None
    ) -> list[Option]:
        """Fitting options of these extents, and among them the best of each tier.

        Entries wait in the order of a lower bound of their score: first an extent, bounded by its
        fastest settings and the fastest engine of its place, then the extent with each engine. An
        entry whose bound is above the best score found can hold nothing better, so it is dropped.
        """
        aim = objective or self._objective
        serial = count()
        waiting: list[_Entry] = []
        for extent in filter(self._has_room_for_passes, extents):
            bound = self._bound(aim, extent)
            waiting.append(_Entry(extent.method.tier, bound, next(serial), extent, _ANY))
        heapq.heapify(waiting)
        found: list[Option] = []
        least: dict[int, Score] = {}
        while waiting:
            entry = heapq.heappop(waiting)
            if entry.tier in least and entry.bound > least[entry.tier]:
                continue
            extent = entry.extent
            if entry.engine is _ANY:
                for engine in self._candidates(extent) if self._may_train(extent) else ():
                    bound = self._bound_with(aim, extent, engine)
                    heapq.heappush(waiting, _Entry(entry.tier, bound, next(serial), extent, engine))
                continue
            option = self._best_with(aim, extent, entry.engine)
            if option is None:
                continue
            found.append(option)
            reached = score_of(aim, option)
            least[entry.tier] = min(least.get(entry.tier, reached), reached)
        return found

    def _bound(self, aim: Objective, extent: Extent) -> Score:
        """The best score that an extent can have: its fastest settings with the fastest engine of
        its place, whether or not they fit."""
        place, method, precision = extent
        setup, _ = self._variants(extent, None).quickest
        training = sum(self._training_time(extent, setup))
        seconds = training + self._least_generation(place, precision)
        return score(aim, place, seconds, place_risk(place, method))

    def _least_generation(self, place: Place, precision: Precision) -> float:
        """Seconds of generating in a place with its fastest engine, without gathers and syncs."""
        key = (id(place), precision)
        if key not in self._generation:
            extent = Extent(place, _ANY_METHOD, precision)
            times = (
                self._sampling_time(extent, *self._variants(extent, engine).quickest)
                for engine in self._candidates(extent)
            )
            self._generation[key] = min(time.generation for time in times)
        return self._generation[key]

    def _bound_with(self, aim: Objective, extent: Extent, engine: Engine | None) -> Score:
        """The best score that an extent can have with that engine."""
        setup, calls = self._variants(extent, engine).quickest
        place = extent.place
        seconds = self._time(extent, setup, calls).total
        gpus_beside = beside(engine, self._servers(place, setup))
        risk = place_risk(place, extent.method)
        return score(aim, place, seconds, risk, beside=gpus_beside)

    def _best_with(self, aim: Objective, extent: Extent, engine: Engine | None) -> Option | None:
        """The best option of an extent with that engine; None where none fits."""
        key = (aim, extent, engine)
        if key not in self._best:
            variants = self._variants(extent, engine)
            fits = variants.may_fit(extent.place)
            options = self._fitting_options(extent, variants) if fits else ()
            self._best[key] = choose(list(options), aim)
        return self._best[key]

    def _fitting_options(self, extent: Extent, variants: Variants) -> Iterator[Option]:
        """The fastest options that fit, and the fastest of those that leave a GPU some room and
        much: a score weighs time against room."""
        usable = extent.place.pool.usable_bytes
        footprints: dict[int, Footprint] = {}
        for share in (ROOMY, NEARLY_FULL, 1.0):
            limit = int(share * usable)
            if variants.fastest.device <= limit:
                footprints[id(variants.fastest)] = variants.fastest
                break
            if variants.leanest.device <= limit:
                footprints |= {id(footprint): footprint for footprint in variants.fitting(limit)}
        for footprint in footprints.values():
            yield self._option(extent, variants, footprint)

    def _may_train(self, extent: Extent) -> bool:
        """Whether the extent has room for training, whatever samples beside it."""
        floor = self._variants(extent, None).training_floor
        return floor <= extent.place.pool.usable_bytes

    def _has_room_for_passes(self, extent: Extent) -> bool:
        """Whether a GPU holds what the passes take on any number of them, which rules out whole
        methods at once."""
        place, method, precision = extent
        engined = not self.engines.why_none
        floor = self._footprints.floor(method, precision, engined=engined)
        return floor <= place.pool.usable_bytes

    def _all_extents(self, allowed: Sequence[Method]) -> list[Extent]:
        """The extents of these methods in all pools."""
        return [
            extent
            for pool in self._places
            for method in allowed
            for extent in self._extents(pool, method)
        ]

    def _extents(self, pool: Pool, method: Method) -> Iterator[Extent]:
        """A method in every place of a pool that something may sample in, smallest first; none
        where the pool's GPUs lack its pinned dtype.

        On one GPU, ZeRO has nobody to share with and only costs, unless it offloads.
        """
        precision = self._demand.precision(method, pool.hardware)
        if precision is None:
            return
        for place in self._places[pool]:
            has_use = place.world > 1 or not method.zero or method.offload
            if has_use and self.engines.candidates(place, precision):
                yield Extent(place, method, precision)

    def _candidates(self, extent: Extent) -> tuple[Engine | None, ...]:
        return self.engines.candidates(extent.place, extent.precision)

    def _variants(self, extent: Extent, engine: Engine | None) -> Variants:
        place, method, precision = extent
        return self._footprints.variants(place.world, method, precision, engine)

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

        def device(engine: Engine | None) -> int:
            return self._variants(extent, engine).leanest.device

        candidates = self._candidates(extent)
        leanest = min(candidates, key=device) if self._may_train(extent) else candidates[-1]
        return self._leanest(extent, leanest)

    def _leanest(self, extent: Extent, engine: Engine | None) -> Option:
        """The option with that engine which takes least."""
        variants = self._variants(extent, engine)
        return self._option(extent, variants, variants.leanest)

    def _option(self, extent: Extent, variants: Variants, footprint: Footprint) -> Option:
        """One option with its numbers."""
        place = extent.place
        return Option(
            place,
            footprint,
            variants.host(place.per_node),
            self._time(extent, footprint.setup, footprint.calls),
            self._servers(place, footprint.setup),
            is_measured=self._demand.measured_step(place.pool.label) is not None,
        )

    def _time(self, extent: Extent, setup: Setup, calls: float) -> StepTime:
        training = self._training_time(extent, setup)
        sampling = self._sampling_time(extent, setup, calls)
        return StepTime(
            training.compute,
            sampling.generation,
            sampling.gathering,
            training.communication,
            training.offload,
            sampling.sync,
        )

    # Each key has what its times depend on, and no more: engines share times of training, methods
    # those of sampling.

    def _training_time(self, extent: Extent, setup: Setup) -> TrainingTime:
        place, method, precision = extent
        key = (id(place), method, precision, setup.micro_batch, setup.checkpointing)
        known = self._training.get(key)
        if known is None:
            pool = place.pool
            time = training_time(self._demand.shape, setup, pool.hardware, place.nodes)
            known = time.as_measured(self._demand.measured_step(pool.label))
            self._training[key] = known
        return known

    def _sampling_time(self, extent: Extent, setup: Setup, calls: float) -> SamplingTime:
        place, method, precision = extent
        is_gathered = method.zero == 3
        key = (
            id(place), precision, setup.engine, is_gathered, setup.gather, setup.generation_batch,
        )  # fmt: skip
        known = self._sampling.get(key)
        if known is None:
            servers = self._servers(place, setup)
            hardware = place.pool.hardware
            time = sampling_time(
                self._demand.shape,
                setup,
                hardware,
                place.nodes,
                calls,
                servers=servers.hardware if servers else None,
            )
            label = servers.label if servers else place.pool.label
            known = time.as_measured(self._demand.measured_step(label))
            self._sampling[key] = known
        return known

    def _servers(self, place: Place, setup: Setup) -> Pool | None:
        """Where the engines of a setup are that have GPUs of their own."""
        has_own = setup.engine and setup.engine.kind == "Servers"
        return self.engines.server_pool(place) if has_own else None


class _Any(Enum):
    """Stands for all engines of a place."""

    ENGINE = 0


_ANY = _Any.ENGINE
_ANY_METHOD = Method(strategy="None", reference="None")
"""Stands for all methods of a place: how long generating takes does not depend on the method."""


class _Entry(NamedTuple):
    """What waits to be looked at."""

    tier: int
    bound: Score
    serial: int
    """Decides among equal bounds, so that the order is the same every time."""
    extent: Extent
    engine: Engine | _Any | None


def _sort_of_engine(engine: Engine | None) -> tuple[str, bool]:
    """What two engines share that differ only in their GPUs."""
    return (engine.kind, engine.sleeps) if engine else ("Transformers", False)
