"""Option: one way of running the job in one place, with everything that the choice looks at."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..hardware.pools import Place, Pool
from ..memory.setup import Engine
from .footprints import Footprint
from .steptime import StepTime

ROOMY, NEARLY_FULL = 0.80, 0.90
"""Shares of a GPU up to which a plan has room for what the model doesn't know, and some of it: in the 454 measured runs
of Fujii et al. (2024, arXiv 2411.06465) no estimate below 80 % ran out of memory."""

CROWDED, OFFLOADED = 1.25, 1.1
"""By how much longer the time of a plan counts that fills more than NEARLY_FULL of a GPU, and of one whose optimizer is
offloaded (assumed, until both are calibrated on GPUs). The first may run out of memory and begin again; the second
rests on host memory and a host link of which least is known, and takes of both what no GPU-second tells."""


class Beside(NamedTuple):
    """GPUs of engines in pods of their own."""

    gpus: int
    price: float
    """Of all of them for an hour."""


NOTHING_BESIDE = Beside(0, 0.0)


def beside(engine: Engine | None, servers: Pool | None) -> Beside:
    """The GPUs of an engine beside the trainer's; `servers`: where they are."""
    if engine is None or servers is None:
        return NOTHING_BESIDE
    gpus = engine.replicas * engine.tensor_parallel
    return Beside(gpus, gpus * servers.price)


@dataclass(frozen=True, slots=True)
class Option:
    """A footprint in a place."""

    place: Place
    footprint: Footprint
    host: int
    """Bytes of host memory that one pod must have."""
    time: StepTime
    """Time of one step by its parts."""
    servers: Pool | None = None
    """Where engines in pods of their own are; None without such."""
    seconds: float = field(init=False)
    """Time of one step."""

    def __post_init__(self) -> None:
        """Adds up the time once, as sorting asks for it again and again."""
        object.__setattr__(self, "seconds", self.time.total)

    @property
    def engine_gpus(self) -> int:
        """GPUs of engines in pods of their own, beside the place's."""
        return self.beside.gpus

    @property
    def beside(self) -> Beside:
        """The same with their price."""
        return beside(self.footprint.setup.engine, self.servers)

    @property
    def gpu_seconds(self) -> float:
        """What one step takes of all GPUs, the engines' among them."""
        return (self.place.world + self.engine_gpus) * self.seconds

    @property
    def tier(self) -> Literal[0, 1, 2]:
        """How far what it trains departs from what was asked for."""
        return self.footprint.method.tier

    @property
    def shortage(self) -> Literal["DeviceMemory", "HostMemory"] | None:
        """What it doesn't fit, if anything."""
        if self.footprint.device > self.place.pool.usable:
            return "DeviceMemory"
        return "HostMemory" if self.host > self.place.host_memory else None

    @property
    def device_share(self) -> float:
        """What it takes of a GPU as a share of what the GPU has; above 1 it doesn't fit."""
        return self.footprint.device / max(1, self.place.pool.usable)

    @property
    def host_share(self) -> float:
        """The same of a node's host memory."""
        return self.host / max(1, self.place.host_memory)

    @property
    def crowding(self) -> Literal[0, 1, 2]:
        """How much it lacks room on a GPU: not at all, a little, or very much. Up to ROOMY, less is no better."""
        if self.device_share <= ROOMY:
            return 0
        return 1 if self.device_share <= NEARLY_FULL else 2

    @property
    def risk(self) -> float:
        """By how much longer its time counts where what may go wrong is weighed against GPUs; 1 for nothing of it."""
        crowded = CROWDED if self.crowding == 2 else 1.0
        return crowded * (OFFLOADED if self.footprint.method.offload else 1.0)

    @property
    def prudence(self) -> tuple[object, ...]:
        """Among equals on as many GPUs: no offloaded optimizer, whose host memory is the least known, then room."""
        return self.footprint.method.offload, self.crowding, self.preference

    @property
    def preference(self) -> tuple[object, ...]:
        """Among equals: fewer GPUs, no offload, lower stage, fewer nodes, less time, then anything that is stable."""
        place, method = self.place, self.footprint.method
        return (
            place.world, method.offload, method.reference == "Offload", method.zero, place.nodes,
            round(self.seconds, 6), place.pool.label, place.pool.resource, place.pool.selector, method.name,
        )  # fmt: skip
