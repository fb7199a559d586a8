"""Kinds of objects with their paths, keys and selections, and the merge patch of two objects."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .json_reader import MAX_NAME, JsonObject


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The RFC 7396 merge patch that turns `old` into `new`; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        old_value = old.get(key)
        if isinstance(value, dict) and isinstance(old_value, dict):
            if inner := merge_patch(old_value, value):
                patch[key] = inner
        elif old_value != value:
            patch[key] = value
    return patch


class ObjectKey(NamedTuple):
    """Namespace and name of an object: the key of caches and work queues."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """`namespace/name`, for messages and logs."""
        return f"{self.namespace}/{self.name}"


Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object by its path: `base` such as `/apis/batch/v1`, `plural` such as `jobs`."""

    base: str
    plural: str

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The URL path of an object, of a namespace's objects, or of all."""
        middle = f"/namespaces/{namespace}" if namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{self.base}{middle}/{self.plural}{tail}"


JOBS = Resource("/apis/batch/v1", "jobs")
PODS = Resource("/api/v1", "pods")
SERVICES = Resource("/api/v1", "services")
CONFIG_MAPS = Resource("/api/v1", "configmaps")
CLAIMS = Resource("/api/v1", "persistentvolumeclaims")
NETWORK_POLICIES = Resource("/apis/networking.k8s.io/v1", "networkpolicies")
EVENTS = Resource("/api/v1", "events")
NODES = Resource("/api/v1", "nodes")
NAMESPACES = Resource("/api/v1", "namespaces")
QUOTAS = Resource("/api/v1", "resourcequotas")
SERVICE_ACCOUNTS = Resource("/api/v1", "serviceaccounts")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
PRIORITY_CLASSES = Resource("/apis/scheduling.k8s.io/v1", "priorityclasses")
STORAGE_CLASSES = Resource("/apis/storage.k8s.io/v1", "storageclasses")

LIVE_PODS = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of the pods that have not ended."""
BOUND_PODS = f"spec.nodeName!=,{LIVE_PODS}"
"""Of those among them that take something of a node."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a resource: of one namespace or all, by labels and fields."""

    resource: Resource
    namespace: str | None = None
    labels: str = ""
    fields: str = ""

    def __str__(self) -> str:
        """`pods of namespace team-a`, for messages."""
        return (
            f"{self.resource.plural} of "
            f"{f'namespace {self.namespace}' if self.namespace else 'all namespaces'}"
        )

    def query(self, **more: str | int) -> dict[str, str]:
        """The URL query."""
        parameters: Mapping[str, str | int] = {
            "labelSelector": self.labels,
            "fieldSelector": self.fields,
            **more,
        }
        return {key: str(value) for key, value in parameters.items() if value}


def identity(item: object) -> ObjectKey:
    """Return namespace and name of any object; `?` for a part that can't be read."""
    # The object may be anything; its name is needed all the same, to set it aside and to report it.
    meta = item.get("metadata") if isinstance(item, dict) else None
    named: dict[str, Any] = meta if isinstance(meta, dict) else {}
    namespace, name = named.get("namespace") or "?", named.get("name") or "?"
    return ObjectKey(str(namespace)[:MAX_NAME], str(name)[:MAX_NAME])


def object_key(meta: JsonObject) -> ObjectKey:
    """Namespace and name of the object with this metadata; the namespace's text is shared."""
    namespace = sys.intern(meta.required_text("namespace"))
    return ObjectKey(namespace, meta.required_text("name"))


def controller(meta: JsonObject) -> JsonObject:
    """The reference to the controlling owner in this metadata; empty without one."""
    owners = (owner for owner in meta.parts("ownerReferences") if owner.is_true("controller"))
    return next(owners, JsonObject(None))


def controller_uid(meta: JsonObject) -> str:
    """uid of the controlling owner in this metadata; empty without one."""
    return controller(meta).text("uid")
