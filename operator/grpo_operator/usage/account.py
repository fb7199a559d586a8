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
from dataclasses import replace
from typing import Any, TypeVar

from grpo_api.spec.generation import EnginePlan
from grpo_api.status.status import GRPOJobStatus
from grpo_api.status.usage import MAX_PODS, MAX_RECORDS, AttemptUsage, EngineUsage, PodTime, Usage
from grpo_api.text.timing import Account
from grpo_kube.objects.times import Reported, not_future, seconds, timestamp

from ..decide.decisions import ENDS_ATTEMPT, Action, Decision
from ..decide.observation import Observation
from ..records.names import is_engines_job
from ..records.records import ENDED_PHASES, PodRecord
from ..records.terminations import PodTermination
from .gpu_time import merge_oldest, pod_seconds, sum_states

_RESTS = (Action.SUSPEND, Action.SUCCEED, Action.FAIL, Action.REJECT)
"""After these the job is not to run."""


def account(observation: Observation, decision: Decision, new: GRPOJobStatus) -> Usage | None:
    """The usage of a job whose status is otherwise `new`; None for a job on CPUs."""
    job = observation.job
    old = job.status.usage
    if job.spec is None or job.spec.placement.accelerator != "GPU":
        return old
    starts_again = decision.action is Action.RETRY
    still_holds = old is not None and any(map(has_gpus, old.attempts))
    if job.is_finished and not starts_again and not still_holds:
        return old
    # By the wall clock as it was when this process began: what is counted must neither grow nor
    # shrink when the clock is set.
    steady_now = observation.now - observation.clock_step
    observation = replace(observation, now=steady_now)
    before = old or Usage(as_of=timestamp(steady_now))
    # A time in the future was written by a clock that has been set back, or by another's: pods that
    # hold GPUs would be counted until then.
    before = before.model_copy(update={"as_of": not_future(before.as_of, observation.now)})
    records = looked_at(observation, before.attempts, before.as_of)
    records = _with_end_of_attempt(records, observation, decision)
    fields: dict[str, Any] = {"as_of": _as_of(observation, before)}
    fields |= _waiting(before, records, observation, decision)
    fields["attempts"] = _with_new_attempt(records, observation, decision, new)
    usage = _limit_records(before.model_copy(update=fields))
    is_unchanged = (
        old is not None and _essential_parts(old) == _essential_parts(usage) and new == job.status
    )
    return old if is_unchanged else sum_states(usage)


def _with_end_of_attempt(
    records: list[AttemptUsage], observation: Observation, decision: Decision
) -> list[AttemptUsage]:
    """The records; that of the current attempt with how it ended, if this decision ends it."""
    ends_attempt = observation.job.is_active and decision.action in ENDS_ATTEMPT
    if not ends_attempt or not records or records[-1].ended:
        return records
    reason = str(decision.reason or decision.action)
    if decision.ended:
        reason = str(decision.ended.result)
    current = records[-1].model_copy(update={"ended": reason[:128]})
    return [*records[:-1], current]


def _with_new_attempt(
    records: list[AttemptUsage], observation: Observation, decision: Decision, new: GRPOJobStatus
) -> list[AttemptUsage]:
    """The records, with one of the attempt that this decision, or a former operator, commits."""
    plan = new.plan
    last_attempt = records[-1].attempt if records else 0
    if plan is None or not plan.gpus or last_attempt >= new.attempt:
        return records
    if decision.action is not Action.COMMIT and not observation.job.is_active:
        return records
    engines = _of_engines(plan.engine)
    start_time = new.attempt_start_time or timestamp(observation.now)
    start_time = not_future(start_time, observation.now)
    current = AttemptUsage(
        attempt=new.attempt,
        gpus=plan.gpus,
        nodes=plan.nodes,
        gpu_product=plan.gpu_product,
        gpu_hour_price=plan.gpu_hour_price,
        engines=engines,
        start_time=start_time,
    )
    return [*records, current]


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
    """Time of rank 0's last answer, since its report divides the time until then; else now."""
    answers = observation.job.is_active and not observation.silence
    answered_at = pull_time(observation) if answers else None
    at = observation.now if answered_at is None else answered_at
    new_time = timestamp(at)
    return max(before.as_of, new_time, key=lambda time: seconds(time) or 0.0)


def _waiting(
    before: Usage, records: list[AttemptUsage], observation: Observation, decision: Decision
) -> dict[str, Any]:
    """Return how long the job has waited, and since when it waits."""
    now = observation.now
    queued = before.queued_seconds
    since = seconds(before.waiting_since)
    known_pods = {pod.name: pod for record in before.attempts for pod in record.all_pods}
    pods = [pod for record in records for pod in record.all_pods]
    first_bound_at = _first_bound(pods, known_pods, now)
    # The wait ends when the first pod gets its node, which may be before this observation.
    if since is not None and first_bound_at is not None:
        queued += max(0.0, first_bound_at - since)
        since = None
    holds_gpus = any(map(has_gpus, records))
    waits = _to_run(observation, decision) and not holds_gpus
    if since is not None and not waits:
        queued += max(0.0, now - since)
        since = None
    if since is None and waits:
        last_ended_at = _last_end(pods, known_pods, now)
        since = min(now, last_ended_at)
    waiting_since = None if since is None else timestamp(since)
    return {"queued_seconds": round(queued, 3), "waiting_since": waiting_since}


def _first_bound(
    pods: Sequence[PodTime], known_pods: Mapping[str, PodTime], now: float
) -> float | None:
    """When the first pod that was not recorded before got its node; None without one."""
    first: float | None = None
    for pod in pods:
        if pod.name in known_pods:
            continue
        bound_at = seconds(pod.bound_time) or now
        first = bound_at if first is None else min(first, bound_at)
    return first


def _last_end(pods: Sequence[PodTime], known_pods: Mapping[str, PodTime], now: float) -> float:
    """When the last of the pods ended that held GPUs at the last observation; else now."""
    ends: list[float] = []
    for pod in pods:
        earlier = known_pods.get(pod.name)
        if earlier is None or earlier.seconds is None:
            bound_at = seconds(pod.bound_time) or 0.0
            held_seconds = pod.seconds or 0.0
            ends.append(bound_at + held_seconds)
    return max(ends, default=now)


def _to_run(observation: Observation, decision: Decision) -> bool:
    """True if the job is to run, now or as soon as it can."""
    if decision.action in _RESTS:
        return False
    return not observation.job.is_finished or decision.action is Action.RETRY


def _limit_records(usage: Usage) -> Usage:
    """The usage with at most MAX_RECORDS records, or twice that while the oldest may change."""
    excess = len(usage.attempts) - MAX_RECORDS
    count = 0
    for record in usage.attempts[: max(0, excess)]:
        if has_gpus(record):
            break
        count += 1
    # A pod that never ends must not let the status grow without bound.
    count = max(count, excess - MAX_RECORDS)
    return merge_oldest(usage, count) if count > 0 else usage


def _essential_parts(usage: Usage) -> object:
    """The parts of a usage that are worth a write of their own."""
    return usage.waiting_since, [_essential_fields(record) for record in usage.attempts]


def _essential_fields(record: AttemptUsage) -> object:
    parts = [part for part, spent in record.clock if spent]
    holding_pods = [pod.name for pod in record.all_pods if pod.seconds is None]
    return record.attempt, record.ended, record.sealed, record.began_at, parts, holding_pods


RoleUsage = TypeVar("RoleUsage", AttemptUsage, EngineUsage)
LATE_SECONDS = 10.0
"""Seconds until a kubelet reports a container's end at the latest; it counts until then."""


def looked_at(
    observation: Observation, records: Sequence[AttemptUsage], as_of: str
) -> list[AttemptUsage]:
    """The records after an observation; `as_of` is the moment until which they were counted."""
    pods_of_records = _pods_by_record(observation, records)
    return [
        _looked_at(observation, record, pods, as_of)
        for record, pods in zip(records, pods_of_records, strict=True)
    ]


def _looked_at(
    observation: Observation, record: AttemptUsage, pods: Collection[PodRecord], as_of: str
) -> AttemptUsage:
    """One record after an observation of its pods, those of its engines among them."""
    training_pods = [pod for pod in pods if not pod.engine]
    timed = _with_pod_times(observation, record, record, training_pods, as_of)
    updated = _with_reports(observation, timed, training_pods)
    if record.engines is None:
        return updated
    engine_pods = [pod for pod in pods if pod.engine]
    engines = _with_pod_times(observation, record, record.engines, engine_pods, as_of)
    return updated.model_copy(update={"engines": engines})


def has_gpus(record: AttemptUsage) -> bool:
    """True if a pod of the attempt holds GPUs."""
    return any(pod.seconds is None for pod in record.all_pods)


def _pods_by_record(
    observation: Observation, records: Sequence[AttemptUsage]
) -> list[list[PodRecord]]:
    """The bound pods of each record. Labels are hints: a new pod counts only as its Job's."""
    record_of_pod: dict[str, int] = {}
    record_of_attempt: dict[int, int] = {}
    for index, record in enumerate(records):
        record_of_attempt[record.attempt] = index
        for pod_time in record.all_pods:
            record_of_pod[pod_time.name] = index
    current = (*observation.pods, *observation.engine_pods)
    job_uids = {child.uid for child in observation.earlier_jobs}
    job_uids |= {pod.controller_uid for pod in current}
    pods_of_records: list[list[PodRecord]] = [[] for _ in records]
    for pod in (*current, *observation.earlier_pods, *observation.deleted_pods):
        is_known = pod.name in record_of_pod or pod.controller_uid in job_uids
        index_by_label = record_of_attempt.get(pod.attempt)
        place = record_of_pod.get(pod.name, index_by_label)
        if not pod.node or not is_known or place is None:
            continue
        pods_of_record = pods_of_records[place]
        if len(pods_of_record) < MAX_PODS:
            pods_of_record.append(pod)
    return pods_of_records


def _with_pod_times(
    observation: Observation,
    record: AttemptUsage,
    usage: RoleUsage,
    pods: Collection[PodRecord],
    as_of: str,
) -> RoleUsage:
    """What a role of the record's attempt held, with the times of its pods; of those that have
    ended and are gone only their sum is left."""
    known_pods = {pod.name: pod for pod in usage.pods}
    visible = {pod.name for pod in pods}
    gone_seconds = usage.gone_seconds
    pod_times = [
        _pod_time(observation, record, pod, known_pods.get(pod.name), as_of) for pod in pods
    ]
    for name, pod_time in known_pods.items():
        if name in visible:
            continue
        if pod_time.seconds is None:
            pod_times.append(_close_pod_time(observation, record, pod_time, as_of))
        else:
            gone_seconds += pod_time.seconds
    pod_times.sort(key=lambda pod_time: pod_time.name)
    fields = {"pods": pod_times, "gone_seconds": round(gone_seconds, 3)}
    return usage.model_copy(update=fields)


def _pod_time(
    observation: Observation,
    record: AttemptUsage,
    pod: PodRecord,
    known_pod_time: PodTime | None,
    as_of: str,
) -> PodTime:
    if known_pod_time and known_pod_time.seconds is not None:
        return known_pod_time
    now = observation.now
    start = seconds(record.start_time) or now
    counted_seconds = 0.0
    if known_pod_time:
        pod_time = known_pod_time
        counted_until = as_of
        counted_seconds = pod_seconds(known_pod_time, as_of)
    else:
        bound_at = _clamp(pod.bound_at or now, start, now)
        counted_until = timestamp(bound_at)
        pod_time = PodTime(name=pod.name, bound_time=counted_until)
    if pod.end is None and pod.phase not in ENDED_PHASES:
        return pod_time
    held_seconds = pod.termination.held_seconds if pod.termination else None
    if held_seconds is None:
        return _close_pod_time(observation, record, pod_time, counted_until)
    # A duration below what was counted until now is implausible, unless the kubelet's delay
    # explains it.
    if held_seconds < counted_seconds - LATE_SECONDS:
        held_seconds = counted_seconds
    # A machine that stood still sets its clock forward afterwards, and pods went on meanwhile.
    longest = max(counted_seconds, now - start + max(0.0, observation.clock_step))
    return _with_duration(pod_time, min(held_seconds, longest))


def _close_pod_time(
    observation: Observation, record: AttemptUsage, pod: PodTime, as_of: str
) -> PodTime:
    """Return a pod's time up to the end of its Job, since its own end is not known.

    That end is clipped to the time between `as_of`, until which the pod was counted, and now.
    """
    now = observation.now
    bound_at = seconds(pod.bound_time) or now
    job_ended_at = _job_end(observation, record.attempt) or now
    counted_until = seconds(as_of) or 0.0
    ended_at = _clamp(job_ended_at, counted_until, now)
    return _with_duration(pod, max(0.0, ended_at - bound_at))


def _with_duration(pod: PodTime, spent: float) -> PodTime:
    return pod.model_copy(update={"seconds": round(spent, 3)})


def _job_end(observation: Observation, attempt: int) -> Reported | None:
    """When the attempt's Job ended, which its pods did before; None if that is not known."""
    jobs = list(observation.earlier_jobs)
    if observation.child:
        jobs.append(observation.child)
    for job in jobs:
        if job.attempt == attempt and not is_engines_job(job.name):
            return job.ended_at
    return None


def _with_reports(
    observation: Observation, record: AttemptUsage, pods: Collection[PodRecord]
) -> AttemptUsage:
    """The record with the times that rank 0 reported; the longest report is the latest."""
    names_of_rank0: set[str] = set()
    for pod in pods:
        if pod.index == 0:
            names_of_rank0.add(pod.name)
            if pod.termination:
                record = _with_end(record, pod.termination)
    for pod_time in record.pods:
        if pod_time.name in names_of_rank0:
            return _with_pull(observation, record, pod_time)
    return record


def _with_end(record: AttemptUsage, end: PodTermination) -> AttemptUsage:
    """Return the record with the times in the outcome of rank 0's pod."""
    if end.reported and end.outcome.account:
        record = _with_account(record, end.outcome.account)
    if end.held_seconds is None or end.ran_seconds is None:
        return record
    lead = end.held_seconds - end.ran_seconds
    return record.model_copy(update={"lead_seconds": round(lead, 3)})


def _with_pull(observation: Observation, record: AttemptUsage, rank0: PodTime) -> AttemptUsage:
    """Return the record with the times of rank 0's last answer, if that is of this attempt."""
    answered_at = pull_time(observation)
    account = observation.pull.progress.account if observation.pull else None
    current_attempt = observation.job.status.attempt
    is_current = record.attempt == current_attempt and not record.ended
    if answered_at is None or account is None or not is_current:
        return record
    started_at = seconds(record.start_time) or 0.0
    if answered_at < started_at:
        return record
    record = _with_account(record, account)
    if rank0.seconds is not None:
        return record
    bound_at = seconds(rank0.bound_time) or answered_at
    lead = max(0.0, answered_at - bound_at - account.clock.total)
    # An answer comes late, never early: the shortest lead is nearest to the truth.
    if record.lead_seconds is not None:
        lead = min(record.lead_seconds, lead)
    return record.model_copy(update={"lead_seconds": round(lead, 3)})


def pull_time(observation: Observation) -> float | None:
    """Unix time of rank 0's last answer, by the operator's clock; None before the first."""
    if observation.pull is None:
        return None
    seconds_since = max(0.0, observation.at - observation.pull.at)
    return observation.now - seconds_since


def _with_account(record: AttemptUsage, account: Account) -> AttemptUsage:
    update: dict[str, object] = {"began_at": account.began_at or record.began_at}
    if account.clock.total > record.clock.total:
        update["clock"] = account.clock
    if account.sealed.total > record.sealed.total:
        update["sealed"] = account.sealed
    return record.model_copy(update=update)


def _clamp(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
