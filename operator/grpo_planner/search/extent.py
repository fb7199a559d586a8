"""Defines Extent (a method in one place) and Site (a place with all such methods), and bounds their
step times. The search skips what cannot win."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from ..hardware.pools import Place, Pool
from ..hardware.products import Product
from ..memory.setup import Engine, Precision, Setup, ZeroStage
from ..time.measured_runs import StepCorrection, sampler_of
from ..time.sampling import generation_seconds, transformers_seconds
from ..time.step_time import SamplingTime, StepTime, sampling_time, training_time
from ..time.training import TrainingTime
from .demand import Demand
from .engines import Engines
from .footprints import Footprints, Variants
from .methods import Method
from .option import CROWDED, SHARES, Option, Score


@dataclass(eq=False)
class Extent:
    """A method in one place, with what a search has worked out of it; each exists once."""

    place: Place
    method: Method
    precision: Precision
    footprints: Footprints = field(repr=False)
    engines: Engines = field(repr=False)
    """Of the search."""
    training: dict[tuple[int, bool, bool], TrainingTime] = field(default_factory=dict, repr=False)
    """By micro-batch, checkpointing and whether the old policy scores."""
    options: dict[Variants, list[Option]] = field(default_factory=dict, repr=False)
    """What fits with an engine, as far as it may be chosen."""
    least_step: float | None = None
    fitting_training: dict[bool, list[tuple[float, float]]] = field(
        default_factory=dict, repr=False
    )
    """Times.least_step and fitting_training, once they have been asked for; the latter by whether
    the old policy scores."""

    @cached_property
    def candidates(self) -> tuple[Engine | None, ...]:
        """The engines of its place; None for Transformers."""
        may_offload_base = self.method.may_offload_base
        return self.engines.candidates(
            self.place, self.precision, may_offload_base=may_offload_base
        )

    @cached_property
    def variants(self) -> tuple[Variants, ...]:
        """The variants of this extent with each engine that may sample."""
        return tuple(map(self.variants_with, self.candidates))

    @cached_property
    def without_engine(self) -> Variants:
        """Without an engine, whether or not one is asked for."""
        return self.variants_with(None)

    def variants_with(self, engine: Engine | None) -> Variants:
        """The variants of this extent with one engine."""
        return self.footprints.variants(self.place.world, self.method, self.precision, engine)

    @cached_property
    def may_train(self) -> bool:
        """True if training has room, whatever samples beside it."""
        return self.without_engine.may_train(self.place.pool.usable_bytes)

    @property
    def stand_in(self) -> "Extent":
        """The same with the simplest method whose sampling takes as long."""
        # Sampling depends on the method only by whether ZeRO-3 has to gather the weights for it. So
        # all methods of a place share one bound of its sampling.
        zero: ZeroStage = 3 if self.method.zero == 3 else 0
        method = Method(zero=zero, strategy="None", reference="None")
        return Extent(self.place, method, self.precision, self.footprints, self.engines)


@dataclass(eq=False)
class Site:
    """A place with methods that train the same; with each it is one extent, or two."""

    place: Place
    methods: tuple[Method, ...]
    stand_ins: Sequence[Extent] = field(repr=False)
    """With the simplest method that trains the same, in each precision that a method has."""
    least_products: float | None = None
    least_step: float | None = None
    """Times.least_products and least_step_at, once they have been asked for."""


class EnginedExtent(NamedTuple):
    """An extent with one engine."""

    extent: Extent
    variants: Variants


Candidate = Site | Extent | EnginedExtent
"""What a search bounds, the whole before its parts."""


class Entry(NamedTuple):
    """A candidate in the queue of the search."""

    bound: Score
    serial: int
    """Decides among equal bounds, so that the order is the same every time."""
    candidate: Candidate


class BatchTime(NamedTuple):
    """Seconds of sampling by calls of generate of a size."""

    seconds: float
    size: int


class Times:
    """Step times of one demand on the places of a search, each worked out once."""

    def __init__(self, demand: Demand, engines: Engines) -> None:
        """`engines`: those of the search."""
        self._demand, self._engines = demand, engines
        self._sampling: dict[tuple[object, ...], SamplingTime] = {}
        self._generations: dict[tuple[object, ...], float] = {}
        self._least_sampling: dict[tuple[object, ...], float] = {}
        self._fastest_batches: dict[tuple[object, ...], BatchTime] = {}

    def step(self, extent: Extent, setup: Setup, calls: float) -> StepTime:
        """Time of one step."""
        trained = self.training(extent, setup)
        sampled = self.sampling(extent, setup, calls)
        return StepTime(
            trained.compute,
            sampled.generation,
            sampled.gathering,
            trained.communication,
            trained.offload,
            sampled.sync,
        )

    # Each key has what its times depend on, and no more: engines share times of training, methods
    # those of sampling. Places and engines live as long as the search, so their ids stay theirs.

    def training(self, extent: Extent, setup: Setup) -> TrainingTime:
        """Seconds of a step that depend on the engine only by whether its log-probabilities are
        compared."""
        key = (setup.micro_batch, setup.checkpointing, setup.scores_old_policy)
        corrected_time = extent.training.get(key)
        if corrected_time is None:
            place = extent.place
            pool = place.pool
            time = training_time(self._demand.shape, setup, pool.hardware, place.nodes)
            correction = self._demand.correction(pool.label, place.world, place.nodes)
            corrected_time = time.as_measured(correction)
            extent.training[key] = corrected_time
        return corrected_time

    def least_training(self, extent: Extent) -> float:
        """Seconds of training at the fastest settings, whether or not they fit."""
        setup, _ = extent.without_engine.quickest
        return sum(self.training(extent, setup))

    def least_step(self, extent: Extent) -> float:
        """Seconds of a step at the fastest settings of an extent with the fastest engine of its
        place, whether or not they fit."""
        if extent.least_step is None:
            extent.least_step = self.least_training(extent) + self._least_sampling_of(extent)
        return extent.least_step

    def least_products(self, site: Site) -> float:
        """Less than the seconds of training by any method of a site, there or on as many GPUs of
        more nodes: the products alone.

        Zero where steps were measured, of which those on more nodes may be the faster.
        """
        if site.least_products is None:
            site.least_products = 0.0
            if not self._demand.has_measured_steps:
                stand_in = site.stand_ins[0]
                setup, _ = stand_in.without_engine.quickest
                site.least_products = self.training(stand_in, setup).compute
        return site.least_products

    def least_step_at(self, site: Site) -> float:
        """The same of a whole step.

        Sampling is left out where a wider place could use another engine: GPUs per node that are
        no power of two, or engines on GPUs of their own.
        """
        if site.least_step is None:
            site.least_step = self.least_products(site)
            per_node = site.place.per_node
            is_power_of_two = per_node & (per_node - 1) == 0
            if site.least_step and is_power_of_two and not self._engines.may_have_own_gpus:
                site.least_step += min(map(self._least_sampling_of, site.stand_ins))
        return site.least_step

    def _least_sampling_of(self, extent: Extent) -> float:
        """The sampling of the same, with the passes that an engine is compared by. An offloaded
        base makes none faster."""
        key = (id(extent.place), extent.precision, extent.method.zero == 3)
        if key not in self._least_sampling:
            stand_in = extent.stand_in
            # Of equal engines the last is awake where one may be: sleep makes none faster.
            by_gpus = {_sort_of(engine): engine for engine in stand_in.candidates}
            # There may be no room for the only engine that is allowed.
            least = inf
            for variants in map(stand_in.variants_with, by_gpus.values()):
                comparison = self._comparison(stand_in, variants)
                seconds = self.least_sampling(stand_in, variants, least - comparison)
                least = min(least, seconds + comparison)
            self._least_sampling[key] = least
        return self._least_sampling[key]

    def _comparison(self, extent: Extent, variants: Variants) -> float:
        """Least seconds of the policy's passes that an engine is compared by."""
        if variants.engine is None:
            return 0.0
        with_engine, _ = variants.quickest
        return sum(self.training(extent, with_engine)) - self.least_training(extent)

    def least_sampling(self, extent: Extent, variants: Variants, most: float = inf) -> float:
        """Seconds of sampling with an engine at the fastest settings, whether or not they fit;
        `most` will do where they are no fewer."""
        setup, calls = variants.quickest
        if variants.engine:
            return sum(self.sampling(extent, setup, calls))
        return self.fastest_batch(extent, variants, setup, most).seconds

    def fastest_batch(
        self, extent: Extent, variants: Variants, setup: Setup, most: float = inf
    ) -> BatchTime:
        """Return the generation batch that samples fastest without an engine, up to that of a
        setup; a size of 0 and `most` where none takes less than that.

        generate() decodes until the longest completion of its batch has ended, and the longest of
        few is shorter. Where caches cost more traffic than the weights, as with long completions,
        two calls may take less time than one.

        Ranges of sizes wait in the order of a lower bound of their seconds. Once that has reached
        the least seconds found, no size that waits is faster.
        """
        key = _sampling_key(extent, setup)
        if key in self._fastest_batches:
            return self._fastest_batches[key]
        whole = sum(self.sampling(extent, setup, variants.calls(setup)))
        fastest = min(BatchTime(most, 0), BatchTime(whole, setup.generation_batch))
        smaller = variants.smaller_batches(setup)
        waiting = [(0.0, smaller)] if smaller else []
        while waiting and waiting[0][0] < fastest.seconds:
            _, sizes = heapq.heappop(waiting)
            largest = variants.with_batch(setup, sizes[0])
            if len(sizes) == 1:
                seconds = sum(self.sampling(extent, largest, variants.calls(largest)))
                fastest = min(fastest, BatchTime(seconds, sizes[0]))
                continue
            middle = len(sizes) // 2
            for part in (sizes[:middle], sizes[middle:]):
                least = self._least_of_batches(extent, variants, setup, part)
                heapq.heappush(waiting, (least, part))
        if fastest.size:
            self._fastest_batches[key] = fastest
        return fastest

    def _least_of_batches(
        self, extent: Extent, variants: Variants, setup: Setup, sizes: tuple[int, ...]
    ) -> float:
        """Less than the seconds of sampling by generation batches of any of these sizes, largest
        first."""
        largest = variants.with_batch(setup, sizes[0])
        calls = variants.full_calls(largest)
        hardware = extent.place.pool.hardware
        generation = transformers_seconds(
            self._demand.shape, largest, hardware, calls, smallest=sizes[-1]
        )
        return sum(self._sampling_time(extent, largest, calls, generation))

    def fitting_training(self, extent: Extent, variants: Variants) -> list[tuple[float, float]]:
        """For each share of a GPU that is weighed: the least seconds of training beside an engine
        that takes nothing, and the factor by which its risk makes them count longer."""
        quickest, _ = variants.quickest
        scores = quickest.scores_old_policy
        if scores not in extent.fitting_training:
            fitting = extent.fitting_training[scores] = []
            for share, crowded in zip(SHARES, CROWDED, strict=True):
                limit = int(share * extent.place.pool.usable_bytes)
                setups = list(variants.training_setups(limit))
                times = [sum(self.training(extent, setup)) for setup in setups]
                if times:
                    fitting.append((min(times), crowded))
                if quickest in setups:
                    # More room makes nothing faster.
                    break
        return extent.fitting_training[scores]

    def sampling(self, extent: Extent, setup: Setup, calls: float) -> SamplingTime:
        """Seconds of a step that depend on the engine."""
        place = extent.place
        key = _sampling_key(extent, setup)
        corrected_time = self._sampling.get(key)
        if corrected_time is None:
            server_pool = self.servers(place, setup.engine)
            sampler = server_pool.hardware if server_pool else place.pool.hardware
            generation = self._generation(extent, setup, calls, sampler)
            corrected_time = self._sampling_time(extent, setup, calls, generation, server_pool)
            self._sampling[key] = corrected_time
        return corrected_time

    def _sampling_time(
        self,
        extent: Extent,
        setup: Setup,
        calls: float,
        generation: float,
        server_pool: Pool | None = None,
    ) -> SamplingTime:
        """The same of a generation that takes so long."""
        place = extent.place
        time = sampling_time(
            self._demand.shape, setup, place.pool.hardware, place.nodes, calls,
            generation=generation,
        )  # fmt: skip
        return time.as_measured(self._correction(place, setup.engine, server_pool))

    def _generation(self, extent: Extent, setup: Setup, calls: float, sampler: Product) -> float:
        """Seconds of generating on `sampler`, which an engine's sleep and base do not change, nor
        the dtype of the trainer's own weights."""
        sort = _sort_of(setup.engine)
        dtype = setup.compute_dtype if sort else extent.precision
        key = (id(extent.place), dtype, sort, setup.generation_batch)
        if key not in self._generations:
            self._generations[key] = generation_seconds(self._demand.shape, setup, sampler, calls)
        return self._generations[key]

    def correction(self, place: Place, engine: Engine | None) -> StepCorrection | None:
        """The correction of a whole step's time; None without measured steps on its GPUs."""
        training = self._demand.correction(place.pool.label, place.world, place.nodes)
        sampling = self._correction(place, engine, self.servers(place, engine))
        # A step that is measured in one part only has no known spread as a whole.
        if training is None or sampling is None:
            return None
        return sampling.with_training(training)

    def _correction(
        self, place: Place, engine: Engine | None, server_pool: Pool | None
    ) -> StepCorrection | None:
        label = server_pool.label if server_pool else place.pool.label
        sampler = sampler_of(engine)
        return self._demand.correction(label, place.world, place.nodes, sampler)

    def servers(self, place: Place, engine: Engine | None) -> Pool | None:
        """The pool of engines that have GPUs of their own."""
        has_own = engine and engine.kind == "Servers"
        return self._engines.server_pool(place) if has_own else None


def _sampling_key(extent: Extent, setup: Setup) -> tuple[object, ...]:
    """What the time of sampling depends on."""
    is_gathered = extent.method.zero == 3
    return (
        id(extent.place), extent.precision, id(setup.engine), is_gathered, setup.gather,
        setup.generation_batch,
    )  # fmt: skip


def _sort_of(engine: Engine | None) -> tuple[str, int] | None:
    """What engines of a place share that generate equally fast."""
    return (engine.kind, engine.tensor_parallel) if engine else None
