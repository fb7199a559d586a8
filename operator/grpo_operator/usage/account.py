"""Computes status.usage of a job after an observation.

Passing time alone does not change it, so a job of which nothing else changes costs no write.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_api.generation import EnginePlan
from grpo_api.status import GRPOJobStatus
from grpo_api.usage import MAX_RECORDS, AttemptUsage, EngineUsage, PodTime, Usage

from ..decisions import Action, Decision
from ..observe import Observation
from ..times import seconds, timestamp
from .attempts import holds, looked_at, pull_time
from .division import merged, summed

_ENDS_ATTEMPT = (Action.COMMIT, Action.QUEUE, Action.SUSPEND, Action.RELEASE, Action.SUCCEED, Action.FAIL)
_RESTS = (Action.SUSPEND, Action.SUCCEED, Action.FAIL, Action.REJECT)
"""After these the job is not to run."""


def account(seen: Observation, decision: Decision, new: GRPOJobStatus) -> Usage | None:
    """The usage of a job whose status is otherwise `new`; None for a job on CPUs."""
    job, old = seen.job, seen.job.status.usage
    if job.spec is None or job.spec.placement.accelerator != "GPU":
        return old
    starts_again = decision.action is Action.RETRY
    still_holds = old is not None and any(map(holds, old.attempts))
    if job.finished and not starts_again and not still_holds:
        return old
    before = old or Usage(as_of=timestamp(seen.now))
    records = _ended(looked_at(seen, before.attempts, before.as_of), seen, decision)
    fields: dict[str, Any] = {"as_of": _as_of(seen, before), "attempts": records}
    fields |= _waiting(before, records, seen, decision)
    fields["attempts"] = _committed(records, seen, decision, new)
    usage = _bounded(before.model_copy(update=fields))
    if old is not None and _news(old) == _news(usage) and new == job.status:
        return old
    return summed(usage)


def _ended(records: list[AttemptUsage], seen: Observation, decision: Decision) -> list[AttemptUsage]:
    """The records; that of the current attempt with how it ended, if this decision ends it."""
    if not records or records[-1].ended or not seen.job.active or decision.action not in _ENDS_ATTEMPT:
        return records
    reason = str(decision.reason or decision.action)
    if decision.ended:
        reason = str(decision.ended.result)
    return [*records[:-1], records[-1].model_copy(update={"ended": reason[:128]})]


def _committed(
    records: list[AttemptUsage], seen: Observation, decision: Decision, new: GRPOJobStatus
) -> list[AttemptUsage]:
    """The records, with one of the attempt that this decision commits, or that a former operator has."""
    plan = new.plan
    if plan is None or not plan.gpus or (records and records[-1].attempt >= new.attempt):
        return records
    if decision.action is not Action.COMMIT and not seen.job.active:
        return records
    fresh = AttemptUsage(
        attempt=new.attempt,
        gpus=plan.gpus,
        nodes=plan.nodes,
        gpu_product=plan.gpu_product,
        gpu_hour_price=plan.gpu_hour_price,
        engines=_of_engines(plan.engine),
        start_time=new.attempt_start_time or timestamp(seen.now),
    )
    return [*records, fresh]


def _of_engines(engine: EnginePlan | None) -> EngineUsage | None:
    """The record of engines that have GPUs of their own, before any is bound."""
    if engine is None or not engine.gpus:
        return None
    return EngineUsage(
        gpus=engine.gpus,
        replicas=engine.replicas,
        gpu_product=engine.gpu_product,
        gpu_hour_price=engine.gpu_hour_price,
    )


def _as_of(seen: Observation, before: Usage) -> str:
    """Return the time of rank 0's last answer, since its report divides the time until then; without one, now."""
    answers = seen.job.active and not seen.silence
    answered_at = pull_time(seen) if answers else None
    at = seen.now if answered_at is None else answered_at
    return max(before.as_of, timestamp(at), key=_unix_seconds)


def _unix_seconds(text: str) -> float:
    return seconds(text) or 0.0


def _waiting(before: Usage, records: list[AttemptUsage], seen: Observation, decision: Decision) -> dict[str, Any]:
    """Return how long the job has waited, and since when it waits."""
    queued, since = before.queued_seconds, seconds(before.waiting_since)
    known = _pods_by_name(before.attempts)
    pods = [pod for record in records for pod in record.all_pods]
    first_bound = _first_bound(pods, known, seen.now)
    # The wait ends when the first pod gets its node, which may be before this observation.
    if since is not None and first_bound is not None:
        queued += max(0.0, first_bound - since)
        since = None
    waits = _to_run(seen, decision) and not any(map(holds, records))
    if since is not None and not waits:
        queued += max(0.0, seen.now - since)
        since = None
    if since is None and waits:
        since = min(seen.now, _last_end(pods, known, seen.now))
    return {"queued_seconds": round(queued, 3), "waiting_since": None if since is None else timestamp(since)}


def _pods_by_name(records: Sequence[AttemptUsage]) -> dict[str, PodTime]:
    pods: dict[str, PodTime] = {}
    for record in records:
        for pod in record.all_pods:
            pods[pod.name] = pod
    return pods


def _first_bound(pods: Sequence[PodTime], known: Mapping[str, PodTime], now: float) -> float | None:
    """Return when the first pod that was not recorded before got its node; None without such a pod."""
    first: float | None = None
    for pod in pods:
        if pod.name in known:
            continue
        bound_at = seconds(pod.bound_time) or now
        first = bound_at if first is None else min(first, bound_at)
    return first


def _last_end(pods: Sequence[PodTime], known: Mapping[str, PodTime], now: float) -> float:
    """Return when the last of the pods ended that held GPUs when the job was observed before; now without one."""
    ends: list[float] = []
    for pod in pods:
        earlier = known.get(pod.name)
        if earlier is None or earlier.seconds is None:
            ends.append(_end(pod))
    return max(ends, default=now)


def _to_run(seen: Observation, decision: Decision) -> bool:
    """True if the job is to run, now or as soon as it can."""
    if decision.action in _RESTS:
        return False
    return not seen.job.finished or decision.action is Action.RETRY


def _end(pod: PodTime) -> float:
    """Return when a pod ended, in unix seconds by the operator's clock."""
    bound_at = seconds(pod.bound_time) or 0.0
    held = pod.seconds or 0.0
    return bound_at + held


def _bounded(usage: Usage) -> Usage:
    """Return the usage with at most MAX_RECORDS records, or twice as many while the oldest of them may still change."""
    excess = len(usage.attempts) - MAX_RECORDS
    count = 0
    for record in usage.attempts[: max(0, excess)]:
        if holds(record):
            break
        count += 1
    # A pod that never ends must not let the status grow without bound.
    count = max(count, excess - MAX_RECORDS)
    return merged(usage, count) if count > 0 else usage


def _news(usage: Usage) -> object:
    """Return the parts of a usage that are worth a write of their own: the next attempt's account needs them."""
    return usage.waiting_since, [_news_of_record(record) for record in usage.attempts]


def _news_of_record(record: AttemptUsage) -> object:
    begun_parts = [part for part, spent in record.clock if spent]
    holding_pods = [pod.name for pod in record.all_pods if pod.seconds is None]
    return record.attempt, record.ended, record.sealed, record.began_at, begun_parts, holding_pods
