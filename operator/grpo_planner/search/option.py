"""Option: one way of running the job in one place, with everything that the choice looks at."""

from dataclasses import dataclass
from typing import Literal

from ..hardware.pools import Place
from .footprints import Footprint


@dataclass(frozen=True, slots=True)
class Option:
    """A footprint in a place."""

    place: Place
    footprint: Footprint
    host: int
    """Bytes of host memory that one pod must have."""
    seconds: float
    """Time of one step."""

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
    def preference(self) -> tuple[object, ...]:
        """Among equals: fewer GPUs, no offload, lower stage, fewer nodes, less time, then anything that is stable."""
        place, method = self.place, self.footprint.method
        return (
            place.world, method.offload, method.reference == "Offload", method.zero, place.nodes,
            round(self.seconds, 6), place.pool.label, place.pool.resource, place.pool.selector, method.name,
        )  # fmt: skip
