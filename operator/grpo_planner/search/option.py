"""Defines Option, one way of running the job in one place, and chooses among options.

The choice gives the best option, the nearest miss where nothing fits, and the options worth
showing. An objective gives every option a score, and scores within NEAR of the best are a tie:
neither the constants of memory nor those of time have been measured on a GPU. In a tie the room
left on the GPU decides, because a run that goes out of memory costs more than 5 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, NamedTuple

from ..hardware.pools import Place, Pool
from ..memory.setup import Engine
from ..time.step_time import StepTime
from .footprints import Footprint

ROOMY, NEARLY_FULL = 0.80, 0.90
"""Shares of a GPU up to which a plan has room for what the model doesn't know, and some of it: in
the 454 measured runs of Fujii et al. (2024, arXiv 2411.06465) no estimate below 80 % ran out of
memory."""

CROWDED, OFFLOADED = 1.25, 1.1
"""By how much longer the time of a plan counts that fills more than NEARLY_FULL of a GPU, and of
one whose optimizer is offloaded (assumed, until both are calibrated on GPUs). The first may run out
of memory and begin again; the second rests on host memory and a host link of which least is known,
and takes of both what no GPU-second tells."""


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
        if self.footprint.device > self.place.pool.usable_bytes:
            return "DeviceMemory"
        return "HostMemory" if self.host > self.place.host_memory else None

    @property
    def device_share(self) -> float:
        """What it takes of a GPU as a share of what the GPU has; above 1 it doesn't fit."""
        return self.footprint.device / max(1, self.place.pool.usable_bytes)

    @property
    def host_share(self) -> float:
        """The same of a node's host memory."""
        return self.host / max(1, self.place.host_memory)

    @property
    def crowding(self) -> Literal[0, 1, 2]:
        """How much it lacks room on a GPU: not at all, a little, or very much. Up to ROOMY, less is
        no better."""
        if self.device_share <= ROOMY:
            return 0
        return 1 if self.device_share <= NEARLY_FULL else 2

    @property
    def risk(self) -> float:
        """By how much longer its time counts where what may go wrong is weighed against GPUs; 1 for
        nothing of it."""
        crowded = CROWDED if self.crowding == 2 else 1.0
        return crowded * (OFFLOADED if self.footprint.method.offload else 1.0)

    @property
    def prudence(self) -> tuple[object, ...]:
        """Among equals on as many GPUs: no offloaded optimizer, whose host memory is the least
        known, then room."""
        return self.footprint.method.offload, self.crowding, self.preference

    @property
    def preference(self) -> tuple[object, ...]:
        """Among equals: fewer GPUs, no offload, lower stage, fewer nodes, less time, then anything
        that is stable."""
        place, method = self.place, self.footprint.method
        return (
            place.world, method.offload, method.reference == "Offload", method.zero, place.nodes,
            round(self.seconds, 6), place.pool.label, place.pool.resource, place.pool.selector,
            method.name,
        )  # fmt: skip


NEAR = 1.05
"""Costs within this factor of the best are as good as it; an objective of Fastest takes no such
liberty."""

Objective = Literal["Balanced", "Fastest", "FewestGPUs", "Cheapest", "Knee"]
"""The spec's objectives, and Knee: Balanced on any number of nodes."""
Score = tuple[int, float]
"""What an objective compares first, and what it then wants little of; only the latter has ties."""


def score(
    objective: Objective,
    place: Place,
    seconds: float,
    risk: float = 1.0,
    *,
    beside: Beside = NOTHING_BESIDE,
) -> Score:
    """What an objective wants little of; grows with `seconds` and `risk`, so lower bounds of them
    bound it.

    GPUs of engines count as the place's own, and their price with it.

    Balanced takes more GPUs only as long as GPU-seconds per step rise no faster than time falls,
    `N2 t2 / (N1 t1) <= t1 / t2`: the least `N t**2`, whose root is proportional to time. A time at
    a risk counts as longer: idle GPUs of a node are worth taking where they spare it one.
    """
    if objective in ("Balanced", "Knee"):
        cost = sqrt(place.world + beside.gpus) * seconds * risk
    else:
        hourly = place.pool.price * place.world + beside.price
        cost = hourly * seconds if objective == "Cheapest" else seconds
    return precedence(objective, place), cost


def score_of(objective: Objective, option: Option) -> Score:
    """The score of an option."""
    return score(objective, option.place, option.seconds, option.risk, beside=option.beside)


def precedence(objective: Objective, place: Place) -> int:
    """What an objective compares first, known before any time: Balanced stays on one node where
    anything fits there."""
    if objective == "FewestGPUs":
        return place.world
    return int(objective == "Balanced" and place.nodes > 1)


def is_as_good(objective: Objective, one: Score, best: Score) -> bool:
    """Whether a score is a tie with the best, or better."""
    return one <= (best[0], best[1] * (1.0 if objective == "Fastest" else NEAR))


def choose(options: Sequence[Option], objective: Objective) -> Option | None:
    """The best that fits: first by what is trained, then by the objective, then by room; None if
    nothing fits."""
    fitting = [option for option in options if not option.shortage]
    if not fitting:
        return None
    tier = min(option.tier for option in fitting)
    scored = [(score_of(objective, o), o) for o in fitting if o.tier == tier]
    best, leader = min(scored, key=lambda pair: (pair[0], pair[1].preference))
    equals = [
        o
        for found, o in scored
        if o.place.world == leader.place.world and is_as_good(objective, found, best)
    ]
    return min(equals, key=lambda option: option.prudence)


def closest_miss(options: Sequence[Option]) -> Option | None:
    """What comes nearest to fitting: least missing share of device and host memory together; None
    without options."""

    def missing(option: Option) -> tuple[float, tuple[object, ...]]:
        return max(0.0, option.device_share - 1) + max(
            0.0, option.host_share - 1
        ), option.preference

    return min(options, key=missing, default=None)


def notable(options: Sequence[Option], chosen: Option | None) -> list[Option]:
    """What is worth showing: of each pool and method the best extent, and the chosen method's other
    extents."""
    alike: dict[tuple[str, str, str], list[Option]] = {}
    for option in options:
        pool, method = option.place.pool, option.footprint.method
        alike.setdefault((pool.label, pool.resource, method.name), []).append(option)
    shown = {id(min(extents, key=_closeness)) for extents in alike.values()}
    return [
        option
        for option in options
        if id(option) in shown or (chosen and has_same_method(option, chosen))
    ]


def has_same_method(option: Option, other: Option) -> bool:
    """Whether two options are extents of one method in one pool."""
    return (
        option.footprint.method == other.footprint.method and option.place.pool is other.place.pool
    )


def _closeness(option: Option) -> tuple[bool, float, tuple[object, ...]]:
    """Smaller is better: what fits by time, then what does not by how much it lacks."""
    lacks = option.device_share + option.host_share
    return (
        option.shortage is not None,
        lacks if option.shortage else option.seconds,
        option.preference,
    )
