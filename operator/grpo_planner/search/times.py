"""Times: the step times of extents and the bounds by which the search skips what cannot win."""

import heapq
from math import inf
from typing import NamedTuple

from ..hardware.pools import Place, Pool
from ..hardware.products import Product
from ..memory.setup import Engine, Setup
from ..time.measured_runs import StepCorrection, sampler_of
from ..time.sampling import generation_seconds, transformers_seconds
from ..time.step_time import SamplingTime, StepTime, sampling_time, scoring_time, training_time
from ..time.training import TrainingTime, scoring_passes, update_seconds
from .demand import Demand
from .engines import Engines
from .extent import Extent, Site
from .footprints import Update, Variants
from .option import ROUNDING


class BatchTime(NamedTuple):
    """Seconds of sampling by calls of generate of a size."""

    seconds: float
    size: int


class Times:
    """Step times of one demand on the places of a search, each worked out once."""

    def __init__(self, demand: Demand, engines: Engines) -> None:
        """`engines`: those of the search."""
        self._demand, self._engines = demand, engines
        self._shape = demand.shape
        self.is_measured = bool(demand.learned.step or demand.measured.rows)
        """True if measured steps may correct the time model."""
        self._updates: dict[tuple[object, ...], float] = {}
        self._sampling: dict[tuple[object, ...], SamplingTime] = {}
        self._generations: dict[tuple[object, ...], float] = {}
        self._least_sampling: dict[tuple[object, ...], float] = {}
        self._scoring: dict[tuple[object, ...], float] = {}
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
            compute = self._update_seconds(place, setup)
            corrected_time = training_time(
                self._shape, setup, pool.hardware, place.nodes, compute=compute
            )
            if self.is_measured:
                correction = self._demand.correction(pool.label, place.world, place.nodes)
                corrected_time = corrected_time.as_measured(correction)
            extent.training[key] = corrected_time
        return corrected_time

    def _update_seconds(self, place: Place, setup: Setup) -> float:
        """Seconds of computing an update, which all methods share that train the same."""
        key = (
            id(place), setup.has_lora, setup.micro_batch, setup.checkpointing,
            scoring_passes(setup),
        )  # fmt: skip
        if key not in self._updates:
            self._updates[key] = update_seconds(self._shape, setup, place.pool.hardware)
        return self._updates[key]

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
            if not self.is_measured:
                setup, _ = site.stand_in.without_engine.quickest
                site.least_products = self._update_seconds(site.place, setup)
        return site.least_products

    def least_step_at(self, site: Site) -> float:
        """Less than the seconds of a whole step by any method of a site, there or on as many GPUs
        of more nodes.

        Sampling is left out where a wider place could use another engine: GPUs per node that are
        no power of two, or engines on GPUs of their own.
        """
        if site.least_step is None:
            site.least_step = self.least_products(site)
            per_node = site.place.per_node
            is_power_of_two = per_node & (per_node - 1) == 0
            if site.least_step and is_power_of_two and not self._engines.may_have_own_gpus:
                site.least_step += self._least_sampling_of(site.stand_in)
        return site.least_step

    def _least_sampling_of(self, extent: Extent) -> float:
        """The sampling of the same, with the passes that an engine is compared by. An offloaded
        base makes none faster."""
        key = (id(extent.place), extent.precision, extent.method.zero == 3)
        if key not in self._least_sampling:
            # Of equal engines the last is awake where one may be: sleep makes none faster.
            by_gpus = {
                _sort_of(engine): engine
                for engine in extent.engines_with_room
                if not (engine and engine.offloads_base)
            }
            # There may be no room for the only engine that is allowed.
            least = inf
            for variants in map(extent.variants_with, by_gpus.values()):
                comparison = self._comparison(extent, variants)
                seconds = self.least_sampling(extent, variants, least - comparison)
                least = min(least, seconds + comparison)
            self._least_sampling[key] = least
        return self._least_sampling[key]

    def _comparison(self, extent: Extent, variants: Variants) -> float:
        """Least seconds of the policy's pass that an engine is compared by."""
        setup, _ = variants.quickest
        alone, _ = extent.without_engine.quickest
        if setup.scores_old_policy == alone.scores_old_policy:
            return 0.0
        place = extent.place
        key = (id(place), extent.precision, setup.zero)
        if key not in self._scoring:
            pool = place.pool
            seconds = scoring_time(self._shape, setup, pool.hardware, place.nodes)
            correction = self._demand.correction(pool.label, place.world, place.nodes)
            self._scoring[key] = seconds * (correction.training if correction else 1.0)
        return self._scoring[key]

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
        fastest = BatchTime(most, 0)
        every_size = (setup.generation_batch, *variants.smaller_batches(setup))
        waiting = [(self._least_of_batches(extent, variants, setup, every_size), every_size)]
        while waiting and waiting[0][0] < fastest.seconds:
            least, sizes = heapq.heappop(waiting)
            if len(sizes) == 1:
                single = variants.with_batch(setup, sizes[0])
                seconds = sum(self.sampling(extent, single, variants.calls(single)))
                fastest = min(fastest, BatchTime(seconds, sizes[0]))
                continue
            # The largest is mostly the fastest, so it is tried first.
            middle = 1 if sizes is every_size else len(sizes) // 2
            for part in (sizes[:middle], sizes[middle:]):
                if len(part) > 1:
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
        generation = transformers_seconds(self._shape, largest, hardware, calls, smallest=sizes[-1])
        return sum(self._sampling_time(extent, largest, calls, generation))

    def fastest(
        self, extent: Extent, variants: Variants, usable: int, least: float
    ) -> Setup | None:
        """Return the fastest setup that takes at most `usable` bytes of a GPU; None where none
        takes less than `least` seconds."""
        least_sampling = self.least_sampling(extent, variants)
        fastest = None

        def may_win(update: Update) -> bool:
            if least == inf:
                return True
            # Most updates train longer than a whole step of a faster one, whatever they sample by.
            training = sum(self.training(extent, variants.update_setup(update)))
            return training + least_sampling <= least * (1 + ROUNDING)

        # Whatever is sampled beside it, no update is faster than these.
        updates = extent.without_engine.fastest_updates(usable)
        if least < inf and not any(map(may_win, updates)):
            return None
        for fitting in variants.fitting(usable, may_win):
            setup = self.with_fastest_batch(extent, variants, fitting)
            seconds = self.step(extent, setup, variants.calls(setup)).total
            if seconds < least:
                fastest, least = setup, seconds
        return fastest

    def with_fastest_batch(self, extent: Extent, variants: Variants, setup: Setup) -> Setup:
        """A setup with the generation batch that samples fastest, up to its own."""
        if variants.engine:
            return setup
        batch = self.fastest_batch(extent, variants, setup)
        return variants.with_batch(setup, batch.size)

    def fitting_training(self, extent: Extent, variants: Variants) -> list[tuple[float, float]]:
        """For each share of a GPU that is weighed: the least seconds of training beside an engine
        that takes nothing, and the factor by which its risk makes them count longer."""
        setup, _ = variants.quickest
        scores = setup.scores_old_policy
        if scores not in extent.fitting_training:
            fitting = extent.fitting_training[scores] = []
            for updates, crowded in extent.fitting_updates:
                setups = map(variants.update_setup, updates)
                least = min(sum(self.training(extent, setup)) for setup in setups)
                fitting.append((least, crowded))
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
        """Seconds of a step that depend on the engine, for a generation of `generation` seconds."""
        place = extent.place
        time = sampling_time(
            self._shape, setup, place.pool.hardware, place.nodes, calls,
            generation=generation,
        )  # fmt: skip
        if not self.is_measured:
            return time
        return time.as_measured(self._correction(place, setup.engine, server_pool))

    def _generation(self, extent: Extent, setup: Setup, calls: float, sampler: Product) -> float:
        """Seconds of generating on `sampler`, which an engine's sleep and base do not change, nor
        the dtype of the trainer's own weights."""
        sort = _sort_of(setup.engine)
        dtype = setup.compute_dtype if sort else extent.precision
        key = (id(extent.place), dtype, sort, setup.generation_batch)
        if key not in self._generations:
            self._generations[key] = generation_seconds(self._shape, setup, sampler, calls)
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
