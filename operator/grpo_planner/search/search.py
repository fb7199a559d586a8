"""The search: every way of running a job in every place, without looking at all of them.

A candidate is a method in a place with an engine, at every setting of its knobs and a fixed global
batch. A thousand nodes of twelve products have tens of thousands, and a plan must take
milliseconds. So one loop goes through them in the order of a lower bound of their score. It stops
where the bound has reached the best score found: nothing later can be better. It begins with whole
sites, of which most are never looked into.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, count, groupby, product
from math import inf

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.run_policy import Objective
from grpo_api.text.timing import DAY, HOUR

from ..hardware.pools import Place, Pool
from ..memory.setup import Engine, Setup
from ..time.measured_runs import StepCorrection
from .engines import Engines, narrower_engines
from .extent import Candidate, EnginedExtent, Entry, Extent, Extents, Site, SiteMethod
from .footprints import Footprint, Footprints, Variants
from .methods import Method
from .option import (
    CROWDED,
    NEARLY_FULL,
    ROUNDING,
    SHARES,
    Option,
    Score,
    beside,
    choose,
    least_seconds,
    place_risk,
    score,
    score_of,
)
from .times import Times

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
        self.demand, self._footprints = footprints.demand, footprints
        self._server_pools = server_pools
        self.engines = Engines(self.demand, server_pools)
        self._times = Times(self.demand, self.engines)
        self._objective: Objective = self.demand.spec.placement.objective
        self.pools = list(pools)
        self._extents = Extents(footprints, self.engines, pools)
        self._places, self._methods = self._extents.places, self._extents.methods

    def with_spec(self, spec: GRPOJobSpec) -> "Search":
        """The search of the same job with another spec on the same pools."""
        return Search(self._footprints.with_spec(spec), self.pools, self._server_pools)

    def with_pools(self, pools: Sequence[Pool]) -> "Search":
        """The search of the same job on other pools."""
        return Search(self._footprints, pools, self._server_pools)

    @property
    def has_place(self) -> bool:
        """True if the GPUs have a place for the gang, with enough memory or not."""
        return any(self._places.values())

    @property
    def is_feasible(self) -> bool:
        """True if anything fits."""
        return any(
            map(self._may_fit, self._extents.trainable(self._extents.all_places, self._methods))
        )

    def has_fitting(self, is_wanted: Callable[[int], bool], tier: int) -> bool:
        """True if a method of the tier fits on a number of GPUs that the job asks for."""
        of_tier = [method for method in self._methods if method.tier == tier]
        places = (place for place in self._extents.all_places if is_wanted(place.world))
        return any(map(self._may_fit, self._extents.trainable(places, of_tier)))

    def _may_fit(self, extent: Extent) -> bool:
        """True if an extent that can train fits with any engine."""
        # The last is Transformers where it may sample, which takes least.
        every_variants = map(extent.variants_with, reversed(extent.engines_with_room))
        return any(self._with_room(extent, variants) for variants in every_variants)

    def _with_room(self, extent: Extent, variants: Variants) -> Variants | None:
        """The variants where they fit, or those with an engine that samples fewer completions at a
        time than it has GPUs; None where none fits.

        Those are the most that fit. What samples fewer is no faster, so bounds hold.
        """
        place = extent.place
        # Host memory first, which needs no prediction of phases.
        if variants.host(place.per_node) > place.host_memory:
            return None
        usable = place.pool.usable_bytes
        engines = narrower_engines(self.demand.spec, variants.engine)
        every_variants = map(extent.variants_with, engines)
        return next((each for each in every_variants if each.leanest.device <= usable), None)

    @cached_property
    def choice(self) -> Option | None:
        """What the job is planned as: the best option that takes no longer than a job may, by the
        low end of its range; None where none fits, or none in time."""
        return self._choice_in(list(self._extents.all_places), self._methods)

    def _choice_in(self, places: Sequence[Place], of_methods: Sequence[Method]) -> Option | None:
        """The same of these places and methods."""
        # Few jobs come near the limit, so the search without it, which prunes more, goes first.
        best = self.best(places, of_methods)
        if best is None or self._is_in_time(best.seconds, best.correction):
            return best
        return self.best(places, of_methods, is_in_time=self._is_in_time)

    @property
    def choice_in_time(self) -> Option | None:
        """The same, found sooner where probably none is in time."""
        return self.best(is_in_time=self._is_in_time)

    def _is_in_time(self, seconds: float, correction: StepCorrection | None) -> bool:
        return least_seconds(seconds, correction) <= self.most_seconds

    def roomy_choice(self, most_seconds: float, *, without_offload: bool = False) -> Option | None:
        """The option on the fewest GPUs that leaves room on them and takes no longer than
        `most_seconds`; None where none is.

        `without_offload`: of those that depart least from training all parameters with AdamW, and
        have the optimizer on the GPUs.
        """
        groups: list[list[Method] | None] = [None]
        if without_offload:
            least = min((method.tier for method in self._methods), default=0)
            methods = [method for method in self._methods if method.tier == least]
            groups = [[method] for method in methods if not method.offload]
        options = [
            self.best(
                of_methods=of_methods,
                objective="FewestGPUs",
                is_in_time=lambda seconds, _: seconds <= most_seconds,
                most_share=NEARLY_FULL,
            )
            for of_methods in groups
        ]
        return choose([option for option in options if option], "FewestGPUs")

    @cached_property
    def most_seconds(self) -> float:
        """Longest step that a plan may have."""
        spec = self.demand.spec
        if spec.placement.allow_slow:
            return inf
        steps = spec.training.max_steps
        return min(LONGEST_STEP, LONGEST_RUN / steps) if steps else LONGEST_STEP

    def misses(self) -> list[Option]:
        """For a job that nothing fits: of each pool and method the option that lacks least."""
        groups = product(self._places, self._methods)
        return list(chain.from_iterable(self._nearest(*group) for group in groups))

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
            options += chain.from_iterable(self._nearest(pool, method) for method in of_group)
        return options

    def extents(self, chosen: Option) -> list[Option]:
        """The chosen option and its method's best on every other extent of its pool, all of which
        a user wants to compare, also those that can't win."""
        method = chosen.footprint.method
        options: list[Option] = [chosen]
        for extent in self._extents.in_pool(chosen.place.pool, method):
            if extent.place == chosen.place:
                continue
            best = self._best_of([extent] if extent.may_train else (), self._objective)
            options.append(best or self._leanest_option(*self._leanest(extent)))
        return options

    def rivals(self, chosen: Option) -> list[Option]:
        """The chosen method in its place with other engines: of each kind, asleep and awake, with
        and without an offloaded base, the best that fits, else what takes least."""
        footprint = chosen.footprint
        extents = self._extents.in_pool(chosen.place.pool, footprint.method)
        extent = next(extent for extent in extents if extent.place == chosen.place)
        own_sort = _sort_of_engine(footprint.setup.engine)
        by_sort: dict[object, list[Option]] = {}
        counts_risks = self._objective != "Fastest"
        for variants in extent.variants:
            fitting = self._options_with(extent, variants, counts_risks=counts_risks)
            best_option = choose(fitting, self._objective)
            option = best_option or self._leanest_option(extent, variants)
            by_sort.setdefault(_sort_of_engine(variants.engine), []).append(option)
        by_sort.pop(own_sort, None)
        best: list[Option] = []
        for options in by_sort.values():
            leanest = min(options, key=lambda option: option.device_share)
            best.append(choose(options, self._objective) or leanest)
        return best

    def sooner(self, chosen: Option) -> Option | None:
        """What the job is planned as once it asks for as many GPUs or the method of a plan on the
        same GPUs that takes at most 1/FAR of the time; None if there is no such. Of several, what
        departs least from what was asked."""
        if chosen.seconds < SLOW:
            return None
        places = self._places[chosen.place.pool]

        def is_far_sooner(seconds: float, _: StepCorrection | None) -> bool:
            return FAR * seconds <= chosen.seconds

        for of_tier in self._by_tier(self._methods):
            # The search for the fastest is short, and no other is in time if that is not.
            if not self.best(places, of_tier, "Fastest", is_in_time=is_far_sooner):
                continue
            sooner = self.best(places, of_tier, "Balanced", is_in_time=is_far_sooner)
            assert sooner is not None, "the fastest is in time"
            world = sooner.place.world
            least = world if world > chosen.place.world else 1
            # With this many GPUs or more the objective may take another plan.
            large_enough = [place for place in self._extents.all_places if place.world >= least]
            return self._choice_in(large_enough, of_tier)
        return None

    def sizes(self) -> list[Option]:
        """For every number of GPUs the best of what fits and trains what the choice does, or
        without a choice departs least from what was asked, fewest GPUs first."""
        by_world: dict[int, list[Place]] = {}
        for place in self._extents.all_places:
            by_world.setdefault(place.world, []).append(place)
        choice = self.choice
        # A curve over tiers would set the time of an adapter against that of full training.
        for of_tier in self._by_tier(self._methods):
            if choice and choice.tier != of_tier[0].tier:
                continue
            best = {world: self.best(by_world[world], of_tier) for world in sorted(by_world)}
            if choice:
                # What is better on as many GPUs takes longer than a job may.
                best[choice.place.world] = choice
            fitting = [option for option in best.values() if option]
            if fitting:
                return fitting
        return []

    def best(
        self,
        places: Iterable[Place] | None = None,
        of_methods: Iterable[Method] | None = None,
        objective: Objective | None = None,
        *,
        is_in_time: TimeLimit | None = None,
        most_share: float = 1.0,
    ) -> Option | None:
        """The best option in these places (default: all) by these methods (default: all) within the
        time limit, or None.

        A lower tier is tried first. `of_methods`: one method, or all of some tiers; `most_share`:
        of a GPU that an option may fill, one of SHARES.
        """
        wanted = self._extents.all_places if places is None else places
        everywhere = list(wanted)
        for of_tier in self._by_tier(self._methods if of_methods is None else of_methods):
            method, *others = of_tier
            sites = self._extents.sites(everywhere, method.tier)
            candidates: Iterable[Candidate] = sites
            if of_methods and not others:
                roomy = (site for site in sites if self._extents.has_room(site.place, method))
                candidates = (SiteMethod(site, method) for site in roomy)
            best = self._best_of(candidates, objective or self._objective, is_in_time, most_share)
            if best:
                return best
        return None

    @staticmethod
    def _by_tier(of_methods: Iterable[Method]) -> list[list[Method]]:
        """The methods by how far they depart from what was asked, the nearest first."""
        by_tier = sorted(of_methods, key=lambda method: method.tier)
        return [list(group) for _, group in groupby(by_tier, key=lambda method: method.tier)]

    def _best_of(
        self,
        candidates: Iterable[Candidate],
        aim: Objective,
        is_in_time: TimeLimit | None = None,
        most_share: float = 1.0,
    ) -> Option | None:
        """The best option of candidates whose methods depart equally from what was asked.

        Entries wait in the order of a lower bound of their score: first a site, bounded by what
        every method has to do there, at first without sampling, which takes longer to work out.
        Then come the same with the risk of each method, then the method's
        extents, bounded by its fastest settings and the fastest engine of its place, then the
        extent with each engine. An entry whose bound is above the best score reached can hold
        nothing better, nor can those after it; one that takes too long by its least seconds holds
        nothing in time.
        """
        serial = count()
        waiting = [
            Entry(self._bound(aim, candidate), next(serial), candidate) for candidate in candidates
        ]
        heapq.heapify(waiting)
        best: Option | None = None
        limit: tuple[float, float] = (inf, inf)
        # A faster option with more risk may be the only one in time.
        counts_risks = aim != "Fastest" and is_in_time is None
        # The heap gives the lowest bound first, so nothing after one past the limit can be better.
        # An equal bound is still tried: an equal score may be preferred.
        while waiting and waiting[0].bound <= limit:
            candidate = heapq.heappop(waiting).candidate
            if is_in_time and not is_in_time(self._least_seconds(candidate), None):
                continue
            if not isinstance(candidate, EnginedExtent):
                for part in self._parts(candidate):
                    heapq.heappush(waiting, Entry(self._bound(aim, part), next(serial), part))
                continue
            options = self._options_with(*candidate, counts_risks=counts_risks)
            options = [option for option in options if option.device_share <= most_share]
            if is_in_time:
                options = [
                    option for option in options if is_in_time(option.seconds, option.correction)
                ]
            best = choose([best, *options] if best else options, aim)
            if best:
                gpus, least = score_of(aim, best)
                limit = gpus, least * (1 + ROUNDING)
        return best

    def _parts(self, whole: Site | SiteMethod | Extent) -> Iterable[Candidate]:
        """A site with its sampling, then with each method, its extents by that method that can
        train, or an extent with each engine that a GPU has room for."""
        if isinstance(whole, Site):
            if whole.least_step is None:
                self._times.least_step_at(whole)
                return [whole]
            return [SiteMethod(whole, method) for method in whole.methods]
        if isinstance(whole, SiteMethod):
            return self._extents.trainable_at(whole.site.place, whole.method)
        every_variants = map(whole.variants_with, whole.engines_with_room)
        return [EnginedExtent(whole, variants) for variants in every_variants]

    def _bound(self, aim: Objective, candidate: Candidate) -> Score:
        """The best score that a candidate can have."""
        if isinstance(candidate, EnginedExtent):
            return self._bound_with(aim, *candidate)
        seconds = self._least_step(candidate)
        if isinstance(candidate, Site):
            return score(aim, candidate.place, seconds, candidate.risk)
        place = candidate.site.place if isinstance(candidate, SiteMethod) else candidate.place
        return score(aim, place, seconds, place_risk(place, candidate.method))

    def _least_step(self, candidate: Site | SiteMethod | Extent) -> float:
        """Less than the seconds of a step of a candidate without an engine of its own."""
        if isinstance(candidate, SiteMethod):
            return self._times.least_step_at(candidate.site)
        if isinstance(candidate, Extent):
            return self._times.least_step(candidate)
        least = candidate.least_step
        return self._times.least_products(candidate) if least is None else least

    def _least_seconds(self, candidate: Candidate) -> float:
        """Less than the seconds of a step of a candidate; 0 where steps were measured, whose range
        is not that of published ones."""
        if self._times.is_measured:
            return 0.0
        if isinstance(candidate, EnginedExtent):
            trainings = self._times.fitting_training(*candidate)
            least = min((seconds for seconds, _ in trainings), default=inf)
            return (least + self._times.least_sampling(*candidate)) * (1 - ROUNDING)
        return self._least_step(candidate) * (1 - ROUNDING)

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

    def _options_with(
        self, extent: Extent, variants: Variants, *, counts_risks: bool
    ) -> list[Option]:
        """For each of SHARES the fastest option with the engine of these variants that fills a GPU
        up to it: a score weighs time against room. What is not faster than in less room can't win,
        nor, where a score counts risks, what saves less time than its risk counts for.
        """
        key = (variants, counts_risks)
        if key in extent.options:
            return extent.options[key]
        options = extent.options[key] = []
        roomy = self._with_room(extent, variants)
        if roomy is None:
            return options
        variants = roomy
        # Of the options so far: the least seconds, with the risk of less room counted.
        least_counted = inf
        for share, crowded in zip(SHARES, CROWDED, strict=True):
            risk = crowded if counts_risks else 1.0
            limit = int(share * extent.place.pool.usable_bytes)
            fits = variants.fastest.device <= limit
            setup: Setup | None
            if fits:
                setup = self._times.with_fastest_batch(extent, variants, variants.fastest.setup)
            elif variants.leanest.device <= limit:
                least = least_counted / risk
                setup = self._times.fastest(extent, variants, limit, least)
            else:
                continue
            if setup:
                option = self._option(extent, variants, variants.footprint_of(setup))
                options.append(option)
                least_counted = min(least_counted, option.seconds * risk)
            if fits:
                # More room makes nothing faster.
                break
        return options

    def _nearest(self, pool: Pool, method: Method) -> Iterable[Option]:
        """Of a method in a pool that it does not fit in, the option that lacks the least shares of
        a GPU and of host memory."""
        # What training alone lacks is a lower bound, so the places that it leaves behind the
        # nearest are not looked into.
        bounds = [(self._extents.lacks(place, method), place) for place in self._places[pool]]
        nearest: EnginedExtent | None = None
        least = (inf, 0, 0)
        for bound, place in sorted(bounds, key=lambda pair: pair[0]):
            if bound > least[0]:
                break
            for extent in self._extents.at(place, method):
                engined = self._leanest(extent)
                wider = extent.place
                shares = engined.missing_shares, wider.world, wider.nodes
                if shares < least:
                    nearest, least = engined, shares
        # Equal shares on as many GPUs and nodes are the same option. So only of what is shown is
        # the time worked out.
        return [self._leanest_option(*nearest)] if nearest else []

    def _leanest(self, extent: Extent) -> EnginedExtent:
        """An extent with the engine that takes least; where even training does not fit, with
        any."""
        if not extent.may_train:
            return EnginedExtent(extent, extent.variants_with(extent.candidates[-1]))
        leanest = min(extent.variants, key=lambda variants: variants.leanest.device)
        return EnginedExtent(extent, leanest)

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
