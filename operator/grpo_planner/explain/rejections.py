"""Why an option was not chosen: what it lacks, or what it has more of than the chosen one.

An objective weighs several things at once, and one of them seldom decides alone. So a verdict names
those that count most, until together they outweigh the time that the option saves.
"""

from collections.abc import Iterator, Sequence
from math import inf, prod
from typing import Literal, NamedTuple

from grpo_api.spec.run_policy import Objective

from ..result.formatting import distinct_gib, plural
from ..result.result import Rejection
from ..search.option import (
    CROWDED,
    OFFLOADED,
    PARTITIONED,
    ROUNDING,
    SEVERAL_NODES,
    WEIGHTS_OFFLOADED,
    Option,
    score,
)


def rejection(option: Option, winner: Option | None, objective: Objective) -> Rejection | None:
    """Why an option was not chosen; None for the chosen one."""
    if option is winner:
        return None
    phase = option.footprint.prediction.peak_phase
    need, have = option.footprint.device, option.place.pool.usable_bytes
    host, host_memory = option.host, option.place.host_memory
    host_need, host_have = distinct_gib(host, host_memory)
    if option.shortage == "HostMemory":
        message = f"needs {host_need} of host memory per node, has {host_have}"
        return Rejection(
            reason="HostMemory", message=message, phase=phase, need_bytes=host,
            have_bytes=host_memory,
        )  # fmt: skip
    if option.shortage or winner is None:
        reason = "DeviceMemory"
        device_need, device_have = distinct_gib(need, have)
        message = f"needs {device_need} at {phase}, has {device_have}"
        if host > host_memory:
            message += f"; host memory {host_need}, has {host_have}"
    else:
        reason, message = _comparison(option, winner, objective)
    return Rejection(reason=reason, message=message, phase=phase, need_bytes=need, have_bytes=have)


def _comparison(
    option: Option, winner: Option, objective: Objective
) -> tuple[Literal["NotNeeded", "Slower", "NoBetter"], str]:
    """Why an option that fits was not chosen."""
    if option.tier > winner.tier:
        what_fits = "all parameters" if option.footprint.method.lora else "32-bit moments"
        return "NotNeeded", f"not needed: {what_fits} fit"
    differences = list(_differences(option, winner, objective))
    costs = list(_deciding_costs(option, winner, differences))
    faster = 1 - option.seconds / winner.seconds
    if round(faster, 3) < 0:
        times = option.seconds / winner.seconds
        # "1221.6% slower" has to be read twice.
        slower = f"{-faster:.1%} slower" if times < 2 else f"{times:.1f} times as long"
        return "Slower", ", ".join([slower, *costs])
    gain = f"{faster:.1%} faster" if round(faster, 3) else "as fast"
    if not costs:
        in_order = (difference.name for difference in differences if difference.factor >= 1)
        costs = [next(in_order, "no better in anything else")]
    return "NoBetter", f"{gain}, but {' and '.join(costs)}"


class Difference(NamedTuple):
    """Something beside time in which an option differs from the chosen one."""

    factor: float
    """By how much more the objective counts the option for it; below 1 it counts for the option,
    and 1 decides only among equals."""
    name: str


def _deciding_costs(
    option: Option, winner: Option, differences: Sequence[Difference]
) -> Iterator[str]:
    """Yield what outweighs all that an option saves, the most costly first."""
    saved = winner.seconds / option.seconds
    saved /= prod(difference.factor for difference in differences if difference.factor < 1)
    for factor, name in sorted(differences, key=lambda difference: -difference.factor):
        if saved <= 1 + ROUNDING or factor <= 1:
            return
        yield name
        saved /= factor


def _differences(option: Option, winner: Option, objective: Objective) -> Iterator[Difference]:
    """Yield what counts against the option, in the order that decides among equals, and what counts
    for it."""
    yield from _gpu_differences(option, winner, objective)
    counts_risks = objective != "Fastest"
    for risk, other in zip(_risks(option), _risks(winner), strict=True):
        ratio = risk.factor / other.factor if counts_risks else 1.0
        if risk.amount > other.amount or ratio < 1:
            yield Difference(ratio, risk.name)
    label = option.place.pool.label
    if label != winner.place.pool.label:
        yield Difference(1.0, f"on {label}")


def _gpu_differences(option: Option, winner: Option, objective: Objective) -> Iterator[Difference]:
    """Yield the difference in GPUs or their price."""
    world, other_world = option.place.world, winner.place.world
    name = "its GPUs cost more"
    if world > other_world:
        name = f"{world} GPUs instead of {other_world}"
    elif option.engine_gpus > winner.engine_gpus:
        name = f"{plural(option.engine_gpus, 'GPU')} more for its engines"
    # The score of a second without risks: what the GPUs count.
    fewest, rate = score(objective, option.place, 1.0, 1.0, beside=option.beside)
    other_fewest, other_rate = score(objective, winner.place, 1.0, 1.0, beside=winner.beside)
    ratio = inf if fewest > other_fewest else rate / other_rate
    has_more = (world, option.engine_gpus) > (other_world, winner.engine_gpus)
    if has_more or ratio != 1:
        yield Difference(ratio, name)


class Risk(NamedTuple):
    """Something that may go wrong with an option."""

    amount: float
    """How much of its cause the option has."""
    factor: float
    """By how much longer the option's time counts for it."""
    name: str


def _risks(option: Option) -> list[Risk]:
    """The risks of an option, in the order that decides among equals."""
    place, method, engine = option.place, option.footprint.method, option.footprint.setup.engine
    has_reference_there = method.reference == "Offload"
    has_base_there = engine is not None and engine.offloads_base
    has_weights_there = has_reference_there or has_base_there
    weights = "its reference" if has_reference_there else "its base"
    filled = f"it fills {option.device_share:.0%} of a GPU"
    return [
        Risk(method.offload, OFFLOADED if method.offload else 1.0, "optimizer offload"),
        Risk(
            has_weights_there,
            WEIGHTS_OFFLOADED if has_weights_there else 1.0,
            f"{weights} in host memory",
        ),
        Risk(method.zero, PARTITIONED[method.zero], f"ZeRO-{method.zero}"),
        Risk(place.nodes, SEVERAL_NODES if place.nodes > 1 else 1.0, plural(place.nodes, "node")),
        Risk(option.crowding, CROWDED[option.crowding], filled),
    ]
