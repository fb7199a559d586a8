"""Reads from a pod's status why its kubelet evicted it: the node or the pod ran short of memory or
disk.

Such an end is not the cluster's whim. The same pod, started again, runs short again, unlike one
that was preempted or drained. The kubelet writes the cause as text alone, in the formats of
pkg/kubelet/eviction/helpers.go (Kubernetes 1.36), so other texts count as another cause.
"""

import re
from dataclasses import dataclass

from grpo_api.report.report import MemoryShortage, Outcome, Result
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.text.contract import CONTAINER
from grpo_api.text.quantity import MAX_COUNT, quantity_bytes
from grpo_kube.objects.json_reader import MAX_OBJECT, JsonObject, truncate

EVICTED = "Evicted"
"""The pod's reason after any eviction by its kubelet."""
MAX_MESSAGE = 1024
"""Characters of the kubelet's message that are kept: it names every container over its request."""
_LOW = re.compile(r"The node was low on resource: ([a-z-]{1,32})\. ")
_CONTAINER_USAGE = re.compile(
    rf"Container {CONTAINER} was using ([0-9A-Za-z.]{{1,32}}), request is "
)
_POD_USAGE = re.compile(r"Pod [-a-z0-9.]{1,253} was using ([0-9A-Za-z.]{1,32}), request is ")
_VOLUME = re.compile(r'Usage of EmptyDir volume "([-a-z0-9]{1,63})" exceeds the limit ')
_STORAGE_LIMITS = (
    " exceeded its local ephemeral storage limit ",
    "Pod ephemeral local storage usage exceeds the total limit of containers ",
)
_DISK_RESOURCES = ("ephemeral-storage", "inodes")


@dataclass(frozen=True, slots=True)
class Eviction:
    """A shortage for which a kubelet evicted a pod."""

    result: Result
    """OutOfMemory or OutOfDisk."""
    message: str
    """The kubelet's words, and the field to raise where one is certain."""
    used_bytes: int = 0
    """Memory that the training container used; 0 where the kubelet did not say."""

    def outcome(self, before: Outcome) -> Outcome:
        """The outcome of an evicted pod: how far `before` says that it was, with this cause."""
        shortage = None
        if self.result is Result.OUT_OF_MEMORY:
            shortage = MemoryShortage(memory="Host", allocated_bytes=self.used_bytes)
        changes = {"result": self.result, "shortage": shortage}
        return truncate_to_fit(before.model_copy(update=changes), self.message)


def eviction_of(status: JsonObject) -> Eviction | None:
    """The shortage for which a pod was evicted; None for every other end.

    A pod that a node with pressure refused was not evicted: it never ran, and its scheduler finds
    it another node.
    """
    if status.text("reason") != EVICTED:
        return None
    message = truncate(status.text("message", MAX_OBJECT).strip(), MAX_MESSAGE)
    low_resource = _LOW.search(message + " ")
    resource = low_resource[1] if low_resource else ""
    if resource == "memory":
        why = f"the kubelet evicted the pod for memory: {message}"
        return Eviction(Result.OUT_OF_MEMORY, why, _used_bytes(message))
    if resource in _DISK_RESOURCES:
        why = (
            f"the kubelet evicted the pod for disk: {message} Raise "
            "spec.resources.requests.ephemeral-storage, so that it gets a node with more"
        )
        return Eviction(Result.OUT_OF_DISK, why)
    if field := _exceeded_limit(message):
        why = f"the kubelet evicted the pod for disk: {message} Raise {field}"
        return Eviction(Result.OUT_OF_DISK, why)
    return None


def _exceeded_limit(message: str) -> str:
    """The field with the limit of disk that the pod exceeded; empty for another cause."""
    if volume := _VOLUME.search(message):
        return f"emptyDir.sizeLimit of the volume {volume[1]} in spec.podTemplate.spec.volumes"
    if any(text in message for text in _STORAGE_LIMITS):
        return "spec.resources.limits.ephemeral-storage"
    return ""


def _used_bytes(message: str) -> int:
    """Memory of the training container, or of the pod if only that is said; else 0."""
    usage = _CONTAINER_USAGE.search(message) or _POD_USAGE.search(message)
    if usage is None:
        return 0
    try:
        return min(MAX_COUNT, quantity_bytes(usage[1]))
    except ValueError:
        return 0
