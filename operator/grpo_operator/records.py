"""What the operator keeps of each object that it watches: typed records of the few fields that decisions need.

Exists because whole objects cost tens of kilobytes each and invite decisions on fields that nobody reviewed. Pure:
API objects (dicts) in, frozen records out. Used by the caches; read by observe, policies, status and metrics_server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.status import Condition, ConditionType, GRPOJobStatus

from .errors import Reason
from .names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_JOB, LABEL_UID, Key, inherited
from .terminations import PodEnd, pod_end

Object = Mapping[str, Any]


def seconds(text: str | None) -> float | None:
    """Unix time of an RFC 3339 timestamp; None stays None."""
    return datetime.fromisoformat(text).timestamp() if text else None


def timestamp(unix: float) -> str:
    """RFC 3339 in UTC with whole seconds, as metav1.Time is written."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(meta: Object) -> int:
    return int(meta.get("resourceVersion") or 0)


def _attempt(meta: Object) -> int:
    text = (meta.get("labels") or {}).get(LABEL_ATTEMPT, "")
    return int(text) if text.isdecimal() else 0


def _parent(meta: Object) -> Key:
    return Key(meta["namespace"], (meta.get("labels") or {}).get(LABEL_JOB, ""))


def _owner_uid(meta: Object) -> str:
    return next((owner["uid"] for owner in meta.get("ownerReferences") or () if owner.get("controller")), "")


@dataclass(frozen=True, slots=True)
class GRPOJobRecord:
    """One GRPOJob: `spec` is None and `problems` says why when its types refuse it."""

    parent: Key
    name: str
    uid: str
    version: int
    generation: int
    created: float
    deleting: bool
    labels: Mapping[str, str]
    """Those that its Job and pods get too, as `annotations`."""
    annotations: Mapping[str, str]
    spec: GRPOJobSpec | None
    problems: tuple[str, ...]
    status: GRPOJobStatus
    raw_status: dict[str, Any]

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, if it has been written."""
        return next((found for found in self.status.conditions if found.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Whether the condition is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded or failed for good."""
        return self.holds(ConditionType.SUCCEEDED) or self.holds(ConditionType.FAILED)

    @property
    def active(self) -> bool:
        """Whether the attempt that status.attempt counts was admitted and has not ended, or is held by Kueue."""
        found = self.condition(ConditionType.ADMITTED)
        if found is None or self.finished or not self.status.attempt:
            return False
        return found.status == "True" or found.reason == Reason.WAITING_IN_QUEUE


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The Indexed Job of one attempt. `grpojob_uid` is the controlling owner's uid, empty for a stranger's Job."""

    parent: Key
    name: str
    uid: str
    version: int
    grpojob_uid: str
    attempt: int
    suspended: bool
    deleting: bool
    started: float | None
    ended: str
    """Reason of its Complete or Failed condition; empty while neither is True."""


@dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod of an attempt."""

    parent: Key
    name: str
    uid: str
    version: int
    grpojob_uid: str
    job_uid: str
    attempt: int
    index: int
    node: str
    ip: str
    phase: str
    waiting: str
    """Why its container waits, such as `ImagePullBackOff: …`; empty when it doesn't."""
    unschedulable: str
    """The scheduler's message; empty when it is bound or not looked at yet."""
    node_lost: bool
    """Its container should run, but the node controller has marked it not ready."""
    deleted_at: float | None
    """When its deletion was asked for."""
    end: PodEnd | None

    @property
    def live(self) -> bool:
        """Whether it runs or may still run, and nobody has told it to end."""
        return self.phase not in ("Succeeded", "Failed") and self.deleted_at is None


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """The rendezvous Service of a namespace; it belongs to all GRPOJobs there, so its parent has no name."""

    parent: Key
    name: str
    uid: str
    version: int


def _validated(spec: dict[str, Any]) -> tuple[GRPOJobSpec | None, tuple[str, ...]]:
    try:
        return parse_spec(spec), ()
    except SpecInvalid as error:
        return None, tuple(error.problems)


def grpojob_record(item: Object) -> GRPOJobRecord:
    """The record of a GRPOJob.

    Raises:
        pydantic.ValidationError: the status holds values that this version doesn't know (unknown fields are ignored).
    """
    meta, status = item["metadata"], dict(item.get("status") or {})
    spec, problems = _validated(dict(item.get("spec") or {}))
    return GRPOJobRecord(
        parent=Key(meta["namespace"], meta["name"]),
        name=meta["name"],
        uid=meta["uid"],
        version=_version(meta),
        generation=meta.get("generation", 0),
        created=seconds(meta["creationTimestamp"]) or 0.0,
        deleting="deletionTimestamp" in meta,
        labels=inherited(meta.get("labels")),
        annotations=inherited(meta.get("annotations")),
        spec=spec,
        problems=problems,
        status=GRPOJobStatus.model_validate(status, extra="ignore"),
        raw_status=status,
    )


def job_record(item: Object) -> JobRecord:
    """The record of a batch/v1 Job."""
    meta, status = item["metadata"], item.get("status") or {}
    ends = [c for c in status.get("conditions") or () if c["type"] in ("Complete", "Failed") and c["status"] == "True"]
    return JobRecord(
        parent=_parent(meta),
        name=meta["name"],
        uid=meta["uid"],
        version=_version(meta),
        grpojob_uid=_owner_uid(meta),
        attempt=_attempt(meta),
        suspended=bool(item["spec"].get("suspend")),
        deleting="deletionTimestamp" in meta,
        started=seconds(status.get("startTime")),
        ended=(ends[0].get("reason") or ends[0]["type"]) if ends else "",
    )


def _container_state(status: Object) -> Object:
    return next((c.get("state") or {} for c in status.get("containerStatuses") or ()), {})


def _condition(status: Object, kind: str) -> Object:
    return next((c for c in status.get("conditions") or () if c["type"] == kind), {})


def _sentence(part: Object) -> str:
    return ": ".join(str(part[field]) for field in ("reason", "message") if part.get(field))


def _deleted_at(meta: Object) -> float | None:
    """The API's deletionTimestamp is when the grace period ends; subtract it."""
    ends = seconds(meta.get("deletionTimestamp"))
    return None if ends is None else ends - float(meta.get("deletionGracePeriodSeconds") or 0)


def pod_record(item: Object) -> PodRecord:
    """The record of a pod."""
    meta, status, labels = item["metadata"], item.get("status") or {}, item["metadata"].get("labels") or {}
    state, bound = _container_state(status), _condition(status, "PodScheduled")
    return PodRecord(
        parent=_parent(meta),
        name=meta["name"],
        uid=meta["uid"],
        version=_version(meta),
        grpojob_uid=labels.get(LABEL_UID, ""),
        job_uid=_owner_uid(meta),
        attempt=_attempt(meta),
        index=int(labels.get(LABEL_INDEX) or 0),
        node=item["spec"].get("nodeName") or "",
        ip=status.get("podIP") or "",
        phase=status.get("phase") or "Pending",
        waiting=_sentence(state.get("waiting") or {}),
        unschedulable=(bound.get("message") or "") if bound.get("status") == "False" else "",
        node_lost="running" in state and _condition(status, "Ready").get("status") == "False",
        deleted_at=_deleted_at(meta),
        end=pod_end(status),
    )


def service_record(item: Object) -> ServiceRecord:
    """The record of a Service."""
    meta = item["metadata"]
    return ServiceRecord(Key(meta["namespace"], ""), meta["name"], meta["uid"], _version(meta))
