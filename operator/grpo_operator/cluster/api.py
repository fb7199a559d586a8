"""What the operator may ask of the API server: resources, selections and the narrow Cluster protocol.

Everything that needs the cluster is written against the protocol, so that tests put scripts in its place; HttpCluster
is the real one.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from grpo_api.contract import GROUP, LEADER_PLURAL, PLURAL, VERSION

from ..errors import Expired
from ..names import KUEUE
from ..slices import Slices

Object = dict[str, Any]
T = TypeVar("T")
LIST_TRIES = 3


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


GRPOJOBS = Resource(f"/apis/{GROUP}/{VERSION}", PLURAL)
JOBS = Resource("/apis/batch/v1", "jobs")
PODS = Resource("/api/v1", "pods")
SERVICES = Resource("/api/v1", "services")
CLAIMS = Resource("/api/v1", "persistentvolumeclaims")
NETWORK_POLICIES = Resource("/apis/networking.k8s.io/v1", "networkpolicies")
SECRETS = Resource("/api/v1", "secrets")
EVENTS = Resource("/api/v1", "events")
NODES = Resource("/api/v1", "nodes")
QUOTAS = Resource("/api/v1", "resourcequotas")
SERVICE_ACCOUNTS = Resource("/api/v1", "serviceaccounts")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
LEADERS = Resource(f"/apis/{GROUP}/{VERSION}", LEADER_PLURAL)
WORKLOADS = Resource(f"/apis/{KUEUE}/v1beta2", "workloads")
RESOURCE_FLAVORS = Resource(WORKLOADS.base, "resourceflavors")
WORKLOAD_PRIORITIES = Resource(WORKLOADS.base, "workloadpriorityclasses")
PRIORITY_CLASSES = Resource("/apis/scheduling.k8s.io/v1", "priorityclasses")

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
        return f"{self.resource.plural} of {f'namespace {self.namespace}' if self.namespace else 'all namespaces'}"

    def query(self, **more: str | int) -> dict[str, str]:
        """The URL query."""
        given: Mapping[str, str | int] = {"labelSelector": self.labels, "fieldSelector": self.fields, **more}
        return {key: str(value) for key, value in given.items() if value}


class Seen(Protocol):
    """An object as it was looked at: what is deleted must be that, and not what has become of it since."""

    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


class Cluster(Protocol):
    """What the operator may ask of a cluster. Every method raises ClusterError or one of its kinds."""

    def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """A LIST in pages, each with the list's resourceVersion; Expired when it took longer than pages are kept."""
        ...

    def watch(self, selection: Selection, version: int, seconds: float) -> AsyncIterator[tuple[str, Object]]:
        """Events since a resourceVersion, as (type, object), for at most so long."""
        ...

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object."""
        ...

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """POST; returns the object as the server keeps it."""
        ...

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, subresource: str = ""
    ) -> Object:
        """Merge-patches an object, or a subresource of it."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, seen: Seen) -> None:
        """Deletes an object in the background, if it still is as it was seen; one that is gone is fine.

        Conflict when it has changed since, or the name is another's by now.
        """
        ...

    async def delete_all(self, selection: Selection) -> None:
        """Deletes what is selected: by uid and attempt, so that one that comes late meets nothing else."""
        ...


async def each_listed(
    cluster: Cluster, selection: Selection, begin: Callable[[], None], take: Callable[[Object], None]
) -> int:
    """Pass every object of a full LIST to `take`, page by page and a slice at a time; return the resourceVersion.

    A LIST whose pages expire under way is started again. `begin` is called before each start, so that half a list never
    passes for a whole one.

    Raises:
        ClusterError: the API server does not give a whole list.
    """
    for attempt in range(1, LIST_TRIES + 1):
        version = 0
        begin()
        try:
            async for items, listed_at in cluster.pages(selection):
                await _in_slices(items, take)
                version = listed_at
        except Expired:
            if attempt == LIST_TRIES:
                raise
        else:
            return version
    raise AssertionError("the last try returns or raises")


async def _in_slices(items: list[Object], take: Callable[[Object], None]) -> None:
    """Lets everybody else run after each slice of time, and frees what was taken."""
    # Popped from the end, so that each object is freed once it was read: a page of objects is kept nowhere else.
    slices = Slices()
    items.reverse()
    while items:
        take(items.pop())
        await slices.pause()


async def listed(cluster: Cluster, selection: Selection, read: Callable[[Object], T | None]) -> tuple[list[T], int]:
    """What `read` makes of every object of a full LIST (None leaves one out), and the list's resourceVersion.

    Raises:
        ClusterError: the API server does not give a whole list.
    """
    found: list[T] = []

    def take(item: Object) -> None:
        record = read(item)
        if record is not None:
            found.append(record)

    version = await each_listed(cluster, selection, found.clear, take)
    return found, version
