"""What events on GRPOJobs say, for `kubectl describe`: one per change of the conditions, fewer
under load."""

from collections.abc import Mapping
from typing import Any

from grpo_api.status.status import Condition, ConditionType, GRPOJobStatus
from grpo_api.text.contract import API_VERSION, KIND
from grpo_kube.objects.json_reader import truncate
from grpo_kube.objects.times import timestamp

from ..records.names import MANAGER
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord

_TOLD = (
    ConditionType.FAILED,
    ConditionType.SUCCEEDED,
    ConditionType.SUSPENDED,
    ConditionType.TRAINS_ADAPTER_ONLY,
    ConditionType.DEGRADED,
    ConditionType.PROMPTS_DROPPED,
    ConditionType.RUNNING,
    ConditionType.ADMITTED,
)
"""The most telling change of a write becomes the event; the others are in the conditions."""

_WARN_WHEN_TRUE = (
    ConditionType.FAILED,
    ConditionType.DEGRADED,
    ConditionType.TRAINS_ADAPTER_ONLY,
    ConditionType.PROMPTS_DROPPED,
)

_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)
MAX_MESSAGE = 1024
"""Characters of the longest message that the API server takes."""
MIN_REASON = 128
"""Characters of it that are left for why it ended, however long the rest is."""


def telling_change(old: list[Condition], new: list[Condition]) -> Condition | None:
    """The condition whose change matters most; None when no status or reason changed."""
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    changed = {one.type: one for one in new if before.get(one.type) != (one.status, one.reason)}
    for kind in _TOLD:
        condition = changed.get(kind)
        if condition is None:
            continue
        # conditions that start out False tell nothing: only Admitted=False is news by itself
        if kind in before or condition.status == "True" or kind == ConditionType.ADMITTED:
            return condition
    return None


def event(
    job: GRPOJobRecord, condition: Condition, now: float, status: GRPOJobStatus | None = None
) -> dict[str, Any]:
    """A core/v1 Event that tells of a condition; of the end, with where the model is and what
    became of the GPUs."""
    if condition.status == "True":
        warns = condition.type in _WARN_WHEN_TRUE
    else:
        warns = condition.type == ConditionType.ADMITTED and condition.status == "False"
    about = {"namespace": job.key.namespace, "name": job.name, "uid": job.uid}
    message = f"{condition.type}={condition.status}: {condition.message}"
    if status and condition.type in _ENDS and condition.status == "True":
        sums = [one.description for one in (status.export, status.usage) if one]
        words = truncate("".join(f"; {one}" for one in sums), MAX_MESSAGE - MIN_REASON)
        message = truncate(message, MAX_MESSAGE - len(words)) + words
    return _event(about, "Warning" if warns else "Normal", condition.reason, message, now)


def merge_start_event(
    earlier: Mapping[str, Any], later: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Merge an admission event and the start event that follows it into one.

    Return None for other pairs, or if the merged message would be longer than MAX_MESSAGE.
    """
    message = f"{later['message']}; before: {earlier['message']}"
    reasons = earlier["reason"], later["reason"]
    if reasons != (Reason.ADMITTED, Reason.ALL_PODS_RUNNING) or len(message) > MAX_MESSAGE:
        return None
    return {**later, "message": message, "firstTimestamp": earlier["firstTimestamp"]}


def unreadable_event(
    involved_object: Mapping[str, str], problem: str, now: float
) -> dict[str, Any]:
    """A core/v1 Event on a GRPOJob (namespace, name, uid) whose conditions can't be written."""
    return _event(
        involved_object, "Warning", Reason.STATUS_UNREADABLE, unreadable_message(problem), now
    )


def unreadable_message(problem: str) -> str:
    """Return the sentence that reports to users why the operator can't read an object."""
    return f"this version of the operator can't read the object and leaves it alone: {problem}"


def _event(
    involved_object: Mapping[str, str], kind: str, reason: str, message: str, now: float
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "generateName": f"{involved_object['name']}.",
            "namespace": involved_object["namespace"],
        },
        "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **involved_object},
        "type": kind,
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "source": {"component": MANAGER},
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
