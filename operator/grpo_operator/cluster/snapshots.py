"""Takes a Snapshot of nodes, pods and priority classes by LISTs, and shares it for a moment.

Admission must see foreign pods too, and the operator must not cache every pod of the cluster: each is kept as node,
product and requests only. What can't be listed is no reason to think that it is empty: only a plain "forbidden" goes
on without, and says so; after any other error there is no snapshot, and nobody is admitted.
"""

from collections.abc import Callable
from typing import TypeVar

from ..admission.inventory import NodeFacts, PodFacts, node_facts, pod_facts
from ..admission.resources import Amounts
from ..admission.snapshot import Snapshot
from ..errors import Forbidden
from ..untyped import Part
from .api import LIVE_PODS, NODES, PODS, PRIORITY_CLASSES, Cluster, Object, Selection
from .unreadable import Unreadables, list_readable

T = TypeVar("T")
FRESH_SECONDS = 1.0


class Snapshots:
    """Gives snapshots that are at most FRESH_SECONDS old."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        """`namespaces` are those whose pods can be listed when the whole cluster's can't; `clock` gives seconds."""
        self._cluster = cluster
        self.unreadables = Unreadables()
        self._clock = clock
        self._namespaces = namespaces
        self._taken_at = float("-inf")
        self._last = Snapshot()

    async def take(self) -> Snapshot:
        """The cluster now, or a moment ago.

        Raises:
            ClusterError: nodes or pods can't be listed, other than by a lasting lack of rights.
        """
        if self._clock() - self._taken_at > FRESH_SECONDS:
            self._last = await self._fresh()
            self._taken_at = self._clock()
        return self._last

    def expire(self) -> None:
        """Something was freed: the next one is taken anew."""
        self._taken_at = float("-inf")

    async def _fresh(self) -> Snapshot:
        nodes, problem = await self._nodes()
        pods, visible = await self._pods()
        kept, others = _split(pods)
        return Snapshot(
            nodes=nodes,
            gpu_pods=kept,
            other_use=others,
            priorities=await self._priorities(),
            visible=visible,
            problem=problem,
        )

    async def _nodes(self) -> tuple[tuple[NodeFacts, ...], str]:
        try:
            found = await self._listed(Selection(NODES), node_facts)
        except Forbidden as error:
            return (), f"nodes can't be listed: {error}"
        return tuple(found), ""

    async def _pods(self) -> tuple[list[PodFacts], bool]:
        """All pods that take something of a node; False when only the watched namespaces' can be seen."""
        try:
            return await self._pods_of(None), True
        except Forbidden:
            return [pod for namespace in self._namespaces for pod in await self._pods_of(namespace)], False

    async def _pods_of(self, namespace: str | None) -> list[PodFacts]:
        """The pods of one namespace, or of all; a namespace that is not served has none."""
        try:
            found = await self._listed(Selection(PODS, namespace, fields=LIVE_PODS), pod_facts)
        except Forbidden:
            if namespace is None:
                raise
            return []
        return [pod for pod in found if pod]

    async def _priorities(self) -> dict[str, int]:
        try:
            found = await self._listed(Selection(PRIORITY_CLASSES), _priority)
        except Forbidden:
            return {}  # all jobs are then alike, and age alone decides
        return {name: value for pairs in found for name, value in pairs.items()}

    async def _listed(self, selection: Selection, parse: Callable[[Object], T]) -> list[T]:
        """What `parse` makes of a full LIST; objects that it can't read are set aside."""
        plural = selection.resource.plural

        def read(item: Object) -> tuple[T] | None:
            return self.unreadables.read(plural, lambda known: (parse(known),), item)

        found, unread, _ = await list_readable(self._cluster, selection, read)
        self.unreadables.keep(plural, unread, selection.namespace)
        return [record for (record,) in found]


def _priority(item: Object) -> dict[str, int]:
    """Value by name of a PriorityClass; the cluster's default has the empty name, too."""
    whole = Part(item)
    value = whole.integer("value")
    return {whole.part("metadata").required("name"): value} | ({"": value} if whole.flag("globalDefault") else {})


def _split(pods: list[PodFacts]) -> tuple[tuple[PodFacts, ...], dict[str, Amounts]]:
    """Pods that have GPUs or are ours, one by one; what all others take, summed up by node."""
    kept: list[PodFacts] = []
    others: dict[str, Amounts] = {}
    for pod in pods:
        if pod.grpojob_uid or any("/" in resource for resource in pod.takes):
            kept.append(pod)
            continue
        total = others.setdefault(pod.node, {})
        for resource, value in pod.takes.items():
            total[resource] = total.get(resource, 0.0) + value
    return tuple(kept), others
