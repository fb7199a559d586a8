"""API objects → records. A field of a wrong type is found here and costs one object only."""

import sys
from dataclasses import replace

from grpo_api.text.contract import CONTAINER
from grpo_kube.objects.json_reader import (
    MAX_OBJECT,
    MAX_SENTENCE,
    JsonObject,
    reported_time,
    truncate,
)
from grpo_kube.objects.resources import ObjectKey, controller, controller_uid, object_key

from .names import (
    ANNOTATION_DIGEST,
    ANNOTATION_SPEC,
    ANNOTATION_WORKLOAD,
    COMPONENT_ENGINE,
    COMPONENT_PREFLIGHT,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_CONTROLLER,
    LABEL_INDEX,
    LABEL_UID,
    attempt_of_job,
    grpojob_of_job,
    inheritable_metadata,
    is_engines_job,
)
from .packed_job import has_ended, job_content, pack_job, typed_status, with_queue_name
from .records import (
    CREATION_REASONS,
    ClaimRecord,
    GRPOJobRecord,
    JobRecord,
    PodRecord,
    SharedRecord,
)
from .terminations import pack_termination, pod_termination, preflight_report, trainer_container
from .workloads import child_fields, kueue_metadata, object_fields


def grpojob_record(item: object) -> GRPOJobRecord:
    """The record of a GRPOJob.

    Raises:
        Unreadable: a field has a type that it can't have.
        pydantic.ValidationError: the status has values that this version doesn't know (unknown
            fields are ignored).
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    spec = whole.raw("spec")
    raw_status = whole.raw("status")
    status = typed_status(raw_status)
    is_finished = has_ended(status)
    kueue = kueue_metadata(meta)
    content = None if is_finished else with_queue_name(job_content(spec, status), kueue.queue)
    return GRPOJobRecord(
        **object_fields(meta),
        generation=meta.integer("generation"),
        created=meta.time("creationTimestamp") or 0.0,
        orphans_pods="orphan" in meta.strings("finalizers"),
        labels=inheritable_metadata(meta.string_map("labels")),
        annotations=inheritable_metadata(meta.string_map("annotations")),
        managed_by=whole.part("spec").text("managedBy"),
        kueue=kueue,
        phase=status.phase or "",
        observed_generation=status.observed_generation,
        is_finished=is_finished,
        completed=whole.part("status").time("completionTime") or 0.0,
        typed=content,
        packed=pack_job(spec, raw_status),
    )


_RESERVES = ("attempt", "attemptStartTime", "conditions", "jobUid", "plan")
"""Fields of a status by which a job's GPUs are promised."""


def reserving_record(item: object) -> GRPOJobRecord:
    """A record of only what reserves GPUs for a GRPOJob that can't be read: no decision may use it
    for more.

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
    """The record of a batch/v1 Job, which is known by its owner and its name: others may take its
    labels away.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    fields = child_fields(meta)
    if owner := controller(meta).text("name"):
        fields["job_key"] = ObjectKey(fields["key"].namespace, owner)
    annotations = meta.part("annotations")
    template = whole.part("spec").part("template").part("metadata")
    status = whole.part("status")
    end = _end_condition(status)
    reason = end.text("reason") or end.text("type") if end else ""
    ended_at = reported_time(end, "lastTransitionTime") if end else None
    return JobRecord(
        **fields,
        grpojob_uid=controller_uid(meta),
        attempt=attempt_of_job(fields["key"].name, fields["job_key"].name),
        created=meta.time("creationTimestamp") or 0.0,
        ended=reason,
        ended_at=ended_at,
        spent=status.text("failedIndexes", MAX_SENTENCE),
        suspended=whole.part("spec").is_true("suspend"),
        digest=annotations.text(ANNOTATION_DIGEST),
        spec_version=annotations.text(ANNOTATION_SPEC),
        workload=template.part("annotations").text(ANNOTATION_WORKLOAD),
    )


def _end_condition(status: JsonObject) -> JsonObject | None:
    """The condition by which a Job has completed or failed; None before that."""
    for kind in ("Complete", "Failed"):
        condition = status.condition(kind)
        if condition.text("status") == "True":
            return condition
    return None


def _unschedulable(scheduled: JsonObject) -> str:
    """Return the scheduler's message in the condition PodScheduled; empty unless that is False."""
    if scheduled.text("status") != "False":
        return ""
    message = scheduled.text("message", MAX_OBJECT)
    return truncate(message, MAX_SENTENCE)


def _disruption(status: JsonObject) -> str:
    """Why the cluster ends a pod, in its condition DisruptionTarget; empty unless that is True."""
    target = status.condition("DisruptionTarget")
    return target.reason_and_message() if target.text("status") == "True" else ""


def _marked_not_ready(status: JsonObject) -> bool:
    """True if the node controller has marked a pod because its kubelet fell silent.

    It turns the status of Ready alone (MarkPodsNotReady); a kubelet gives a reason, such as a
    sidecar that isn't ready.
    """
    ready = status.condition("Ready")
    return ready.text("status") == "False" and not ready.text("reason")


_IMAGE_REASONS = ("ErrImage", "ImagePull", "InvalidImageName", "ImageInspect", "Registry")
"""How the kubelet's reasons begin for a container whose image it can't get."""


def _waiting(status: JsonObject, state: JsonObject) -> tuple[str, JsonObject]:
    """The first container that keeps the pod from starting, as the beginning of a sentence, and how
    it waits; an empty object when none does."""
    for container in status.parts("initContainerStatuses"):
        waiting = container.part("state").part("waiting")
        if waiting.text("reason", MAX_OBJECT) not in ("", "PodInitializing"):
            return f"init container {container.text('name')}: ", waiting
    return "", state.part("waiting")


def _running_init_container(whole: JsonObject) -> str:
    """The init container that the others wait for; a sidecar does not count."""
    containers = whole.part("spec").parts("initContainers")
    sidecars = {
        container.text("name")
        for container in containers
        if container.text("restartPolicy") == "Always"
    }
    for container in whole.part("status").parts("initContainerStatuses"):
        name = container.text("name")
        if "running" in container.part("state") and name not in sidecars:
            return name
    return ""


def _do_others_run(status: JsonObject) -> bool:
    """True if another container than the trainer's runs; sidecars of Kubernetes don't count, since
    the kubelet ends them."""
    return any(
        container.text("name") != CONTAINER and "running" in container.part("state")
        for container in status.parts("containerStatuses")
    )


def _start_stage(status: JsonObject, waiting: JsonObject) -> str:
    """What the kubelet does for a pod that has its node and a container that waits; empty for one
    whose container it can't create, such as without a Secret."""
    reason = waiting.text("reason", MAX_OBJECT)
    if reason.startswith(_IMAGE_REASONS):
        return "PullingImage"
    if reason not in CREATION_REASONS:
        return ""
    has_sandbox = status.condition("PodReadyToStartContainers").text("status") == "True"
    return "PullingImage" if has_sandbox else "Mounting"


def pod_record(item: object) -> PodRecord:
    """The record of a pod, whose Job's name says more than labels, which others may change.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    labels = meta.part("labels")
    fields = child_fields(meta)
    maker = controller(meta).text("name")
    if not fields["job_key"].name:
        fields["job_key"] = ObjectKey(fields["key"].namespace, grpojob_of_job(maker))
    attempt = attempt_of_job(maker, fields["job_key"].name) or labels.digits(LABEL_ATTEMPT)
    is_engine = is_engines_job(maker) or labels.text(LABEL_COMPONENT) == COMPONENT_ENGINE
    is_preflight = labels.text(LABEL_COMPONENT) == COMPONENT_PREFLIGHT
    node = sys.intern(whole.part("spec").text("nodeName"))
    status = whole.part("status")
    scheduled = status.condition("PodScheduled")
    is_bound = scheduled.text("status") == "True"
    bound_at = reported_time(scheduled, "lastTransitionTime") if is_bound else None
    state = trainer_container(status).part("state")
    end = pod_termination(status, attempt, node)
    init_container = _running_init_container(whole)
    subject, waiting = _waiting(status, state)
    return PodRecord(
        **fields,
        grpojob_uid=labels.text(LABEL_UID),
        controller_uid=controller_uid(meta),
        made_by_job=LABEL_CONTROLLER in labels,
        attempt=attempt,
        engine=is_engine,
        index=labels.digits(LABEL_INDEX),
        node=node,
        ip=status.text("podIP"),
        phase=sys.intern(status.text("phase") or "Pending"),
        waiting=f"{subject}{waiting.reason_and_message()}",
        start_stage="" if init_container else _start_stage(status, waiting),
        init_container=init_container,
        unschedulable=_unschedulable(scheduled),
        disruption=_disruption(status),
        bound_at=bound_at,
        node_lost="running" in state and _marked_not_ready(status),
        end=pack_termination(end) if end else None,
        others_run=_do_others_run(status),
        report=preflight_report(state) if is_preflight else None,
    )


_SERVICE_FIELDS = ("clusterIP", "publishNotReadyAddresses", "selector")


def service_record(item: object) -> SharedRecord:
    """The record of a Service.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    record = policy_record(item)
    spec = {field: value for field, value in record.spec.items() if field in _SERVICE_FIELDS}
    return replace(record, spec=spec)


def policy_record(item: object) -> SharedRecord:
    """The record of a NetworkPolicy.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    return SharedRecord(
        **object_fields(meta),
        job_key=ObjectKey(object_key(meta).namespace, ""),
        labels=meta.string_map("labels"),
        spec=whole.raw("spec"),
    )


def claim_record(item: object) -> ClaimRecord:
    """The record of a PersistentVolumeClaim.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    meta = JsonObject(item).part("metadata")
    return ClaimRecord(
        key=object_key(meta),
        grpojob_uid=controller_uid(meta),
        deleting="deletionTimestamp" in meta,
        labels=meta.string_map("labels"),
    )
