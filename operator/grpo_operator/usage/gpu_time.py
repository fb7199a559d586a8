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
    clocks = kept_clocks(usage.attempts)
    for record, clock in zip(usage.attempts, clocks, strict=True):
        sums = _add_attempt(sums, record, clock, usage.as_of)
    by_state = sums.gpu_seconds
    fields: dict[str, Any] = {
        "gpu_seconds": by_state,
        "held_gpu_seconds": round(by_state.total, 3),
        "effective": by_state.effective_share,
        "cost": sums.cost,
    }
    return usage.model_copy(update=fields)


def merge_oldest(usage: Usage, count: int) -> Usage:
    """The usage with its oldest records in the sum of those that have none."""
    earlier = usage.earlier
    oldest = usage.attempts[:count]
    clocks = kept_clocks(usage.attempts)
    for record, clock in zip(oldest, clocks, strict=False):
        earlier = _add_attempt(earlier, record, clock, usage.as_of)
    fields = {"attempts": usage.attempts[count:], "earlier": earlier}
    return usage.model_copy(update=fields)


def _add_attempt(sums: UsageSum, record: AttemptUsage, clock: Clock, as_of: str) -> UsageSum:
    """The sums with one attempt: its gang's GPUs and its engines', each at their price."""
    of_gang = divide_by_state(record, clock, as_of)
    total = sums.gpu_seconds.plus(of_gang)
    cost = _added_cost(sums.cost, record, of_gang)
    if record.engines:
        of_engines = apportion(record.engines, of_gang, as_of)
        total = total.plus(of_engines)
        cost = _added_cost(cost, record.engines, of_engines)
    return UsageSum(attempts=sums.attempts + 1, gpu_seconds=total, cost=cost)


def _added_cost(
    cost: float | None, role_usage: AttemptUsage | EngineUsage, part: GPUSeconds
) -> float | None:
    """The cost with that of a role's GPUs, to four decimals; those without a price add nothing."""
    if role_usage.gpu_hour_price is None:
        return cost
    gpu_hours = part.total / HOUR
    cost_before = cost or 0.0
    return round(cost_before + gpu_hours * role_usage.gpu_hour_price, 4)


def apportion(engines: EngineUsage, gang: GPUSeconds, as_of: str) -> GPUSeconds:
    """The engines' GPU-seconds, in the proportions of their gang's, whom they serve: what it spent
    on generating they generated, and while it trained they waited for it."""
    gpu_seconds = held_seconds(engines, as_of) * engines.gpus / engines.replicas
    if not gang.total:
        return GPUSeconds(other=round(gpu_seconds, 3))
    states: dict[str, float] = {}
    for state, spent in gang.model_dump(by_alias=False).items():
        share = spent * gpu_seconds / gang.total
        states[state] = round(share, 3)
    return GPUSeconds(**states)


def kept_clocks(records: Sequence[AttemptUsage]) -> list[Clock]:
    """Return, for each attempt, its clock at the checkpoint up to which its work counts.

    That is the last checkpoint that it reported as sealed, until a later attempt reports which one
    it resumed from. The two can differ: the last report may be lost, a checkpoint may be damaged,
    and a rollback goes further back.
    """
    clocks = [record.sealed for record in records]
    for position, later in enumerate(records):
        checkpoint = later.began_at
        if checkpoint is None:
            continue
        last_of_source: int | None = None
        for index in range(position):
            attempt = records[index].attempt
            if attempt == checkpoint.attempt:
                last_of_source = index
            elif attempt > checkpoint.attempt:
                clocks[index] = Clock()
        if last_of_source is not None:
            clocks[last_of_source] = checkpoint.clock
    return clocks


def divide_by_state(record: AttemptUsage, clock: Clock, as_of: str) -> GPUSeconds:
    """One attempt's GPU-seconds by state. Rank 0's clock divides its gang's time of GPUs."""
    wall = held_seconds(record, as_of) / record.nodes
    safe = _parts(clock)
    spent_on = {part: max(spent, safe[part]) for part, spent in _parts(record.clock).items()}
    spent = sum(spent_on.values())
    # no rank can have worked longer than that: an impossible clock is taken as proportions
    if spent > wall:
        spent_on = {part: value * wall / spent for part, value in spent_on.items()}
        safe = {part: value * wall / spent for part, value in safe.items()}
        spent = wall
    other = max(0.0, wall - spent)
    states = {**spent_on, "lost": 0.0, "other": other}
    if record.ended and record.ended != SUCCEEDED:
        lead = record.lead_seconds or 0.0
        states = _after_loss(states, safe, lead)
    gpu_seconds = {state: round(value * record.gpus, 3) for state, value in states.items()}
    return GPUSeconds(**gpu_seconds)


def _after_loss(states: dict[str, float], safe: dict[str, float], lead: float) -> dict[str, float]:
    """The states of an attempt that did not succeed.

    After rank 0's last report it is taken to have gone on with what it reported last.
    """
    step_seconds = states["generating"] + states["scoring"] + states["training"]
    if step_seconds > 0.0:
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
