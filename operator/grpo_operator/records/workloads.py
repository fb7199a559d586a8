"""Kueue's Workload of a GRPOJob, as far as decisions need it, and what a GRPOJob's metadata says to
Kueue.

Kueue, its admission checks and anybody with the right write a Workload's status. So what is kept of
it is bounded, and a condition of an unknown type or status has no effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_api.text.contract import LABEL_QUEUE
from grpo_kube.objects.json_reader import MAX_OBJECT, MAX_SENTENCE, JsonObject, Unreadable, truncate
from grpo_kube.objects.resources import ObjectKey, controller_uid, object_key

from .names import (
    ANNOTATION_PAUSED,
    ANNOTATION_PLANNED,
    LABEL_JOB,
    LABEL_PREBUILT,
    LABEL_WORKLOAD_PRIORITY,
)

MAX_CONDITIONS = 32
MAX_UPDATES = 64 * 1024
"""Characters of all that admission checks want of the pods."""
QUOTA_RESERVED, ADMITTED, EVICTED = "QuotaReserved", "Admitted", "Evicted"
PODS_READY, FINISHED, REQUEUED = "PodsReady", "Finished", "Requeued"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """What the caches need of every watched object, by its metadata."""

    key: ObjectKey
    uid: str
    version: int
    deleting: bool
    """Somebody has asked for its deletion."""

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.key.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord(ObjectRecord):
    """An object of one GRPOJob, or of all in its namespace."""

    job_key: ObjectKey
    """Of the GRPOJob, by the object's label; without a name for an object of all."""


def object_fields(meta: JsonObject) -> dict[str, Any]:
    """The fields of an ObjectRecord."""
    return {
        "key": object_key(meta),
        "uid": meta.required_text("uid"),
        "version": meta.digits("resourceVersion"),
        "deleting": "deletionTimestamp" in meta,
    }


def child_fields(meta: JsonObject) -> dict[str, Any]:
    """The fields of a ChildRecord."""
    job_key = ObjectKey(object_key(meta).namespace, meta.part("labels").text(LABEL_JOB))
    return {**object_fields(meta), "job_key": job_key}


@dataclass(frozen=True, slots=True)
class KueueMetadata:
    """What the metadata of a GRPOJob says to Kueue; each is empty when unset."""

    queue: str = ""
    """LocalQueue, by label."""
    priority_class: str = ""
    """WorkloadPriorityClass, by label."""
    prebuilt: str = ""
    """Workload that is there already, as MultiKueue names it on a worker."""


def kueue_metadata(meta: JsonObject) -> KueueMetadata:
    """Read them from metadata. MultiKueue's is an annotation since Kueue 0.18, before a label."""
    labels, annotations = meta.part("labels"), meta.part("annotations")
    return KueueMetadata(
        queue=labels.text(LABEL_QUEUE),
        priority_class=labels.text(LABEL_WORKLOAD_PRIORITY),
        prebuilt=annotations.text(LABEL_PREBUILT) or labels.text(LABEL_PREBUILT),
    )


@dataclass(frozen=True, slots=True)
class WorkloadCondition:
    """One condition, without its times."""

    status: str = ""
    reason: str = ""
    message: str = ""

    def __str__(self) -> str:
        """`reason: message`."""
        return ": ".join(part for part in (self.reason, self.message) if part)


@dataclass(frozen=True, slots=True)
class PodSetUpdate:
    """What an admission check, or the flavor of their nodes, wants of the pods of a role."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    source: str = field(default="an admission check", repr=False)
    """Who wants it, for messages."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where Kueue has put the pods of a role."""

    flavors: tuple[str, ...] = ()
    """Names of ResourceFlavors, each once."""
    by_topology: bool = False
    """True if Kueue's ungater gives each pod its place."""
    updates: tuple[PodSetUpdate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRecord(ChildRecord):
    """One Workload. `grpojob_uid` is its controller's uid; empty without a controller."""

    grpojob_uid: str
    active: bool
    """spec.active: false takes its admission."""
    paused: bool
    """True if it is inactive since the GRPOJob is suspended."""
    queue: str
    priority_class: tuple[str, str]
    """Kind and name of spec.priorityClassRef."""
    counts: Mapping[str, int]
    """Pods by name of the podSet."""
    plan_annotation: str
    """The annotation that says for which plan it was made."""
    conditions: Mapping[str, WorkloadCondition]
    has_admission: bool
    assignments: Mapping[str, Assignment]
    """By name of the podSet."""
    checks_message: str
    """What the admission checks that are not ready say."""

    def condition(self, kind: str) -> WorkloadCondition:
        """The condition of that type."""
        return self.conditions.get(kind, WorkloadCondition())

    def is_true(self, kind: str) -> bool:
        """True if the condition is True."""
        return self.condition(kind).status == "True"

    @property
    def has_reservation(self) -> bool:
        """True if Kueue counts its quota as taken, or still shows that it did."""
        return self.has_admission or self.is_true(QUOTA_RESERVED) or self.is_true(ADMITTED)

    @property
    def may_continue(self) -> bool:
        """True if a gang that was started by it may go on."""
        return self.is_true(ADMITTED) and not self.deleting and not self.lost_message

    @property
    def may_start(self) -> bool:
        """True if a gang may be started by it."""
        return self.may_continue and self.has_admission and self.active

    @property
    def lost_message(self) -> str:
        """Why the gang may not go on, in Kueue's words; empty if it may."""
        for kind in (FINISHED, EVICTED):
            if self.is_true(kind):
                return f"{kind}: {self.condition(kind)}"
        return ""


def workload_record(item: object) -> WorkloadRecord:
    """The record of a Workload.

    Raises:
        Unreadable: a field has a type that it can't have, or the admission checks' wishes are too
            long.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    annotations = meta.part("annotations")
    spec = whole.part("spec")
    reference = spec.part("priorityClassRef")
    pod_sets = spec.parts("podSets")
    status = whole.part("status")
    return WorkloadRecord(
        **child_fields(meta),
        grpojob_uid=controller_uid(meta),
        active="active" not in spec or spec.is_true("active"),
        paused=ANNOTATION_PAUSED in annotations,
        queue=spec.text("queueName"),
        priority_class=(reference.text("kind"), reference.text("name")),
        counts={pod_set.text("name"): pod_set.integer("count") for pod_set in pod_sets},
        plan_annotation=annotations.text(ANNOTATION_PLANNED, MAX_OBJECT),
        conditions=_conditions(status),
        has_admission="admission" in status,
        assignments=_assignments(status),
        checks_message=_checks(status),
    )


def _conditions(status: JsonObject) -> dict[str, WorkloadCondition]:
    by_type: dict[str, WorkloadCondition] = {}
    for item in status.parts("conditions"):
        kind = item.text("type", MAX_OBJECT)
        by_type[kind] = _condition(item)
    first_types = list(by_type)[:MAX_CONDITIONS]
    return {kind: by_type[kind] for kind in first_types}


def _condition(item: JsonObject) -> WorkloadCondition:
    reason = item.text("reason", MAX_OBJECT)
    message = item.text("message", MAX_OBJECT)
    return WorkloadCondition(
        item.text("status"), truncate(reason, MAX_SENTENCE), truncate(message, MAX_SENTENCE)
    )


def _assignments(status: JsonObject) -> dict[str, Assignment]:
    updates: dict[str, list[PodSetUpdate]] = {}
    for check in status.parts("admissionChecks"):
        for update in check.parts("podSetUpdates"):
            name = update.text("name")
            updates.setdefault(name, []).append(_update(update))
    if len(repr(updates)) > MAX_UPDATES:
        raise Unreadable(
            f"status.admissionChecks: the podSetUpdates have more than {MAX_UPDATES} characters"
        )
    assignments: dict[str, Assignment] = {}
    for item in status.part("admission").parts("podSetAssignments"):
        name = item.text("name")
        flavors = dict.fromkeys(item.string_map("flavors").values())
        by_topology = "topologyAssignment" in item or "delayedTopologyRequest" in item
        assignments[name] = Assignment(
            flavors=tuple(flavors), by_topology=by_topology, updates=tuple(updates.get(name, ()))
        )
    return assignments


def _update(item: JsonObject) -> PodSetUpdate:
    tolerations = tuple(dict(toleration.items()) for toleration in item.parts("tolerations"))
    return PodSetUpdate(
        item.string_map("labels"),
        item.string_map("annotations"),
        item.string_map("nodeSelector"),
        tolerations,
    )


def _checks(status: JsonObject) -> str:
    checks = status.parts("admissionChecks")
    not_ready = [check for check in checks if check.text("state") != "Ready"]
    message = "; ".join(map(_check_message, not_ready))
    return truncate(message, MAX_SENTENCE)


def _check_message(check: JsonObject) -> str:
    """`name is Pending: message`."""
    name = check.text("name", MAX_OBJECT)
    state = check.text("state")
    message = check.text("message", MAX_OBJECT)
    return f"{name} is {state}: {message}" if message else f"{name} is {state}"
