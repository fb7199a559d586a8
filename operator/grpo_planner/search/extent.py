"""An extent, which is a method in one place, and how long steps take there."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ..hardware.pools import Place, Pool
from ..memory.setup import Precision, Setup
from ..time.measured_runs import StepCorrection, sampler_of
from ..time.step_time import SamplingTime, StepTime, sampling_time, training_time
from ..time.training import TrainingTime
from .demand import Demand
from .engines import Engines
from .footprints import Variants
from .methods import Method
from .option import Objective, Option, Score


@dataclass(eq=False, slots=True)
class Extent:
    """A method in one place, with what a search has worked out of it; each exists once."""

    place: Place
    method: Method
    precision: Precision
    training: dict[tuple[int, bool], TrainingTime] = field(default_factory=dict, repr=False)
    """By micro-batch and checkpointing."""
    bounds: dict[Objective, Score] = field(default_factory=dict, repr=False)
    """The best score that it can have."""
    options: dict[Variants, list[Option]] = field(default_factory=dict, repr=False)
    """What fits with an engine, as far as it may be chosen."""
    variants: tuple[Variants, ...] = ()
    """With each engine of its place."""
    without_engine: Variants | None = None
    may_train: bool | None = None
    """Whether training has room, whatever samples beside it."""
    least_training: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """Least seconds of training beside nothing, and by how much longer they count."""


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
            own = self.servers(place, setup)
            hardware = place.pool.hardware
            time = sampling_time(
                self._demand.shape,
                setup,
                hardware,
                place.nodes,
                calls,
                servers=own.hardware if own else None,
            )
            known = time.as_measured(self._correction(place, setup, own))
            self._sampling[key] = known
        return known

    def correction(self, place: Place, setup: Setup) -> StepCorrection | None:
        """What corrects the time of a whole step; None where nothing was measured on its GPUs."""
        training = self._demand.correction(place.pool.label, place.world, place.nodes)
        sampling = self._correction(place, setup, self.servers(place, setup))
        if training is None or sampling is None:
            return None
        return sampling.with_training(training)

    def _correction(self, place: Place, setup: Setup, own: Pool | None) -> StepCorrection | None:
        label = own.label if own else place.pool.label
        sampler = sampler_of(setup.engine)
        return self._demand.correction(label, place.world, place.nodes, sampler)

    def servers(self, place: Place, setup: Setup) -> Pool | None:
        """Where the engines of a setup are that have GPUs of their own."""
        has_own = setup.engine and setup.engine.kind == "Servers"
        return self._engines.server_pool(place) if has_own else None
