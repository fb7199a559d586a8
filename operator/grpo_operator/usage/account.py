"""Computes status.usage of a job after an observation.

Passing time alone does not change it, so a job of which nothing else changes costs no write.
"""

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
    if job.finished and decision.action is not Action.RETRY and (old is None or not any(map(holds, old.attempts))):
        return old
    before = old or Usage(as_of=timestamp(seen.now))
    records = _ended(looked_at(seen, before.attempts, before.as_of), seen, decision)
    fields: dict[str, Any] = {"as_of": _as_of(seen, before), "attempts": records}
    fields |= _waiting(before, records, seen, decision)
    fields["attempts"] = _committed(records, seen, decision, new)
    usage = _bounded(before.model_copy(update=fields))
    unchanged = old is not None and _news(old) == _news(usage) and new == job.status
    return old if unchanged else summed(usage)


def _ended(records: list[AttemptUsage], seen: Observation, decision: Decision) -> list[AttemptUsage]:
    """The records; that of the current attempt with how it ended, if this decision ends it."""
    if not records or records[-1].ended or not seen.job.active or decision.action not in _ENDS_ATTEMPT:
        return records
    reason = str(decision.ended.result if decision.ended else decision.reason or decision.action)
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
    """Now, or when rank 0 said what it last said: its words divide the time until then."""
    heard = pull_time(seen) if not seen.silence and seen.job.active else None
    at = seen.now if heard is None else heard
    return max(before.as_of, timestamp(at), key=lambda text: seconds(text) or 0.0)


def _waiting(before: Usage, records: list[AttemptUsage], seen: Observation, decision: Decision) -> dict[str, Any]:
    """How long the job has waited, and since when it waits."""
    queued, since = before.queued_seconds, seconds(before.waiting_since)
    known = {pod.name: pod for record in before.attempts for pod in record.all_pods}
    pods = [pod for record in records for pod in record.all_pods]
    fresh = [seconds(pod.bound_time) or seen.now for pod in pods if pod.name not in known]
    if since is not None and fresh:
        queued, since = queued + max(0.0, min(fresh) - since), None
    waits = _to_run(seen, decision) and not any(map(holds, records))
    if since is not None and not waits:
        queued, since = queued + max(0.0, seen.now - since), None
    if since is None and waits:
        ended = [pod for pod in pods if pod.name not in known or known[pod.name].seconds is None]
        since = min(seen.now, max((_end(pod) for pod in ended), default=seen.now))
    return {"queued_seconds": round(queued, 3), "waiting_since": None if since is None else timestamp(since)}


def _to_run(seen: Observation, decision: Decision) -> bool:
    """Whether the job is to run, now or as soon as it can."""
    return decision.action not in _RESTS and (not seen.job.finished or decision.action is Action.RETRY)


def _end(pod: PodTime) -> float:
    """When a pod that has ended did so, by the operator's clock."""
    return (seconds(pod.bound_time) or 0.0) + (pod.seconds or 0.0)


def _bounded(usage: Usage) -> Usage:
    """The usage with no more records than may still change."""
    excess = len(usage.attempts) - MAX_RECORDS
    over = [not holds(record) for record in usage.attempts[: max(0, excess)]]
    count = max(over.index(False) if False in over else len(over), excess - MAX_RECORDS)
    return merged(usage, count) if count > 0 else usage


def _news(usage: Usage) -> object:
    """What of it is worth a write of its own: what the next attempt's account can't do without."""
    return usage.waiting_since, [
        (
            record.attempt,
            record.ended,
            record.sealed,
            record.began_at,
            [part for part, spent in record.clock if spent],
            [pod.name for pod in record.all_pods if pod.seconds is None],
        )
        for record in usage.attempts
    ]
