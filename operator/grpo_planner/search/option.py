"""Defines Option, one way of running the job in one place, and chooses among options.

The choice gives the best option, the nearest miss where nothing fits, and the options worth
showing. An objective gives every option one number, its score, and the least score is chosen. Risks
are part of the number: a nearly full GPU, an optimizer in host memory and a gang on several nodes
count as time. So no second rule decides beside the score.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, NamedTuple

from grpo_api.spec.run_policy import Objective

from ..hardware.pools import Place, Pool
from ..memory.setup import Engine
from ..time.measured_runs import StepCorrection
from ..time.step_time import StepTime, step_range
from .footprints import Footprint
from .methods import Method

ROOMY, NEARLY_FULL, FULL = 0.80, 0.90, 0.97
"""Shares of a GPU up to which a plan has room for what the model doesn't know, and some of it: in
the 454 measured runs of Fujii et al. (2024, arXiv 2411.06465) no estimate below 80 % ran out of
memory. Past FULL less is left than half of what one GPU has confirmed and no gang (context,
communicator, fragments; memory/phases.py), so that a small error there runs out of memory."""
SHARES = (ROOMY, NEARLY_FULL, FULL, 1.0)
"""Shares of a GPU that a plan is weighed by."""

CROWDED = (1.0, 1.05, 1.25, 1.3)
"""By how much longer the time of a plan counts that fills a GPU up to each of SHARES (assumed,
until calibrated on GPUs): it may run out of memory and begin again. A full GPU counts more than an
offloaded optimizer, which is what a job that has run out of memory is given next."""
OFFLOADED, WEIGHTS_OFFLOADED = 1.25, 1.05
"""The same of a plan whose optimizer is offloaded, and of one whose reference or base is (assumed).
They use host memory and the host link. Both are poorly known, and GPU-seconds do not count
them."""
PARTITIONED = {0: 1.0, 2: 1.02, 3: 1.04}
"""The same by ZeRO stage (assumed): hooks and buckets, of which the time model counts nothing. So
sharding is chosen where it saves something."""
SEVERAL_NODES = 1.25
"""The same of a gang on several nodes (assumed). Published runs of 70B models on 64 GPUs train 2 to
3 times as long as their links' bandwidth alone explains (NVIDIA-NeMo/RL#959)."""


ROUNDING = 1e-9
"""Share by which a bound may be above what it bounds, as it adds or multiplies in another order."""


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
    correction: StepCorrection | None = None
    """What was measured of steps on these GPUs, by which the time is corrected."""
    seconds: float = field(init=False)
    """Time of one step."""

    def __post_init__(self) -> None:
        # Kept, since sorting asks for it again and again.
        object.__setattr__(self, "seconds", self.time.total)

    @property
    def published_seconds(self) -> float:
        """The time of one step as a plan has it, of which tables and sentences tell."""
        return round(self.seconds, 2)

    @property
    def least_seconds(self) -> float:
        """The low end of the range of its time."""
        return least_seconds(self.seconds, self.correction)

    @property
    def engine_gpus(self) -> int:
        """GPUs of engines in pods of their own, beside the place's."""
        return self.beside.gpus

    @property
    def beside(self) -> Beside:
        """GPUs of engines in pods of their own, with their price."""
        return beside(self.footprint.setup.engine, self.servers)

    @property
    def tier(self) -> Literal[0, 1, 2]:
        """How far what it trains departs from what was asked for."""
        return self.footprint.method.tier

    @property
    def shortage(self) -> Literal["DeviceMemory", "HostMemory"] | None:
        """The kind of memory that is too small for the option; empty if it fits."""
        if self.footprint.device > self.place.pool.usable_bytes:
            return "DeviceMemory"
        return "HostMemory" if self.host > self.place.host_memory else None

    @property
    def device_share(self) -> float:
        """What it takes of a GPU as a share of what the GPU has; above 1 it doesn't fit."""
        return self.footprint.device / max(1, self.place.pool.usable_bytes)

    @property
    def crowding(self) -> int:
        """How full the GPU is, as an index into SHARES. Shares up to ROOMY are equally good."""
        return bisect_left(SHARES[:-1], self.device_share)

    @property
    def risk(self) -> float:
        """The factor by which the option's time counts longer, for its risks; 1 without any."""
        setup, method = self.footprint.setup, self.footprint.method
        return CROWDED[self.crowding] * place_risk(self.place, method, setup.engine)

    @property
    def preference(self) -> tuple[object, ...]:
        """Among equals: fewer GPUs, no offload, lower stage, fewer nodes, less time, an engine, and
        anything that is stable."""
        place, method = self.place, self.footprint.method
        # Rounded: parts that are added in another order differ in the last digit, and a plan must
        # be the same on every machine.
        return (
            place.world, method.offload, method.reference == "Offload", method.zero, place.nodes,
            round(self.seconds, 6), place.pool.label, place.pool.resource, place.pool.selector,
            method.name, *engine_preference(self.footprint.setup.engine),
        )  # fmt: skip


def engine_preference(engine: Engine | None) -> tuple[int, ...]:
    """Among equals an engine before none, on fewer GPUs, and one that sleeps, which leaves more
    room, without moving the base."""
    if engine is None:
        return 1, 0, 0, 0, 0
    # An engine that sleeps leaves training its room, which an awake one keeps from it.
    is_awake = int(not engine.sleeps)
    return 0, engine.replicas, engine.tensor_parallel, is_awake, int(engine.offloads_base)


def least_seconds(seconds: float, correction: StepCorrection | None) -> float:
    """The low end of the range of a step's time; `correction`: what was measured on its GPUs."""
    return step_range(seconds, correction.spread if correction else None).low


Score = tuple[int, float]
"""Sort key of an objective: the first number decides, then the smaller second number wins."""


def place_risk(place: Place, method: Method, engine: Engine | None = None) -> float:
    """The part of an option's risk that is known before its memory."""
    optimizer = OFFLOADED if method.offload else 1.0
    offloads_base = engine is not None and engine.offloads_base
    offloads_weights = method.reference == "Offload" or offloads_base
    weights = WEIGHTS_OFFLOADED if offloads_weights else 1.0
    nodes = SEVERAL_NODES if place.nodes > 1 else 1.0
    return optimizer * weights * nodes * PARTITIONED[method.zero]


def score(
    objective: Objective,
    place: Place,
    seconds: float,
    risk: float,
    *,
    beside: Beside = NOTHING_BESIDE,
) -> Score:
    """The score of an objective, to be minimised. It grows with `seconds` and `risk`, so their
    lower bounds give its lower bound.

    GPUs of engines count as the place's own, and their price with it.
    """
    # The objective Fastest ignores risks on purpose: it promises the least time.
    if objective == "Fastest":
        return 0, seconds
    gpus = place.world + beside.gpus
    counted_seconds = seconds * risk
    if objective == "FewestGPUs":
        return gpus, counted_seconds
    if objective == "Cheapest":
        hourly = place.pool.price * place.world + beside.price
        return 0, hourly * counted_seconds
    # Balanced takes more GPUs only as long as GPU-seconds per step rise no faster than time falls,
    # N2 t2 / (N1 t1) <= t1 / t2. That is the least N t**2, whose root is proportional to time. So
    # no other plan is better in both time and GPU-seconds.
    return 0, sqrt(gpus) * counted_seconds


def score_of(objective: Objective, option: Option) -> Score:
    """The score of an option."""
    return score(objective, option.place, option.seconds, option.risk, beside=option.beside)


def choose(options: Sequence[Option], objective: Objective) -> Option | None:
    """The best that fits: first by what is trained, then by the objective's score; None if nothing
    fits."""
    # The tier goes first: no saving of time may buy an adapter where full training fits
    # (spec.adapter.use IfNeeded).
    return min(
        (option for option in options if not option.shortage),
        key=lambda option: (option.tier, score_of(objective, option), option.preference),
        default=None,
    )


def missing_shares(option: Option) -> tuple[float, tuple[object, ...]]:
    """The missing shares of device and host memory together, then what decides among equals."""
    device = max(0.0, option.device_share - 1)
    host = max(0.0, option.host / max(1, option.place.host_memory) - 1)
    return device + host, option.preference


def notable(options: Sequence[Option], chosen: Option | None) -> list[Option]:
    """The options that are worth showing: the best extent of each pool and method, and the chosen
    method's other extents."""
    alike: dict[tuple[str, str, str], list[Option]] = {}
    for option in options:
        pool, method = option.place.pool, option.footprint.method
        alike.setdefault((pool.label, pool.resource, method.name), []).append(option)
    shown = {id(min(extents, key=rank)) for extents in alike.values()}
    if chosen:
        in_pool = [option for option in options if option.place.pool is chosen.place.pool]
        method = chosen.footprint.method
        shown |= {id(option) for option in in_pool if option.footprint.method == method}
    return [option for option in options if id(option) in shown]


def rank(option: Option) -> tuple[object, ...]:
    """Sort key of an option among those that were not chosen: what fits by time, then what does
    not by how much it lacks."""
    if option.shortage:
        return True, 0, *missing_shares(option)
    return False, option.tier, option.seconds, option.preference
