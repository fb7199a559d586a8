"""Merges Kueue's assignment into an attempt's Job: where its flavors are, and what admission checks want of its pods.

What two of them say differently of the same label can't be meant; the pods' own words, by which they are found again,
are nobody's to change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..names import ANNOTATION_WORKLOAD, ANNOTATIONS_TOPOLOGY, LABEL_COMPONENT, LABEL_POD_SET, TOPOLOGY_GATE
from ..pod_volumes import Manifest
from ..workloads import Assignment, WorkloadRecord


class Contradiction(ValueError):
    """Two that may say where pods go contradict each other."""


@dataclass(frozen=True, slots=True)
class Flavor:
    """What a ResourceFlavor says of its nodes."""

    name: str
    node_labels: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]


def placed(job: Manifest, workload: WorkloadRecord, flavors: Iterable[Flavor]) -> Manifest:
    """The Job of a role as Kueue wants it; `flavors` are those of its assignment.

    Raises:
        Contradiction: they say different things of one label.
    """
    template: Manifest = job["spec"]["template"]
    role = template["metadata"]["labels"][LABEL_COMPONENT]
    assignment = workload.assignments.get(role, Assignment())
    metadata, pod = dict(template["metadata"]), dict(template["spec"])
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    selector, tolerations = pod.get("nodeSelector", {}), list(pod.get("tolerations", ()))
    for flavor in flavors:
        selector = _joined(selector, flavor.node_labels, f"nodeSelector and ResourceFlavor {flavor.name}")
        tolerations += [one for one in flavor.tolerations if one not in tolerations]
    for update in assignment.updates:
        labels = _joined(labels, update.labels, "labels and an admission check")
        annotations = _joined(annotations, update.annotations, "annotations and an admission check")
        selector = _joined(selector, update.node_selector, "nodeSelector and an admission check")
        tolerations += [one for one in update.tolerations if one not in tolerations]
    labels = {**labels, LABEL_POD_SET: role}
    annotations = {**annotations, ANNOTATION_WORKLOAD: workload.name}
    if assignment.by_topology:
        if annotations.keys().isdisjoint(ANNOTATIONS_TOPOLOGY):
            # the ungater looks for pods with one of these
            annotations[ANNOTATIONS_TOPOLOGY[-1]] = "true"
        pod["schedulingGates"] = [{"name": TOPOLOGY_GATE}]
    metadata |= {"labels": labels, "annotations": annotations}
    pod |= {"tolerations": tolerations} | ({"nodeSelector": selector} if selector else {})
    return {**job, "spec": {**job["spec"], "template": {"metadata": metadata, "spec": pod}}}


def _joined(known: Mapping[str, str], more: Mapping[str, str], who: str) -> dict[str, str]:
    for key, value in more.items():
        if known.get(key, value) != value:
            raise Contradiction(f"the pods' {who} disagree on {key}: {known[key]} and {value}")
    return {**known, **more}
