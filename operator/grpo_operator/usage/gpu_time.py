"""Divides the time of the attempts' GPUs among its states, and sums it up: a function of the
records alone.

So the sums can be made again from a status by anybody, and a new operator comes to the same ones.
"""

from collections.abc import Sequence
from typing import Any

from grpo_api.status.usage import AttemptUsage, EngineUsage, GPUSeconds, PodTime, Usage, UsageSum
from grpo_api.text.timing import HOUR, Clock
from grpo_kube.objects.times import seconds

SUCCEEDED = "Succeeded"
_UNSAFE = ("generating", "scoring", "training", "saving")
"""Parts that a restart has to do again, where no checkpoint has them."""


def sum_states(usage: Usage) -> Usage:
    """The usage with the sums that follow from its attempts."""
    sums = usage.earlier
    for record, clock in zip(usage.attempts, kept_clocks(usage.attempts), strict=True):
        sums = _added(sums, record, clock, usage.as_of)
    total = sums.gpu_seconds
    found: dict[str, Any] = {
        "gpu_seconds": total,
        "held_gpu_seconds": round(total.total, 3),
        "effective": total.effective_share,
        "cost": sums.cost,
    }
    return usage.model_copy(update=found)


def merge_oldest(usage: Usage, count: int) -> Usage:
    """The usage with its oldest records in the sum of those that have none."""
    earlier = usage.earlier
    for record, clock in zip(usage.attempts[:count], kept_clocks(usage.attempts), strict=False):
        earlier = _added(earlier, record, clock, usage.as_of)
    return usage.model_copy(update={"attempts": usage.attempts[count:], "earlier": earlier})


def _added(sums: UsageSum, record: AttemptUsage, clock: Clock, as_of: str) -> UsageSum:
    """The sums with one attempt: its gang's GPUs and its engines', each at their price."""
    part = divide_by_state(record, clock, as_of)
    total, cost = sums.gpu_seconds.plus(part), _added_cost(sums.cost, record, part)
    if record.engines:
        theirs = apportion(record.engines, part, as_of)
        total, cost = total.plus(theirs), _added_cost(cost, record.engines, theirs)
    return UsageSum(attempts=sums.attempts + 1, gpu_seconds=total, cost=cost)


def _added_cost(
    cost: float | None, held: AttemptUsage | EngineUsage, part: GPUSeconds
) -> float | None:
    """The cost with that of a role's GPUs, to four decimals; those without a price add nothing."""
    if held.gpu_hour_price is None:
        return cost
    return round((cost or 0.0) + part.total / HOUR * held.gpu_hour_price, 4)


def apportion(engines: EngineUsage, gang: GPUSeconds, as_of: str) -> GPUSeconds:
    """The engines' GPU-seconds, in the proportions of their gang's, whom they serve: what it spent
    on generating they generated, and while it trained they waited for it."""
    held = held_seconds(engines, as_of) * engines.gpus / engines.replicas
    if not gang.total:
        return GPUSeconds(other=round(held, 3))
    shares = gang.model_dump(by_alias=False)
    return GPUSeconds(
        **{state: round(spent * held / gang.total, 3) for state, spent in shares.items()}
    )


def kept_clocks(records: Sequence[AttemptUsage]) -> list[Clock]:
    """Return, for each attempt, its clock at the checkpoint up to which its work counts.

    That is the last checkpoint that it reported as sealed, until a later attempt reports which one
    it resumed from. The two can differ: the last report may be lost, a checkpoint may be damaged,
    and a rollback goes further back.
    """
    kept = [record.sealed for record in records]
    for position, later in enumerate(records):
        if later.began_at is None:
            continue
        source = later.began_at.attempt
        same = [index for index in range(position) if records[index].attempt == source]
        for index in range(position):
            if index in same[-1:]:
                kept[index] = later.began_at.clock
            elif records[index].attempt > source:
                kept[index] = Clock()
    return kept


def divide_by_state(record: AttemptUsage, clock: Clock, as_of: str) -> GPUSeconds:
    """One attempt's GPU-seconds by state. Rank 0's clock divides the time that its gang held GPUs,
    and no more."""
    wall = held_seconds(record, as_of) / record.nodes
    spent_on = _parts(record.clock)
    safe = _parts(clock)
    spent_on = {part: max(spent, safe[part]) for part, spent in spent_on.items()}
    spent = sum(spent_on.values())
    if (
        spent > wall
    ):  # nobody can have worked longer than that: an impossible clock is taken as proportions
        spent_on = {part: value * wall / spent for part, value in spent_on.items()}
        safe = {part: value * wall / spent for part, value in safe.items()}
        spent = wall
    states = {**spent_on, "lost": 0.0, "other": max(0.0, wall - spent)}
    if record.ended and record.ended != SUCCEEDED:
        states = _after_loss(states, safe, record.lead_seconds or 0.0)
    return GPUSeconds(**{state: round(value * record.gpus, 3) for state, value in states.items()})


def _after_loss(states: dict[str, float], safe: dict[str, float], lead: float) -> dict[str, float]:
    """The states of an attempt that did not succeed.

    What rank 0 did not live to tell, it went on with what it was last heard to do.
    """
    trained = states["generating"] + states["scoring"] + states["training"] > 0.0
    if trained:
        doing = "lost"
    elif states["proving"]:
        doing = "proving"
    else:
        doing = "loading" if states["loading"] else "other"
    silent = max(0.0, states["other"] - lead)
    states = {**states, "other": states["other"] - silent}
    states[doing] += silent
    for part in _UNSAFE:
        redone = max(0.0, states[part] - safe[part])
        states[part] -= redone
        states["lost"] += redone
    return states


def held_seconds(record: AttemptUsage | EngineUsage, as_of: str) -> float:
    """Seconds of all pods of an attempt's gang, or of its engines, until then."""
    return record.gone_seconds + sum(pod_seconds(pod, as_of) for pod in record.pods)


def pod_seconds(pod: PodTime, as_of: str) -> float:
    """Seconds for which a pod has held its GPUs until then."""
    if pod.seconds is not None:
        return pod.seconds
    counted_until = seconds(as_of) or 0.0
    bound_at = seconds(pod.bound_time) or 0.0
    return max(0.0, counted_until - bound_at)


def _parts(clock: Clock) -> dict[str, float]:
    return clock.model_dump(by_alias=False)
