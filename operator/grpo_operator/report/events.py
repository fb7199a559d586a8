"""Makes the events on GRPOJobs, for `kubectl describe`. There is one per change of the conditions,
fewer under load, and one when a tracker begins to lose rows.

The event of a job's end has a name of its own, so that it can be sent again. A leader may lose its
Lease between a status write and the event. So the next leader repeats the events of the newest
ends.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_api.status.status import Condition, ConditionType, GRPOJobStatus
from grpo_api.text.contract import API_VERSION, KIND
from grpo_kube.objects.json_reader import truncate
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import timestamp

from ..records.names import MANAGER
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord

_TOLD = (
    ConditionType.FAILED,
    ConditionType.SUCCEEDED,
    ConditionType.SUSPENDED,
    ConditionType.TRAINS_ADAPTER_ONLY,
    ConditionType.ENGINE_FALLBACK,
    ConditionType.DEGRADED,
    ConditionType.HEALTHY,
    ConditionType.PROMPTS_DROPPED,
    ConditionType.RUNNING,
    ConditionType.ADMITTED,
)
"""The most telling change of a write becomes the event; the others are in the conditions."""

_OF_ATTEMPT = (ConditionType.DEGRADED, ConditionType.HEALTHY, ConditionType.RUNNING)

_WARNINGS: dict[str, str] = {
    ConditionType.FAILED: "True",
    ConditionType.DEGRADED: "True",
    ConditionType.TRAINS_ADAPTER_ONLY: "True",
    ConditionType.ENGINE_FALLBACK: "True",
    ConditionType.PROMPTS_DROPPED: "True",
    ConditionType.ADMITTED: "False",
    ConditionType.HEALTHY: "False",
}
"""The status of a condition that is a Warning; Unknown never is."""

_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)
REPEAT_SECONDS = 120.0
"""Age up to which the event of an end is sent again by a new leader: far longer than any Lease."""
MAX_MESSAGE = 1024
"""Characters of the longest message that the API server takes."""
MIN_REASON = 128
"""Characters of it that are left for why it ended, however long the rest is."""


def telling_change(old: list[Condition], new: list[Condition]) -> Condition | None:
    """The condition whose change matters most; None when no status or reason changed."""
    old_by_type = {condition.type: condition for condition in old}
    new_by_type = {condition.type: condition for condition in new}
    admitted = new_by_type.get(ConditionType.ADMITTED)
    has_lost_place = admitted is not None and admitted.status == "False"
    for kind in _TOLD:
        condition = new_by_type.get(kind)
        before = old_by_type.get(kind)
        if condition is None or _is_unchanged(before, condition):
            continue
        # that the attempt is over tells less than why
        if kind in _OF_ATTEMPT and has_lost_place:
            continue
        # conditions that start out False tell nothing, but for two
        is_news = (condition.status == "True") == (kind != ConditionType.HEALTHY)
        is_news = is_news or kind == ConditionType.ADMITTED
        if before or is_news:
            return condition
    return None


def _is_unchanged(before: Condition | None, condition: Condition) -> bool:
    """True if neither status nor reason changed; a new message alone is no change, and neither is a
    preflight that has begun."""
    if condition.reason == Reason.CHECKING:
        return True
    if before is None or before.status != condition.status:
        return False
    return before.reason == condition.reason


def event(
    job: GRPOJobRecord, condition: Condition, now: float, status: GRPOJobStatus | None = None
) -> dict[str, Any]:
    """A core/v1 Event on a condition; of the end, with the model's place and GPU usage."""
    is_true = condition.status == "True"
    kind = "Warning" if _WARNINGS.get(condition.type) == condition.status else "Normal"
    message = f"{condition.type}={condition.status}: {condition.message}"
    if status and condition.type in _ENDS and is_true:
        results = [result for result in (status.export, status.usage) if result]
        descriptions = "".join(f"; {result.description}" for result in results)
        summary = truncate(descriptions, MAX_MESSAGE - MIN_REASON)
        message = truncate(message, MAX_MESSAGE - len(summary)) + summary
    body = _event(job.key, job.uid, kind, condition.reason, message, now=now)
    if condition.type in _ENDS and is_true:
        body["metadata"] = {"name": _end_name(job, condition), "namespace": job.key.namespace}
    return body


def _end_name(job: GRPOJobRecord, condition: Condition) -> str:
    """The name of the event of one end, the same from every sender."""
    end = f"{job.uid} {condition.type} {condition.last_transition_time}"
    return f"{job.name}.{hashlib.sha256(end.encode()).hexdigest()[:16]}"


def repeated_end_event(job: GRPOJobRecord, now: float) -> dict[str, Any] | None:
    """The event of an end that another leader wrote lately, to be sent again; None without one."""
    # The typed status of each of ten thousand ended jobs would take longer than a Lease lasts.
    if not job.completed or now - job.completed > REPEAT_SECONDS:
        return None
    end = next((kind for kind in _ENDS if job.is_true(kind)), None)
    condition = job.condition(end) if end else None
    return event(job, condition, now, job.status) if condition else None


def status_events(
    job: GRPOJobRecord, status: GRPOJobStatus, now: float
) -> Iterator[dict[str, Any]]:
    """Yield the Events on a new status: of the most telling condition, and of trackers."""
    change = telling_change(job.status.conditions, status.conditions)
    if change:
        yield event(job, change, now, status)
    loss = tracking_event(job, status, now)
    if loss:
        yield loss


def tracking_event(job: GRPOJobRecord, status: GRPOJobStatus, now: float) -> dict[str, Any] | None:
    """A core/v1 Event on the trackers that have begun to lose rows; None while none loses any."""
    before = {report.name: report.lost_rows for report in job.status.tracking or ()}
    losses = []
    for report in status.tracking or ():
        if report.lost_rows and not before.get(report.name):
            problem = report.problem or "no reason was given"
            losses.append(f"{report.name}: {problem}")
    if not losses:
        return None
    message = f"training goes on, but its tracker misses rows of it: {'; '.join(losses)}"
    return _event(job.key, job.uid, "Warning", Reason.TRACKER_LOSES_ROWS, message, now=now)


def merge_start_event(
    earlier: Mapping[str, Any], later: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Merge an admission event and the start event that follows it into one.

    Return None for other pairs, or if the merged message would be longer than MAX_MESSAGE.
    """
    is_pair = earlier["reason"] == Reason.ADMITTED and later["reason"] == Reason.ALL_PODS_RUNNING
    message = f"{later['message']}; before: {earlier['message']}"
    if not is_pair or len(message) > MAX_MESSAGE:
        return None
    return {**later, "message": message, "firstTimestamp": earlier["firstTimestamp"]}


def undeletable_event(job: GRPOJobRecord, problem: str, now: float) -> dict[str, Any]:
    """A core/v1 Event on an attempt that must not run, and whose pods can't be ended."""
    message = (
        f"pods of an attempt that must not run keep their GPUs, since a deletion fails: {problem}. "
        "Let the operator delete it, or delete it yourself"
    )
    return _event(job.key, job.uid, "Warning", Reason.FAILED_DELETE, message, now=now)


def unreadable_event(key: ObjectKey, uid: str, problem: str, now: float) -> dict[str, Any]:
    """A core/v1 Event on a GRPOJob whose conditions can't be written."""
    message = unreadable_message(problem)
    return _event(key, uid, "Warning", Reason.STATUS_UNREADABLE, message, now=now)


def unreadable_message(problem: str) -> str:
    """Return the sentence that reports to users why the operator can't read an object."""
    return f"this version of the operator can't read the object and leaves it alone: {problem}"


def _event(
    key: ObjectKey, uid: str, kind: str, reason: str, message: str, *, now: float
) -> dict[str, Any]:
    about = {"namespace": key.namespace, "name": key.name, "uid": uid}
    time = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{key.name}.", "namespace": key.namespace},
        "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **about},
        "type": kind,
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "source": {"component": MANAGER},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
