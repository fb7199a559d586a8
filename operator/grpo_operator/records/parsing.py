"""API objects → records. Every parser finds a field of a wrong type here, where it costs one object
only."""

import sys
from typing import Any

from grpo_kube.objects.json_reader import (
    MAX_OBJECT,
    MAX_SENTENCE,
    JsonObject,
    reported_time,
    truncate,
)
from grpo_kube.objects.resources import ObjectKey

from .names import (
    COMPONENT_ENGINE,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_UID,
    inheritable_metadata,
)
from .packed_job import has_ended, job_content, pack_job, typed_status, with_queue_name
from .records import ClaimRecord, GRPOJobRecord, JobRecord, PodRecord, PolicyRecord, ServiceRecord
from .terminations import pack_termination as pack_end
from .terminations import pod_termination, trainer_container
from .workloads import kueue_metadata


def object_key(meta: JsonObject) -> ObjectKey:
    """Namespace and name of the object with this metadata; thousands of keys share one text of
    their namespace."""
    return ObjectKey(sys.intern(meta.required_text("namespace")), meta.required_text("name"))


def _job_key(meta: JsonObject) -> ObjectKey:
    return ObjectKey(
        sys.intern(meta.required_text("namespace")), meta.part("labels").text(LABEL_JOB)
    )


def _controller_uid(meta: JsonObject) -> str:
    return next(
        (
            owner.text("uid")
            for owner in meta.parts("ownerReferences")
            if owner.is_true("controller")
        ),
        "",
    )


def grpojob_record(item: object) -> GRPOJobRecord:
    """The record of a GRPOJob.

    Raises:
        Unreadable: a field has a type that it can't have.
        pydantic.ValidationError: the status has values that this version doesn't know (unknown
            fields are ignored).
    """
    whole = JsonObject(item)
    meta, spec, status = whole.part("metadata"), whole.raw("spec"), whole.raw("status")
    known = typed_status(status)
    over, words = has_ended(known), kueue_metadata(meta)
    return GRPOJobRecord(
        key=object_key(meta),
        uid=meta.required_text("uid"),
        version=meta.digits("resourceVersion"),
        generation=meta.integer("generation"),
        created=meta.time("creationTimestamp") or 0.0,
        deleting="deletionTimestamp" in meta,
        labels=inheritable_metadata(meta.string_map("labels")),
        annotations=inheritable_metadata(meta.string_map("annotations")),
        managed_by=whole.part("spec").text("managedBy"),
        kueue=words,
        phase=known.phase or "",
        observed_generation=known.observed_generation,
        ended=over,
        completed=whole.part("status").time("completionTime") or 0.0,
        typed=None if over else with_queue_name(job_content(spec, known), words.queue),
        packed=pack_job(spec, status),
    )


_RESERVES = ("attempt", "attemptStartTime", "conditions", "jobUid", "plan")
"""Fields of a status by which a job's GPUs are promised."""


def reserving_record(item: object) -> GRPOJobRecord:
    """The record of a GRPOJob by what reserves GPUs for it alone, whatever else its status says:
    nobody may act on it.

    Raises:
        Unreadable, pydantic.ValidationError: not even that can be read.
    """
    whole = JsonObject(item)
    status = whole.raw("status")
    reserves = {field: status[field] for field in _RESERVES if field in status}
    return grpojob_record(
        {"metadata": whole.raw("metadata"), "spec": whole.raw("spec"), "status": reserves}
    )


def job_record(item: object) -> JobRecord:
    """The record of a batch/v1 Job.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    over = [one for one in whole.part("status").parts("conditions") if one.text("status") == "True"]
    ended = next((one for one in over if one.text("type") in ("Complete", "Failed")), None)
    return JobRecord(
        key=object_key(meta),
        job_key=_job_key(meta),
        uid=meta.required_text("uid"),
        version=meta.digits("resourceVersion"),
        grpojob_uid=_controller_uid(meta),
        attempt=meta.part("labels").digits(LABEL_ATTEMPT),
        created=meta.time("creationTimestamp") or 0.0,
        deleting="deletionTimestamp" in meta,
        ended=_ended_reason(ended) if ended else "",
        ended_at=reported_time(ended, "lastTransitionTime") if ended else None,
        spent=whole.part("status").text("failedIndexes", MAX_SENTENCE),
    )


def _ended_reason(condition: JsonObject) -> str:
    return condition.text("reason") or condition.text("type")


def _unschedulable(bound: JsonObject) -> str:
    """Return the scheduler's message in the condition PodScheduled; empty unless that is False."""
    if bound.text("status") != "False":
        return ""
    return truncate(bound.text("message", MAX_OBJECT), MAX_SENTENCE)


def _marked_not_ready(status: JsonObject) -> bool:
    """True if the node controller has marked a pod because its kubelet fell silent.

    It turns the status of Ready alone (MarkPodsNotReady); a kubelet gives a reason, such as a
    sidecar that isn't ready.
    """
    ready = status.condition("Ready")
    return ready.text("status") == "False" and not ready.text("reason")


def pod_record(item: object) -> PodRecord:
    """The record of a pod.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta, status = whole.part("metadata"), whole.part("status")
    labels, bound = meta.part("labels"), status.condition("PodScheduled")
    state, node = (
        trainer_container(status).part("state"),
        sys.intern(whole.part("spec").text("nodeName")),
    )
    end = pod_termination(status, labels.digits(LABEL_ATTEMPT), node)
    return PodRecord(
        key=object_key(meta),
        job_key=_job_key(meta),
        uid=meta.required_text("uid"),
        version=meta.digits("resourceVersion"),
        grpojob_uid=labels.text(LABEL_UID),
        controller_uid=_controller_uid(meta),
        attempt=labels.digits(LABEL_ATTEMPT),
        engine=labels.text(LABEL_COMPONENT) == COMPONENT_ENGINE,
        index=labels.digits(LABEL_INDEX),
        node=node,
        ip=status.text("podIP"),
        phase=sys.intern(status.text("phase") or "Pending"),
        waiting=state.part("waiting").reason_and_message(),
        unschedulable=_unschedulable(bound),
        bound_at=reported_time(bound, "lastTransitionTime")
        if bound.text("status") == "True"
        else None,
        node_lost="running" in state and _marked_not_ready(status),
        deleting="deletionTimestamp" in meta,
        end=pack_end(end) if end else None,
    )


def service_record(item: object) -> ServiceRecord:
    """The record of a Service.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    spec = whole.part("spec")
    return ServiceRecord(
        **_shared(whole.part("metadata")),
        selector=spec.string_map("selector"),
        cluster_ip=spec.text("clusterIP"),
        publishes_not_ready=spec.is_true("publishNotReadyAddresses"),
    )


def policy_record(item: object) -> PolicyRecord:
    """The record of a NetworkPolicy.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    return PolicyRecord(**_shared(whole.part("metadata")), spec=whole.raw("spec"))


def _shared(meta: JsonObject) -> dict[str, Any]:
    """The fields of a SharedRecord."""
    key = object_key(meta)
    return {
        "key": key,
        "job_key": ObjectKey(key.namespace, ""),
        "uid": meta.required_text("uid"),
        "version": meta.digits("resourceVersion"),
        "deleting": "deletionTimestamp" in meta,
        "labels": meta.string_map("labels"),
    }


def claim_record(item: object) -> ClaimRecord:
    """The record of a PersistentVolumeClaim.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    meta = JsonObject(item).part("metadata")
    return ClaimRecord(
        key=object_key(meta),
        grpojob_uid=_controller_uid(meta),
        deleting="deletionTimestamp" in meta,
        labels=meta.string_map("labels"),
    )
