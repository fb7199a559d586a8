"""Makes the podSets of a Workload, stores the plan that they were made for, and merges Kueue's
assignment into the Job.

There is one podSet for each role of the gang, as the plan has them, and Kueue admits all or none.
Quota and placement depend on a part of each pod only. The digest of that part shows whether a
Workload still fits a plan.

The plan is in an annotation of the Workload, because a job may wait for long. A plan made later, on
other nodes, could have another shape and would cost the job its place in the queue. So the plan
stays with the Workload until the spec changes, or until the job runs out of memory with it.

Kueue's assignment says where the flavors are, and what admission checks want of the pods. Two
sources that give one label different values are an error. The labels by which the operator finds
its pods never change.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.resources import ObjectKey

from ..pods.pod_spec import PodDefaults, pod_spec
from ..pods.pod_volumes import Manifest
from ..pods.roles import Role, roles
from ..records.names import (
    ANNOTATION_WORKLOAD,
    ANNOTATIONS_TOPOLOGY,
    KUEUE,
    LABEL_COMPONENT,
    LABEL_INDEX,
    LABEL_POD_SET,
    TOPOLOGY_GATE,
)
from ..records.records import GRPOJobRecord
from ..records.workloads import Assignment, PodSetUpdate, WorkloadRecord

_REQUIRED, _PREFERRED, _UNCONSTRAINED = ANNOTATIONS_TOPOLOGY
_SLICE, _SLICE_SIZE = f"{KUEUE}/podset-slice-required-topology", f"{KUEUE}/podset-slice-size"
_GROUP = f"{KUEUE}/podset-group-name"
"""Annotations of a pod template that ask for a place in a topology, or for slices of one."""
_COUNTED = ("nodeSelector", "affinity", "tolerations", "runtimeClassName")


def pod_sets(
    key: ObjectKey, spec: GRPOJobSpec, plan: ExecutionPlan, pods: PodDefaults
) -> list[Manifest]:
    """The podSets of a plan, in the order in which the roles are started."""
    return [_pod_set(key, role, pods) for role in roles(spec, plan)]


def _pod_set(key: ObjectKey, role: Role, pods: PodDefaults) -> Manifest:
    """One role, without what differs between attempts: labels and nodes to avoid."""
    metadata = role.spec.pod_template.metadata
    template = {
        "metadata": {"labels": dict(metadata.labels), "annotations": dict(metadata.annotations)},
        "spec": pod_spec(key.name, role, {}, pods),
    }
    topology_request = _topology_request(metadata.annotations)
    topology_request["podIndexLabel"] = LABEL_INDEX
    return {
        "name": role.component,
        "count": role.plan.nodes,
        "template": template,
        "topologyRequest": topology_request,
    }


def _topology_request(annotations: dict[str, str]) -> Manifest:
    """What the annotations ask for, as Kueue reads them of Jobs: the first, and slices."""
    request: Manifest = {}
    if _REQUIRED in annotations:
        request["required"] = annotations[_REQUIRED]
    elif _PREFERRED in annotations:
        request["preferred"] = annotations[_PREFERRED]
    elif _UNCONSTRAINED in annotations:
        request["unconstrained"] = annotations[_UNCONSTRAINED] == "true"
    slice_size = annotations.get(_SLICE_SIZE, "")
    if _SLICE in annotations and slice_size.isdecimal():
        request["podSetSliceRequiredTopology"] = annotations[_SLICE]
        request["podSetSliceSize"] = int(slice_size)
    if _GROUP in annotations and {"required", "preferred"} & request.keys():
        request["podSetGroupName"] = annotations[_GROUP]
    return request


def shape(sets: list[Manifest]) -> str:
    """A digest of all by which quota is counted and a place is found."""
    counted_parts = [_counted_part(pod_set) for pod_set in sets]
    text = json.dumps(counted_parts, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest[:16]


def _counted_part(pod_set: Manifest) -> list[Any]:
    pod: Manifest = pod_set["template"]["spec"]
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    requests = [
        (container.get("resources"), container.get("restartPolicy")) for container in containers
    ]
    fields = [pod.get(field) for field in _COUNTED]
    return [pod_set["name"], pod_set["count"], pod_set["topologyRequest"], requests, *fields]


def is_made_for(workload: WorkloadRecord, sets: list[Manifest], known_shape: str) -> bool:
    """True if a Workload, made for podSets of that shape (empty: unknown), asks for these."""
    counts = {pod_set["name"]: pod_set["count"] for pod_set in sets}
    if workload.counts != counts:
        return False
    return known_shape in ("", shape(sets))


class PlanAnnotation(BaseModel):
    """The content of the annotation."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    attempt: int
    """Attempts that the job had had."""
    generation: int
    """The spec that was planned."""
    shape: str
    """See pod_sets.shape."""
    plan: ExecutionPlan


def plan_of_workload(workload: WorkloadRecord | None) -> PlanAnnotation | None:
    """The plan that a Workload was made for; None if its annotation can't be read."""
    if workload is None or not workload.plan_annotation:
        return None
    try:
        return PlanAnnotation.model_validate_json(workload.plan_annotation)
    except ValidationError:
        return None


def annotation(job: GRPOJobRecord, plan: ExecutionPlan, shape: str) -> str:
    """The annotation of a Workload that is made now."""
    planned = PlanAnnotation(
        attempt=job.status.attempt, generation=job.generation, shape=shape, plan=plan
    )
    return planned.model_dump_json(by_alias=True, exclude_none=True)


def planned_for(job: GRPOJobRecord, workload: WorkloadRecord | None) -> ExecutionPlan | None:
    """The plan by which the job waits or last ran by its Workload; None if it needs another."""
    planned = plan_of_workload(workload)
    if planned is None:
        return None
    # what MultiKueue made is of the other cluster's object, whose generation is another
    if not job.kueue.prebuilt and planned.generation != job.generation:
        return None
    status = job.status
    if planned.attempt >= status.attempt:
        return planned.plan
    learned = status.learned
    if learned and learned.has_failed_plan_of(status.attempt):
        return None
    # of the same shape as the one that the Workload was made for, and by now maybe the answer to a
    # shortfall
    return status.plan


class Contradiction(ValueError):
    """Two that may say where pods go contradict each other."""


def place_job(job: Manifest, workload: WorkloadRecord, flavors: Iterable[PodSetUpdate]) -> Manifest:
    """The Job of a role as Kueue wants it; `flavors` say where those of its assignment are.

    Raises:
        Contradiction: they say different things of one label.
    """
    template: Manifest = job["spec"]["template"]
    role = template["metadata"]["labels"][LABEL_COMPONENT]
    assignment = workload.assignments.get(role, Assignment())
    metadata = dict(template["metadata"])
    labels = metadata.get("labels", {})
    annotations = metadata.get("annotations", {})
    pod = dict(template["spec"])
    selector = pod.get("nodeSelector", {})
    tolerations = list(pod.get("tolerations", ()))
    for update in (*flavors, *assignment.updates):
        source = update.source
        labels = _merge_entries(labels, update.labels, f"labels and {source}")
        annotations = _merge_entries(annotations, update.annotations, f"annotations and {source}")
        selector = _merge_entries(selector, update.node_selector, f"nodeSelector and {source}")
        tolerations += [
            toleration for toleration in update.tolerations if toleration not in tolerations
        ]
    labels = {**labels, LABEL_POD_SET: role}
    annotations = {**annotations, ANNOTATION_WORKLOAD: workload.name}
    if assignment.by_topology:
        if annotations.keys().isdisjoint(ANNOTATIONS_TOPOLOGY):
            # the ungater looks for pods with one of these
            annotations[ANNOTATIONS_TOPOLOGY[-1]] = "true"
        pod["schedulingGates"] = [{"name": TOPOLOGY_GATE}]
    metadata |= {"labels": labels, "annotations": annotations}
    pod["tolerations"] = tolerations
    if selector:
        pod["nodeSelector"] = selector
    spec = {**job["spec"], "template": {"metadata": metadata, "spec": pod}}
    return {**job, "spec": spec}


def _merge_entries(entries: Mapping[str, str], more: Mapping[str, str], who: str) -> dict[str, str]:
    for key, value in more.items():
        if entries.get(key, value) != value:
            raise Contradiction(f"the pods' {who} disagree on {key}: {entries[key]} and {value}")
    return {**entries, **more}
