"""The choice among options: the best, the nearest miss where nothing fits, and which are worth showing.

An objective gives every option a score, and scores within NEAR of the best are a tie: neither the constants of memory
nor those of time have been measured on a GPU. In a tie, room that is left on the GPU decides, as a run that goes out of
memory costs more than 5 %.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from ..hardware.pools import Place
from .option import NOTHING_BESIDE, Beside, Option

NEAR = 1.05
"""Costs within this factor of the best are as good as it; an objective of Fastest takes no such liberty."""

Objective = Literal["Balanced", "Fastest", "FewestGPUs", "Cheapest", "Knee"]
"""The spec's objectives, and Knee: Balanced on any number of nodes."""
Score = tuple[int, float]
"""What an objective compares first, and what it then wants little of; only the latter has ties."""


def score(
    objective: Objective, place: Place, seconds: float, risk: float = 1.0, *, beside: Beside = NOTHING_BESIDE
) -> Score:
    """What an objective wants little of; grows with `seconds` and `risk`, so lower bounds of them bound it.

    GPUs of engines count as the place's own, and their price with it.

    Balanced takes more GPUs only as long as GPU-seconds per step rise no faster than time falls, `N2 t2 / (N1 t1) <=
    t1 / t2`: the least `N t**2`, whose root is proportional to time. A time at a risk counts as longer: idle GPUs of a
    node are worth taking where they spare it one.
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
    """What an objective compares first, known before any time: Balanced stays on one node where anything fits there."""
    if objective == "FewestGPUs":
        return place.world
    return int(objective == "Balanced" and place.nodes > 1)


def as_good(objective: Objective, one: Score, best: Score) -> bool:
    """Whether a score is a tie with the best, or better."""
    return one <= (best[0], best[1] * (1.0 if objective == "Fastest" else NEAR))


def choose(options: Sequence[Option], objective: Objective) -> Option | None:
    """The best that fits: first by what is trained, then by the objective, then by room; None if nothing fits."""
    fitting = [option for option in options if not option.shortage]
    if not fitting:
        return None
    tier = min(option.tier for option in fitting)
    scored = [(score_of(objective, o), o) for o in fitting if o.tier == tier]
    best, leader = min(scored, key=lambda pair: (pair[0], pair[1].preference))
    equals = [o for found, o in scored if o.place.world == leader.place.world and as_good(objective, found, best)]
    return min(equals, key=lambda option: option.prudence)


def closest_miss(options: Sequence[Option]) -> Option | None:
    """What comes nearest to fitting: least missing share of device and host memory together; None without options."""

    def missing(option: Option) -> tuple[float, tuple[object, ...]]:
        return max(0.0, option.device_share - 1) + max(0.0, option.host_share - 1), option.preference

    return min(options, key=missing, default=None)


def notable(options: Sequence[Option], chosen: Option | None) -> list[Option]:
    """What is worth showing: of each pool and method the best extent, and the chosen method's other extents."""
    alike: dict[tuple[str, str, str], list[Option]] = {}
    for option in options:
        pool, method = option.place.pool, option.footprint.method
        alike.setdefault((pool.label, pool.resource, method.name), []).append(option)
    shown = {id(min(extents, key=_closeness)) for extents in alike.values()}
    return [option for option in options if id(option) in shown or (chosen and same_method(option, chosen))]


def same_method(option: Option, other: Option) -> bool:
    """Whether two options are extents of one method in one pool."""
    return option.footprint.method == other.footprint.method and option.place.pool is other.place.pool


def _closeness(option: Option) -> tuple[bool, float, tuple[object, ...]]:
    """Smaller is better: what fits by time, then what does not by how much it lacks."""
    lacks = option.device_share + option.host_share
    return option.shortage is not None, lacks if option.shortage else option.seconds, option.preference
