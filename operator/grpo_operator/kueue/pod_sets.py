"""The podSets of a Workload: one for each role of the gang, as the plan has them, all or none.

Quota and place depend on a part of each pod only; its digest tells whether a Workload still stands for a plan.
"""

import hashlib
import json
from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan

from ..names import ANNOTATIONS_TOPOLOGY, KUEUE, LABEL_INDEX, ObjectKey
from ..pod_defaults import PodDefaults
from ..pod_volumes import Manifest
from ..podspec import pod_spec
from ..roles import Role, roles
from ..workloads import WorkloadRecord

_REQUIRED, _PREFERRED, _UNCONSTRAINED = ANNOTATIONS_TOPOLOGY
_SLICE, _SLICE_SIZE = f"{KUEUE}/podset-slice-required-topology", f"{KUEUE}/podset-slice-size"
_GROUP = f"{KUEUE}/podset-group-name"
"""Annotations of a pod template by which users ask for a place in a topology, or for slices of one."""
_COUNTED = ("nodeSelector", "affinity", "tolerations", "runtimeClassName")


def pod_sets(key: ObjectKey, spec: GRPOJobSpec, plan: ExecutionPlan, pods: PodDefaults) -> list[Manifest]:
    """The podSets of a plan, in the order in which the roles are started."""
    return [_pod_set(key, role, pods) for role in roles(spec, plan)]


def _pod_set(key: ObjectKey, role: Role, pods: PodDefaults) -> Manifest:
    """One role. What differs between attempts, its labels and nodes to keep away from, is left out."""
    metadata = role.spec.pod_template.metadata
    return {
        "name": role.component,
        "count": role.plan.nodes,
        "template": {
            "metadata": {"labels": dict(metadata.labels), "annotations": dict(metadata.annotations)},
            "spec": pod_spec(key.name, role, {}, pods),
        },
        "topologyRequest": _topology_request(metadata.annotations) | {"podIndexLabel": LABEL_INDEX},
    }


def _topology_request(asked: dict[str, str]) -> Manifest:
    """What the annotations ask for, as Kueue reads them of Jobs: the first that is there, and slices beside it."""
    found: Manifest = {}
    if _REQUIRED in asked:
        found["required"] = asked[_REQUIRED]
    elif _PREFERRED in asked:
        found["preferred"] = asked[_PREFERRED]
    elif _UNCONSTRAINED in asked:
        found["unconstrained"] = asked[_UNCONSTRAINED] == "true"
    if _SLICE in asked and asked.get(_SLICE_SIZE, "").isdecimal():
        found |= {"podSetSliceRequiredTopology": asked[_SLICE], "podSetSliceSize": int(asked[_SLICE_SIZE])}
    if _GROUP in asked and {"required", "preferred"} & found.keys():
        found["podSetGroupName"] = asked[_GROUP]
    return found


def shape(sets: list[Manifest]) -> str:
    """A digest of all by which quota is counted and a place is found."""
    text = json.dumps([_counted(one) for one in sets], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _counted(one: Manifest) -> list[Any]:
    pod: Manifest = one["template"]["spec"]
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    requests = [(container.get("resources"), container.get("restartPolicy")) for container in containers]
    return [one["name"], one["count"], one["topologyRequest"], requests, *(pod.get(field) for field in _COUNTED)]


def stands_for(workload: WorkloadRecord, sets: list[Manifest], known_shape: str) -> bool:
    """True if a Workload, made for podSets of that shape (empty: not known), asks for these ones."""
    if workload.counts != {one["name"]: one["count"] for one in sets}:
        return False
    return known_shape in ("", shape(sets))
