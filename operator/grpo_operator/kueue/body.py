"""The Workload of a GRPOJob, as it is created, and what of one that is there is changed."""

from dataclasses import dataclass

from grpo_api.plan import ExecutionPlan

from ..manifests import owner_reference
from ..names import (
    ANNOTATION_PAUSED,
    ANNOTATION_PLANNED,
    KUEUE,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_UID,
    MANAGER,
    workload_name,
)
from ..pod_defaults import PodDefaults
from ..pod_volumes import Manifest
from ..records import GRPOJobRecord
from .planned import annotation
from .pod_sets import pod_sets, shape
from .steps import WORKLOAD_PRIORITY


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
        return {
            "priority": self.value,
            "priorityClassRef": {"group": group, "kind": self.kind, "name": self.name},
        }


def labels(job: GRPOJobRecord) -> dict[str, str]:
    """Return the labels by which the operator and the chart's policy recognise a Workload."""
    return {LABEL_MANAGED_BY: MANAGER, LABEL_JOB: job.name, LABEL_UID: job.uid}


def workload(job: GRPOJobRecord, plan: ExecutionPlan, priority: Priority, pods: PodDefaults) -> Manifest:
    """The Workload of a job for a plan.

    Raises:
        ValueError: the job's spec can't be read.
    """
    if job.spec is None:
        raise ValueError(f"{job.key} has no valid spec")
    sets = pod_sets(job.key, job.spec, plan, pods)
    # an object that is created has no fields to unset
    priority_fields = {field: value for field, value in priority.fields().items() if value is not None}
    return {
        "apiVersion": f"{KUEUE}/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job.name, job.uid),
            "namespace": job.key.namespace,
            "labels": labels(job),
            "annotations": {ANNOTATION_PLANNED: annotation(job, plan, shape(sets))},
            "ownerReferences": [owner_reference(job.name, job.uid)],
        },
        "spec": {"queueName": job.queue_name, "podSets": sets, **priority_fields},
    }


def amended(job: GRPOJobRecord, priority: Priority) -> Manifest:
    """The patch that brings queue and priority up to date."""
    return {"spec": {"queueName": job.queue_name, **priority.fields()}}


def paused(pauses: bool) -> Manifest:
    """The patch that takes it out of its queue, or back in."""
    mark = {ANNOTATION_PAUSED: "true" if pauses else None}
    return {"metadata": {"annotations": mark}, "spec": {"active": not pauses}}


def adopted(job: GRPOJobRecord) -> Manifest:
    """The patch by which a Workload that MultiKueue made becomes this GRPOJob's."""
    return {"metadata": {"labels": labels(job), "ownerReferences": [owner_reference(job.name, job.uid)]}}
