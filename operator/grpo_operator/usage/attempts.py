"""Updates the records of the attempts' GPUs from their pods and from rank 0's reports.

A pod's time is the difference of two times of its kubelet, so an offset of that clock cancels. It is clipped to the
time that the operator's own clock allows. A pod whose end was not seen is timed by the end of its Job.
"""

from collections.abc import Collection, Sequence
from typing import TypeVar

from grpo_api.timing import Account
from grpo_api.usage import MAX_PODS, AttemptUsage, EngineUsage, PodTime

from ..names import runs_engines
from ..observe import Observation
from ..records import ENDED_PHASES, PodRecord
from ..terminations import PodTermination
from ..times import Reported, seconds, timestamp
from .division import pod_seconds

Held = TypeVar("Held", AttemptUsage, EngineUsage)
LATE_SECONDS = 10.0
"""Longest time from a container's end until its kubelet reports it; until then the pod counts as holding its GPUs."""


def looked_at(seen: Observation, records: Sequence[AttemptUsage], as_of: str) -> list[AttemptUsage]:
    """The records after a look; `as_of` is the moment until which they were counted."""
    mine = _sorted(seen, records)
    return [_looked_at(seen, record, pods, as_of) for record, pods in zip(records, mine, strict=True)]


def _looked_at(seen: Observation, record: AttemptUsage, pods: Collection[PodRecord], as_of: str) -> AttemptUsage:
    """One record after a look at these of its pods, those of its engines among them."""
    trains = [pod for pod in pods if not pod.engine]
    found = _heard(seen, _timed(seen, record, record, trains, as_of), trains)
    if record.engines is None:
        return found
    serves = [pod for pod in pods if pod.engine]
    return found.model_copy(update={"engines": _timed(seen, record, record.engines, serves, as_of)})


def holds(record: AttemptUsage) -> bool:
    """True if a pod of the attempt holds GPUs."""
    return any(pod.seconds is None for pod in record.all_pods)


def _sorted(seen: Observation, records: Sequence[AttemptUsage]) -> list[list[PodRecord]]:
    """The bound pods of each record. Labels are hints: a pod that was not known counts only as its Job's."""
    by_name: dict[str, int] = {}
    latest: dict[int, int] = {}
    for index, record in enumerate(records):
        latest[record.attempt] = index
        by_name.update({pod.name: index for pod in record.all_pods})
    current = (*seen.pods, *seen.engine_pods)
    own = {child.uid for child in seen.earlier_jobs} | {pod.controller_uid for pod in current}
    found: list[list[PodRecord]] = [[] for _ in records]
    for pod in (*current, *seen.earlier_pods, *seen.departed):
        known = pod.name in by_name or pod.controller_uid in own
        place = by_name.get(pod.name, latest.get(pod.attempt))
        if pod.node and known and place is not None and len(found[place]) < MAX_PODS:
            found[place].append(pod)
    return found


def _timed(seen: Observation, record: AttemptUsage, held: Held, pods: Collection[PodRecord], as_of: str) -> Held:
    """What a role of the record's attempt held, with the times of its pods; of those that have ended and are gone only
    their sum is left."""
    before = {pod.name: pod for pod in held.pods}
    visible = {pod.name for pod in pods}
    lost = [pod for name, pod in before.items() if name not in visible]
    gone = held.gone_seconds + sum(pod.seconds for pod in lost if pod.seconds is not None)
    now = [_pod_time(seen, record, pod, before.get(pod.name), as_of) for pod in pods]
    now += [_closed(seen, record, pod, as_of) for pod in lost if pod.seconds is None]
    return held.model_copy(update={"pods": sorted(now, key=lambda pod: pod.name), "gone_seconds": round(gone, 3)})


def _pod_time(seen: Observation, record: AttemptUsage, pod: PodRecord, known: PodTime | None, as_of: str) -> PodTime:
    if known and known.seconds is not None:
        return known
    start = seconds(record.start_time) or seen.now
    found = known
    if found is None:
        bound_at = _within(pod.bound_at or seen.now, start, seen.now)
        found = PodTime(name=pod.name, bound_time=timestamp(bound_at))
    if pod.end is None and pod.phase not in ENDED_PHASES:
        return found
    held = pod.termination.held_seconds if pod.termination else None
    if held is None:
        return _closed(seen, record, found, as_of if known else found.bound_time)
    # A duration below what was counted until now is implausible, unless the kubelet's delay explains it.
    least = pod_seconds(known, as_of) if known else 0.0
    if held < least - LATE_SECONDS:
        held = least
    return _lasted(found, min(held, max(least, seen.now - start)))


def _closed(seen: Observation, record: AttemptUsage, pod: PodTime, as_of: str) -> PodTime:
    """Return a pod's time up to the end of its Job, since its own end is not known.

    That end is clipped to the time between `as_of`, until which the pod was counted, and now.
    """
    bound_at = seconds(pod.bound_time) or seen.now
    job_ended_at = _job_end(seen, record.attempt) or seen.now
    counted_until = seconds(as_of) or 0.0
    ended_at = _within(job_ended_at, counted_until, seen.now)
    return _lasted(pod, max(0.0, ended_at - bound_at))


def _lasted(pod: PodTime, spent: float) -> PodTime:
    return pod.model_copy(update={"seconds": round(spent, 3)})


def _job_end(seen: Observation, attempt: int) -> Reported | None:
    """Return when the attempt's Job ended, which its pods did before; None while that is not known."""
    jobs = list(seen.earlier_jobs)
    if seen.child:
        jobs.append(seen.child)
    for job in jobs:
        if job.attempt == attempt and not runs_engines(job.name):
            return job.ended_at
    return None


def _heard(seen: Observation, record: AttemptUsage, pods: Collection[PodRecord]) -> AttemptUsage:
    """Return the record with the times that rank 0 reported; of several reports the longest counts as the latest."""
    ranks0 = [pod for pod in pods if pod.index == 0]
    for rank0 in ranks0:
        if rank0.termination:
            record = _with_end(record, rank0.termination)
    names = {rank0.name for rank0 in ranks0}
    known = next((pod for pod in record.pods if pod.name in names), None)
    return record if known is None else _with_pull(seen, record, known)


def _with_end(record: AttemptUsage, end: PodTermination) -> AttemptUsage:
    """Return the record with the times that the end of rank 0's pod tells."""
    if end.reported and end.outcome.account:
        record = _with_account(record, end.outcome.account)
    if end.held_seconds is None or end.ran_seconds is None:
        return record
    return record.model_copy(update={"lead_seconds": round(end.held_seconds - end.ran_seconds, 3)})


def _with_pull(seen: Observation, record: AttemptUsage, rank0: PodTime) -> AttemptUsage:
    """Return the record with the times of rank 0's last answer, if that is of this attempt."""
    at = pull_time(seen)
    account = seen.pull.progress.account if seen.pull else None
    is_current = record.attempt == seen.job.status.attempt and not record.ended
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


def pull_time(seen: Observation) -> float | None:
    """Return the unix time of rank 0's last answer, by the operator's clock; None before the first answer."""
    return seen.now - max(0.0, seen.at - seen.pull.at) if seen.pull else None


def _with_account(record: AttemptUsage, account: Account) -> AttemptUsage:
    update: dict[str, object] = {"began_at": account.began_at or record.began_at}
    if account.clock.total > record.clock.total:
        update["clock"] = account.clock
    if account.sealed.total > record.sealed.total:
        update["sealed"] = account.sealed
    return record.model_copy(update=update)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
