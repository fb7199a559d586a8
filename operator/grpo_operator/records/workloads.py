"""Kueue's Workload of a GRPOJob, as far as decisions need it, and what a GRPOJob's metadata says to
Kueue.

A Workload's status is Kueue's, its admission checks' and anybody's who may write it: what is kept
of it is bounded, and of its conditions an unknown type or status is no reason for anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_kube.objects.json_reader import MAX_OBJECT, MAX_SENTENCE, JsonObject, Unreadable, truncate
from grpo_kube.objects.resources import ObjectKey

from .names import (
    ANNOTATION_PAUSED,
    ANNOTATION_PLANNED,
    LABEL_JOB,
    LABEL_PREBUILT,
    LABEL_QUEUE,
    LABEL_WORKLOAD_PRIORITY,
)

MAX_CONDITIONS = 32
MAX_UPDATES = 64 * 1024
"""Characters of all that admission checks want of the pods."""
QUOTA_RESERVED, ADMITTED, EVICTED = "QuotaReserved", "Admitted", "Evicted"
PODS_READY, FINISHED, REQUEUED = "PodsReady", "Finished", "Requeued"


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
    """Read them from an object's metadata. MultiKueue's is an annotation since Kueue 0.18, and was
    a label."""
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
    """What an admission check wants of the pods of a role."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where Kueue has put the pods of a role."""

    flavors: tuple[str, ...] = ()
    """Names of ResourceFlavors, each once."""
    by_topology: bool = False
    """True if Kueue's ungater gives each pod its place."""
    updates: tuple[PodSetUpdate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRecord:
    """One Workload. `grpojob_uid` is its controller's uid, empty for one that nobody controls."""

    key: ObjectKey
    job_key: ObjectKey
    uid: str
    version: int
    grpojob_uid: str
    deleting: bool
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

    @property
    def name(self) -> str:
        """Name of the Workload."""
        return self.key.name

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
    meta, spec, status = whole.part("metadata"), whole.part("spec"), whole.part("status")
    namespace, reference = meta.required_text("namespace"), spec.part("priorityClassRef")
    annotations = meta.part("annotations")
    return WorkloadRecord(
        key=ObjectKey(namespace, meta.required_text("name")),
        job_key=ObjectKey(namespace, meta.part("labels").text(LABEL_JOB)),
        uid=meta.required_text("uid"),
        version=meta.digits("resourceVersion"),
        grpojob_uid=next(
            (one.text("uid") for one in meta.parts("ownerReferences") if one.is_true("controller")),
            "",
        ),
        deleting="deletionTimestamp" in meta,
        active="active" not in spec or spec.is_true("active"),
        paused=ANNOTATION_PAUSED in annotations,
        queue=spec.text("queueName"),
        priority_class=(reference.text("kind"), reference.text("name")),
        counts={one.text("name"): one.integer("count") for one in spec.parts("podSets")},
        plan_annotation=annotations.text(ANNOTATION_PLANNED, MAX_OBJECT),
        conditions=_conditions(status),
        has_admission="admission" in status,
        assignments=_assignments(status),
        checks_message=_checks(status),
    )


def reserving_workload(item: object) -> WorkloadRecord:
    """The record of a Workload by its metadata alone: that it is there, and whose it is.

    Raises:
        Unreadable: not even that can be read.
    """
    meta = JsonObject(item).part("metadata")
    own = ("namespace", "name", "uid", "resourceVersion", "labels", "ownerReferences")
    metadata = {field: value for field, value in meta.items() if field in own}
    return workload_record({"metadata": metadata})


def _conditions(status: JsonObject) -> dict[str, WorkloadCondition]:
    found = {one.text("type", MAX_OBJECT): _condition(one) for one in status.parts("conditions")}
    return dict(list(found.items())[:MAX_CONDITIONS])


def _condition(one: JsonObject) -> WorkloadCondition:
    reason, message = one.text("reason", MAX_OBJECT), one.text("message", MAX_OBJECT)
    return WorkloadCondition(
        one.text("status"), truncate(reason, MAX_SENTENCE), truncate(message, MAX_SENTENCE)
    )


def _assignments(status: JsonObject) -> dict[str, Assignment]:
    updates: dict[str, list[PodSetUpdate]] = {}
    for check in status.parts("admissionChecks"):
        for one in check.parts("podSetUpdates"):
            updates.setdefault(one.text("name"), []).append(_update(one))
    if len(repr(updates)) > MAX_UPDATES:
        raise Unreadable(
            f"status.admissionChecks: the podSetUpdates have more than {MAX_UPDATES} characters"
        )
    return {
        one.text("name"): Assignment(
            flavors=tuple(dict.fromkeys(one.string_map("flavors").values())),
            by_topology="topologyAssignment" in one or "delayedTopologyRequest" in one,
            updates=tuple(updates.get(one.text("name"), ())),
        )
        for one in status.part("admission").parts("podSetAssignments")
    }


def _update(one: JsonObject) -> PodSetUpdate:
    tolerations = tuple(dict(found.items()) for found in one.parts("tolerations"))
    return PodSetUpdate(
        one.string_map("labels"),
        one.string_map("annotations"),
        one.string_map("nodeSelector"),
        tolerations,
    )


def _checks(status: JsonObject) -> str:
    waiting = [check for check in status.parts("admissionChecks") if check.text("state") != "Ready"]
    return truncate("; ".join(map(_check_message, waiting)), MAX_SENTENCE)


def _check_message(check: JsonObject) -> str:
    """`name is Pending: message`."""
    state = f"{check.text('name', MAX_OBJECT)} is {check.text('state')}"
    message = check.text("message", MAX_OBJECT)
    return f"{state}: {message}" if message else state
