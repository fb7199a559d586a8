"""The choice among options: the best, the nearest miss where nothing fits, and which are worth showing."""

from collections.abc import Sequence
from typing import Literal

from .option import Option

NEAR = 1.05
"""Balanced takes fewer GPUs where that costs at most this factor in time."""


def choose(options: Sequence[Option], objective: Literal["Balanced", "Fastest", "FewestGPUs"]) -> Option | None:
    """The best that fits: first by what is trained, then by the objective; None if nothing fits."""
    fitting = [option for option in options if not option.shortage]
    if not fitting:
        return None
    tier = min(option.tier for option in fitting)
    fitting = [option for option in fitting if option.tier == tier]
    if objective == "FewestGPUs":
        return min(fitting, key=lambda option: option.preference)
    fastest = min(option.seconds for option in fitting)
    allowed = NEAR if objective == "Balanced" else 1.0
    return min((o for o in fitting if o.seconds <= fastest * allowed), key=lambda option: option.preference)


def closest_miss(options: Sequence[Option]) -> Option | None:
    """What comes nearest to fitting: least missing share of device and host memory together; None without options."""

    def missing(option: Option) -> tuple[float, tuple[object, ...]]:
        return max(0.0, option.device_share - 1) + max(0.0, option.host_share - 1), option.preference

    return min(options, key=missing, default=None)


def notable(options: Sequence[Option], chosen: Option | None) -> list[Option]:
    """What is worth showing: of each pool and method the best extent, and the chosen method's other extents."""
    best: dict[tuple[str, str, str], Option] = {}
    for option in options:
        pool, method = option.place.pool, option.footprint.method
        key = (pool.label, pool.resource, method.name)
        known = best.get(key)
        if known is None or _closeness(option) < _closeness(known):
            best[key] = option
    shown = {id(option) for option in best.values()}
    return [option for option in options if id(option) in shown or (chosen and same_method(option, chosen))]


def same_method(option: Option, other: Option) -> bool:
    """Whether two options are extents of one method in one pool."""
    return option.footprint.method == other.footprint.method and option.place.pool is other.place.pool


def _closeness(option: Option) -> tuple[bool, float, tuple[object, ...]]:
    """Smaller is better: what fits by time, then what does not by how much it lacks."""
    lacks = option.device_share + option.host_share
    return option.shortage is not None, lacks if option.shortage else option.seconds, option.preference
