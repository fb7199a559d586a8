"""Makes the Workload of a GRPOJob, and computes the changes of an existing Workload and of its
status.

Into a Workload's status the operator writes what Kueue's own jobs write, and nothing of Kueue's
part. The current status goes in, and the changed fields come out for one write. The resourceVersion
guards that write, so a quota reservation that was made meanwhile is never given back.
"""

from dataclasses import dataclass
from typing import Any

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.times import timestamp

from ..pods.manifests import owner_reference
from ..pods.pod_spec import PodDefaults
from ..pods.pod_volumes import Manifest
from ..records.names import (
    ANNOTATION_PAUSED,
    ANNOTATION_PLANNED,
    KUEUE,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_UID,
    MANAGER,
    workload_name,
)
from ..records.records import GRPOJobRecord
from ..records.workloads import ADMITTED, EVICTED, FINISHED, PODS_READY, QUOTA_RESERVED, REQUEUED
from .pod_sets import annotation, pod_sets, shape
from .workload_steps import WORKLOAD_PRIORITY


@dataclass(frozen=True, slots=True)
class Priority:
    """The priority of a Workload: a value, and the class that it comes from."""

    value: int = 0
    kind: str = ""
    name: str = ""

    def fields(self) -> Manifest:
        """As a Workload's spec has it."""
        if not self.name:
            return {"priority": self.value, "priorityClassRef": None}
        group = KUEUE if self.kind == WORKLOAD_PRIORITY else "scheduling.k8s.io"
        reference = {"group": group, "kind": self.kind, "name": self.name}
        return {"priority": self.value, "priorityClassRef": reference}


def labels(job: GRPOJobRecord) -> dict[str, str]:
    """Return the labels by which the operator and the chart's policy recognise a Workload."""
    return {LABEL_MANAGED_BY: MANAGER, LABEL_JOB: job.name, LABEL_UID: job.uid}


def workload(
    job: GRPOJobRecord, plan: ExecutionPlan, priority: Priority, pods: PodDefaults
) -> Manifest:
    """The Workload of a job for a plan.

    Raises:
        ValueError: the job's spec can't be read.
    """
    sets = pod_sets(job.key, job.valid_spec, plan, pods)
    # an object that is created has no fields to unset
    priority_fields = {
        field: value for field, value in priority.fields().items() if value is not None
    }
    planned = annotation(job, plan, shape(sets))
    metadata = {
        "name": workload_name(job.name, job.uid),
        "namespace": job.key.namespace,
        "labels": labels(job),
        "annotations": {ANNOTATION_PLANNED: planned},
        "ownerReferences": [owner_reference(job.name, job.uid)],
    }
    return {
        "apiVersion": f"{KUEUE}/v1beta2",
        "kind": "Workload",
        "metadata": metadata,
        "spec": {"queueName": job.queue_name, "podSets": sets, **priority_fields},
    }


def queue_patch(job: GRPOJobRecord, priority: Priority) -> Manifest:
    """The patch that brings queue and priority up to date."""
    return {"spec": {"queueName": job.queue_name, **priority.fields()}}


def pause_patch(pauses: bool) -> Manifest:
    """The patch that takes it out of its queue, or back in."""
    mark = {ANNOTATION_PAUSED: "true" if pauses else None}
    return {"metadata": {"annotations": mark}, "spec": {"active": not pauses}}


def adoption_patch(job: GRPOJobRecord) -> Manifest:
    """The patch by which a Workload that MultiKueue made becomes this GRPOJob's."""
    owners = [owner_reference(job.name, job.uid)]
    return {"metadata": {"labels": labels(job), "ownerReferences": owners}}


Fields = dict[str, Any]
COMES_BACK = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which the Workload waits at once; else Kueue says when."""
DEACTIVATED = "Deactivated"
"""Kueue requeues by this reason alone, and not by `DeactivatedDueToAdmissionCheck` and its like,
once a Workload is set active again."""
_OURS = (QUOTA_RESERVED, ADMITTED, EVICTED, PODS_READY, FINISHED, REQUEUED, "Preempted")
WAIT_FOR_START, WAIT_FOR_RECOVERY = "WaitForStart", "WaitForRecovery"
"""Kueue's waitForPodsReady has a time limit for each: `timeout` and `recoveryTimeout`."""
MOST_CONDITIONS = 16
"""The definition takes no more."""


def status_without_admission(workload: Fields, now: float) -> Fields:
    """Return the status without its admission, after an eviction."""
    evictions = (each for each in _conditions(workload) if each.get("type") == EVICTED)
    evicted = next(evictions, {})
    reason = str(evicted.get("reason") or EVICTED)
    message = str(evicted.get("message") or "")
    requeues = reason in COMES_BACK
    requeue_reason = DEACTIVATED if reason.startswith(DEACTIVATED) else reason
    states = [
        (QUOTA_RESERVED, False, "Pending", message),
        (ADMITTED, False, "NoReservation", "The workload has no reservation"),
        (PODS_READY, False, WAIT_FOR_START, "Not all pods are ready or succeeded"),
        (REQUEUED, requeues, requeue_reason, message),
    ]
    return {"admission": None, "conditions": _merge_conditions(workload, states, now)}


def readiness_status(workload: Fields, is_ready: bool, now: float) -> Fields:
    """Return the status with all pods ready, or not yet ready again."""
    reason = "Started" if is_ready else WAIT_FOR_RECOVERY
    message = "At least one pod has failed, waiting for recovery"
    if is_ready:
        message = "All pods were ready or succeeded since the workload admission"
    return {
        "conditions": _merge_conditions(workload, [(PODS_READY, is_ready, reason, message)], now)
    }


def finished_status(workload: Fields, succeeded: bool, message: str, now: float) -> Fields:
    """Return the status of a Workload that is done, so that its quota is free."""
    reason = "Succeeded" if succeeded else "Failed"
    state = (FINISHED, True, reason, message)
    return {"conditions": _merge_conditions(workload, [state], now)}


def _conditions(workload: Fields) -> list[Fields]:
    status = workload.get("status") or {}
    conditions = status.get("conditions") or []
    return [condition for condition in conditions if isinstance(condition, dict)]


def _merge_conditions(
    workload: Fields, states: list[tuple[str, bool, str, str]], now: float
) -> list[Fields]:
    """The conditions with these among them; lastTransitionTime moves only with the status.

    Where they would be too many, those give way that others have put beside Kueue's.
    """
    by_type = {str(condition.get("type")): condition for condition in _conditions(workload)}
    generation = workload["metadata"].get("generation", 0)
    for kind, is_true, reason, message in states:
        status = str(is_true)
        before = by_type.get(kind, {})
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        by_type[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since or timestamp(now),
            "observedGeneration": generation,
        }
    ours_first = sorted(by_type, key=lambda kind: kind not in _OURS)
    remaining = ours_first[:MOST_CONDITIONS]
    return [condition for kind, condition in by_type.items() if kind in remaining]
