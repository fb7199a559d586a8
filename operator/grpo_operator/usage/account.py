"""Computes status.usage of a job after an observation, from records of the GPUs that each attempt
held.

Records are updated from the attempts' pods and from rank 0's reports. A pod's time is the
difference of two times of its kubelet, so an offset of that clock cancels. It is clipped to the
time that the operator's own clock allows. A pod whose end was not seen is timed by the end of its
Job.

Passing time alone does not change the result, so a job of which nothing else changes costs no
write.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from grpo_api.spec.generation import EnginePlan
from grpo_api.status.status import GRPOJobStatus
from grpo_api.status.usage import MAX_PODS, MAX_RECORDS, AttemptUsage, EngineUsage, PodTime, Usage
from grpo_api.text.timing import Account
from grpo_kube.objects.times import Reported, seconds, timestamp

from ..decide.decisions import Action, Decision
from ..decide.observation import Observation
from ..records.names import is_engines_job
from ..records.records import ENDED_PHASES, PodRecord
from ..records.terminations import PodTermination
from .gpu_time import merge_oldest, pod_seconds, sum_states

_ENDS_ATTEMPT = (
    Action.COMMIT,
    Action.QUEUE,
    Action.SUSPEND,
    Action.RELEASE,
    Action.SUCCEED,
    Action.FAIL,
)
_RESTS = (Action.SUSPEND, Action.SUCCEED, Action.FAIL, Action.REJECT)
"""After these the job is not to run."""


def account(observation: Observation, decision: Decision, new: GRPOJobStatus) -> Usage | None:
    """The usage of a job whose status is otherwise `new`; None for a job on CPUs."""
    job, old = observation.job, observation.job.status.usage
    if job.spec is None or job.spec.placement.accelerator != "GPU":
        return old
    starts_again = decision.action is Action.RETRY
    still_holds = old is not None and any(map(has_gpus, old.attempts))
    if job.is_finished and not starts_again and not still_holds:
        return old
    before = old or Usage(as_of=timestamp(observation.now))
    records = _ended(looked_at(observation, before.attempts, before.as_of), observation, decision)
    fields: dict[str, Any] = {"as_of": _as_of(observation, before), "attempts": records}
    fields |= _waiting(before, records, observation, decision)
    fields["attempts"] = _committed(records, observation, decision, new)
    usage = _bounded(before.model_copy(update=fields))
    if old is not None and _news(old) == _news(usage) and new == job.status:
        return old
    return sum_states(usage)


def _ended(
    records: list[AttemptUsage], observation: Observation, decision: Decision
) -> list[AttemptUsage]:
    """The records; that of the current attempt with how it ended, if this decision ends it."""
    if (
        not records
        or records[-1].ended
        or not observation.job.is_active
        or decision.action not in _ENDS_ATTEMPT
    ):
        return records
    reason = str(decision.reason or decision.action)
    if decision.ended:
        reason = str(decision.ended.result)
    return [*records[:-1], records[-1].model_copy(update={"ended": reason[:128]})]


def _committed(
    records: list[AttemptUsage], observation: Observation, decision: Decision, new: GRPOJobStatus
) -> list[AttemptUsage]:
    """The records, with one of the attempt that this decision commits, or that a former operator
    has."""
    plan = new.plan
    if plan is None or not plan.gpus or (records and records[-1].attempt >= new.attempt):
        return records
    if decision.action is not Action.COMMIT and not observation.job.is_active:
        return records
    fresh = AttemptUsage(
        attempt=new.attempt,
        gpus=plan.gpus,
        nodes=plan.nodes,
        gpu_product=plan.gpu_product,
        gpu_hour_price=plan.gpu_hour_price,
        engines=_of_engines(plan.engine),
        start_time=new.attempt_start_time or timestamp(observation.now),
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


def _as_of(observation: Observation, before: Usage) -> str:
    """Return the time of rank 0's last answer, since its report divides the time until then;
    without one, now."""
    answers = observation.job.is_active and not observation.silence
    answered_at = pull_time(observation) if answers else None
    at = observation.now if answered_at is None else answered_at
    return max(before.as_of, timestamp(at), key=_unix_seconds)


def _unix_seconds(text: str) -> float:
    return seconds(text) or 0.0


def _waiting(
    before: Usage, records: list[AttemptUsage], observation: Observation, decision: Decision
) -> dict[str, Any]:
    """Return how long the job has waited, and since when it waits."""
    queued, since = before.queued_seconds, seconds(before.waiting_since)
    known = _pods_by_name(before.attempts)
    pods = [pod for record in records for pod in record.all_pods]
    first_bound = _first_bound(pods, known, observation.now)
    # The wait ends when the first pod gets its node, which may be before this observation.
    if since is not None and first_bound is not None:
        queued += max(0.0, first_bound - since)
        since = None
    waits = _to_run(observation, decision) and not any(map(has_gpus, records))
    if since is not None and not waits:
        queued += max(0.0, observation.now - since)
        since = None
    if since is None and waits:
        since = min(observation.now, _last_end(pods, known, observation.now))
    return {
        "queued_seconds": round(queued, 3),
        "waiting_since": None if since is None else timestamp(since),
    }


def _pods_by_name(records: Sequence[AttemptUsage]) -> dict[str, PodTime]:
    pods: dict[str, PodTime] = {}
    for record in records:
        for pod in record.all_pods:
            pods[pod.name] = pod
    return pods


def _first_bound(pods: Sequence[PodTime], known: Mapping[str, PodTime], now: float) -> float | None:
    """Return when the first pod that was not recorded before got its node; None without such a
    pod."""
    first: float | None = None
    for pod in pods:
        if pod.name in known:
            continue
        bound_at = seconds(pod.bound_time) or now
        first = bound_at if first is None else min(first, bound_at)
    return first


def _last_end(pods: Sequence[PodTime], known: Mapping[str, PodTime], now: float) -> float:
    """Return when the last of the pods ended that held GPUs when the job was observed before; now
    without one."""
    ends: list[float] = []
    for pod in pods:
        earlier = known.get(pod.name)
        if earlier is None or earlier.seconds is None:
            ends.append(_end(pod))
    return max(ends, default=now)


def _to_run(observation: Observation, decision: Decision) -> bool:
    """True if the job is to run, now or as soon as it can."""
    if decision.action in _RESTS:
        return False
    return not observation.job.is_finished or decision.action is Action.RETRY


def _end(pod: PodTime) -> float:
    """Return when a pod ended, in unix seconds by the operator's clock."""
    bound_at = seconds(pod.bound_time) or 0.0
    held = pod.seconds or 0.0
    return bound_at + held


def _bounded(usage: Usage) -> Usage:
    """Return the usage with at most MAX_RECORDS records, or twice as many while the oldest of them
    may still change."""
    excess = len(usage.attempts) - MAX_RECORDS
    count = 0
    for record in usage.attempts[: max(0, excess)]:
        if has_gpus(record):
            break
        count += 1
    # A pod that never ends must not let the status grow without bound.
    count = max(count, excess - MAX_RECORDS)
    return merge_oldest(usage, count) if count > 0 else usage


def _news(usage: Usage) -> object:
    """Return the parts of a usage that are worth a write of their own: the next attempt's account
    needs them."""
    return usage.waiting_since, [_news_of_record(record) for record in usage.attempts]


def _news_of_record(record: AttemptUsage) -> object:
    begun_parts = [part for part, spent in record.clock if spent]
    holding_pods = [pod.name for pod in record.all_pods if pod.seconds is None]
    return record.attempt, record.ended, record.sealed, record.began_at, begun_parts, holding_pods


Held = TypeVar("Held", AttemptUsage, EngineUsage)
LATE_SECONDS = 10.0
"""Longest time from a container's end until its kubelet reports it; until then the pod counts as
holding its GPUs."""


def looked_at(
    observation: Observation, records: Sequence[AttemptUsage], as_of: str
) -> list[AttemptUsage]:
    """The records after a look; `as_of` is the moment until which they were counted."""
    mine = _sorted(observation, records)
    return [
        _looked_at(observation, record, pods, as_of)
        for record, pods in zip(records, mine, strict=True)
    ]


def _looked_at(
    observation: Observation, record: AttemptUsage, pods: Collection[PodRecord], as_of: str
) -> AttemptUsage:
    """One record after a look at these of its pods, those of its engines among them."""
    trains = [pod for pod in pods if not pod.engine]
    found = _heard(observation, _timed(observation, record, record, trains, as_of), trains)
    if record.engines is None:
        return found
    serves = [pod for pod in pods if pod.engine]
    return found.model_copy(
        update={"engines": _timed(observation, record, record.engines, serves, as_of)}
    )


def has_gpus(record: AttemptUsage) -> bool:
    """True if a pod of the attempt holds GPUs."""
    return any(pod.seconds is None for pod in record.all_pods)


def _sorted(observation: Observation, records: Sequence[AttemptUsage]) -> list[list[PodRecord]]:
    """The bound pods of each record. Labels are hints: a pod that was not known counts only as its
    Job's."""
    by_name: dict[str, int] = {}
    latest: dict[int, int] = {}
    for index, record in enumerate(records):
        latest[record.attempt] = index
        by_name.update({pod.name: index for pod in record.all_pods})
    current = (*observation.pods, *observation.engine_pods)
    own = {child.uid for child in observation.earlier_jobs} | {
        pod.controller_uid for pod in current
    }
    found: list[list[PodRecord]] = [[] for _ in records]
    for pod in (*current, *observation.earlier_pods, *observation.deleted_pods):
        known = pod.name in by_name or pod.controller_uid in own
        place = by_name.get(pod.name, latest.get(pod.attempt))
        if pod.node and known and place is not None and len(found[place]) < MAX_PODS:
            found[place].append(pod)
    return found


def _timed(
    observation: Observation,
    record: AttemptUsage,
    held: Held,
    pods: Collection[PodRecord],
    as_of: str,
) -> Held:
    """What a role of the record's attempt held, with the times of its pods; of those that have
    ended and are gone only their sum is left."""
    before = {pod.name: pod for pod in held.pods}
    visible = {pod.name for pod in pods}
    lost = [pod for name, pod in before.items() if name not in visible]
    gone = held.gone_seconds + sum(pod.seconds for pod in lost if pod.seconds is not None)
    now = [_pod_time(observation, record, pod, before.get(pod.name), as_of) for pod in pods]
    now += [_closed(observation, record, pod, as_of) for pod in lost if pod.seconds is None]
    return held.model_copy(
        update={"pods": sorted(now, key=lambda pod: pod.name), "gone_seconds": round(gone, 3)}
    )


def _pod_time(
    observation: Observation,
    record: AttemptUsage,
    pod: PodRecord,
    known: PodTime | None,
    as_of: str,
) -> PodTime:
    if known and known.seconds is not None:
        return known
    start = seconds(record.start_time) or observation.now
    found = known
    if found is None:
        bound_at = _within(pod.bound_at or observation.now, start, observation.now)
        found = PodTime(name=pod.name, bound_time=timestamp(bound_at))
    if pod.end is None and pod.phase not in ENDED_PHASES:
        return found
    held = pod.termination.held_seconds if pod.termination else None
    if held is None:
        return _closed(observation, record, found, as_of if known else found.bound_time)
    # A duration below what was counted until now is implausible, unless the kubelet's delay
    # explains it.
    least = pod_seconds(known, as_of) if known else 0.0
    if held < least - LATE_SECONDS:
        held = least
    return _lasted(found, min(held, max(least, observation.now - start)))


def _closed(observation: Observation, record: AttemptUsage, pod: PodTime, as_of: str) -> PodTime:
    """Return a pod's time up to the end of its Job, since its own end is not known.

    That end is clipped to the time between `as_of`, until which the pod was counted, and now.
    """
    bound_at = seconds(pod.bound_time) or observation.now
    job_ended_at = _job_end(observation, record.attempt) or observation.now
    counted_until = seconds(as_of) or 0.0
    ended_at = _within(job_ended_at, counted_until, observation.now)
    return _lasted(pod, max(0.0, ended_at - bound_at))


def _lasted(pod: PodTime, spent: float) -> PodTime:
    return pod.model_copy(update={"seconds": round(spent, 3)})


def _job_end(observation: Observation, attempt: int) -> Reported | None:
    """Return when the attempt's Job ended, which its pods did before; None while that is not
    known."""
    jobs = list(observation.earlier_jobs)
    if observation.child:
        jobs.append(observation.child)
    for job in jobs:
        if job.attempt == attempt and not is_engines_job(job.name):
            return job.ended_at
    return None


def _heard(
    observation: Observation, record: AttemptUsage, pods: Collection[PodRecord]
) -> AttemptUsage:
    """Return the record with the times that rank 0 reported; of several reports the longest counts
    as the latest."""
    ranks0 = [pod for pod in pods if pod.index == 0]
    for rank0 in ranks0:
        if rank0.termination:
            record = _with_end(record, rank0.termination)
    names = {rank0.name for rank0 in ranks0}
    known = next((pod for pod in record.pods if pod.name in names), None)
    return record if known is None else _with_pull(observation, record, known)


def _with_end(record: AttemptUsage, end: PodTermination) -> AttemptUsage:
    """Return the record with the times that the end of rank 0's pod tells."""
    if end.reported and end.outcome.account:
        record = _with_account(record, end.outcome.account)
    if end.held_seconds is None or end.ran_seconds is None:
        return record
    return record.model_copy(update={"lead_seconds": round(end.held_seconds - end.ran_seconds, 3)})


def _with_pull(observation: Observation, record: AttemptUsage, rank0: PodTime) -> AttemptUsage:
    """Return the record with the times of rank 0's last answer, if that is of this attempt."""
    at = pull_time(observation)
    account = observation.pull.progress.account if observation.pull else None
    is_current = record.attempt == observation.job.status.attempt and not record.ended
    if at is None or account is None or not is_current:
        return record
    begun_at = seconds(record.start_time) or 0.0
    if at < begun_at:
        return record
    record = _with_account(record, account)
    if rank0.seconds is not None:
        return record
    bound_at = seconds(rank0.bound_time) or at
    lead = max(0.0, at - bound_at - account.clock.total)
    # An answer comes late, never early: the shortest lead is nearest to the truth.
    if record.lead_seconds is not None:
        lead = min(record.lead_seconds, lead)
    return record.model_copy(update={"lead_seconds": round(lead, 3)})


def pull_time(observation: Observation) -> float | None:
    """Return the unix time of rank 0's last answer, by the operator's clock; None before the first
    answer."""
    return (
        observation.now - max(0.0, observation.at - observation.pull.at)
        if observation.pull
        else None
    )


def _with_account(record: AttemptUsage, account: Account) -> AttemptUsage:
    update: dict[str, object] = {"began_at": account.began_at or record.began_at}
    if account.clock.total > record.clock.total:
        update["clock"] = account.clock
    if account.sealed.total > record.sealed.total:
        update["sealed"] = account.sealed
    return record.model_copy(update=update)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
