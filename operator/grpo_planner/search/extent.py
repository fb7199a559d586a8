"""An extent, which is a method in one place, and how long steps take there."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ..hardware.pools import Place, Pool
from ..hardware.products import Product
from ..memory.setup import Engine, Precision, Setup
from ..time.measured_runs import StepCorrection, sampler_of
from ..time.sampling import generation_seconds
from ..time.step_time import SamplingTime, StepTime, sampling_time, training_time
from ..time.training import TrainingTime
from .demand import Demand
from .engines import Engines
from .footprints import Variants
from .methods import Method
from .option import CROWDED, NEARLY_FULL, ROOMY, Option, Score


@dataclass(eq=False, slots=True)
class Extent:
    """A method in one place, with what a search has worked out of it; each exists once."""

    place: Place
    method: Method
    precision: Precision
    without_engine: Variants
    """Whether or not one is asked for."""
    training: dict[tuple[int, bool], TrainingTime] = field(default_factory=dict, repr=False)
    """By micro-batch and checkpointing."""
    least_seconds: float | None = None
    """Of a step, at its fastest settings with the fastest engine of its place, be they feasible or
    not."""
    options: dict[Variants, list[Option]] = field(default_factory=dict, repr=False)
    """What fits with an engine, as far as it may be chosen."""
    variants: tuple[Variants, ...] = ()
    """With each engine of its place."""
    may_train: bool | None = None
    """Whether training has room, whatever samples beside it."""
    fitting_training: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """Least seconds of training that fits beside nothing, and by how much longer they count."""


class Entry(NamedTuple):
    """What waits to be looked at."""

    bound: Score
    serial: int
    """Decides among equal bounds, so that the order is the same every time."""
    extent: Extent
    variants: Variants | None
    """With one engine; None for all engines of the place."""


class Times:
    """Step times of one demand on the places of a search, each worked out once."""

    def __init__(self, demand: Demand, engines: Engines) -> None:
        """`engines`: those of the search."""
        self._demand, self._engines = demand, engines
        self._sampling: dict[tuple[object, ...], SamplingTime] = {}
        self._generations: dict[tuple[object, ...], float] = {}

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
        """What does not depend on what samples."""
        key = (setup.micro_batch, setup.checkpointing)
        known = extent.training.get(key)
        if known is None:
            place = extent.place
            pool = place.pool
            time = training_time(self._demand.shape, setup, pool.hardware, place.nodes)
            correction = self._demand.correction(pool.label, place.world, place.nodes)
            known = time.as_measured(correction)
            extent.training[key] = known
        return known

    def least_training(self, extent: Extent) -> float:
        """Seconds of training at the fastest settings, whether or not they fit."""
        setup, _ = extent.without_engine.quickest
        return sum(self.training(extent, setup))

    def fitting_training(self, extent: Extent) -> list[tuple[float, float]]:
        """Least seconds of training beside nothing, and by how much longer they count, for each
        share of a GPU that is weighed."""
        if not extent.fitting_training:
            alone = extent.without_engine
            quickest, _ = alone.quickest
            for share, crowded in zip((ROOMY, NEARLY_FULL, 1.0), CROWDED, strict=True):
                limit = int(share * extent.place.pool.usable_bytes)
                setups = list(alone.training_setups(limit))
                times = [sum(self.training(extent, setup)) for setup in setups]
                if times:
                    extent.fitting_training.append((min(times), crowded))
                if quickest in setups:
                    # More room makes nothing faster.
                    break
        return extent.fitting_training

    def sampling(self, extent: Extent, setup: Setup, calls: float) -> SamplingTime:
        """What depends on what samples."""
        place = extent.place
        is_gathered = extent.method.zero == 3
        key = (
            id(place), extent.precision, id(setup.engine), is_gathered, setup.gather,
            setup.generation_batch,
        )  # fmt: skip
        known = self._sampling.get(key)
        if known is None:
            own = self.servers(place, setup.engine)
            sampler = own.hardware if own else place.pool.hardware
            generation = self._generation(extent, setup, calls, sampler)
            hardware = place.pool.hardware
            time = sampling_time(
                self._demand.shape, setup, hardware, place.nodes, calls, generation=generation
            )
            known = time.as_measured(self._correction(place, setup.engine, own))
            self._sampling[key] = known
        return known

    def _generation(self, extent: Extent, setup: Setup, calls: float, sampler: Product) -> float:
        """Seconds of generating on `sampler`, which an engine's sleep and base do not change."""
        engine = setup.engine
        sort = (engine.kind, engine.tensor_parallel) if engine else None
        key = (id(extent.place), extent.precision, sort, setup.generation_batch)
        if key not in self._generations:
            self._generations[key] = generation_seconds(self._demand.shape, setup, sampler, calls)
        return self._generations[key]

    def correction(self, place: Place, engine: Engine | None) -> StepCorrection | None:
        """What corrects the time of a whole step; None where nothing was measured on its GPUs."""
        training = self._demand.correction(place.pool.label, place.world, place.nodes)
        sampling = self._correction(place, engine, self.servers(place, engine))
        if training is None or sampling is None:
            return None
        return sampling.with_training(training)

    def _correction(
        self, place: Place, engine: Engine | None, own: Pool | None
    ) -> StepCorrection | None:
        label = own.label if own else place.pool.label
        sampler = sampler_of(engine)
        return self._demand.correction(label, place.world, place.nodes, sampler)

    def servers(self, place: Place, engine: Engine | None) -> Pool | None:
        """Where engines are that have GPUs of their own."""
        has_own = engine and engine.kind == "Servers"
        return self._engines.server_pool(place) if has_own else None
