"""Takes a Snapshot of nodes, pods and priority classes, and shares it for a moment.

Exists so that admission sees foreign pods too without the operator caching every pod of the cluster: one paged LIST on
demand, kept as node, product and requests only. Called by line.py.
"""

import time
from collections.abc import Callable

from ..admission.capacity import Snapshot
from ..admission.inventory import NodeFacts, PodFacts, node_facts, pod_facts
from ..admission.resources import Amounts
from ..errors import Refused
from .client import NODES, PODS, PRIORITY_CLASSES, Cluster, Selection

FRESH_SECONDS = 1.0
RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


class Snapshots:
    """Gives snapshots that are at most FRESH_SECONDS old."""

    def __init__(
        self, cluster: Cluster, namespaces: tuple[str, ...] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`namespaces` are those whose pods can be listed when the whole cluster's can't."""
        self._cluster = cluster
        self._namespaces = namespaces
        self._clock = clock
        self._taken_at = float("-inf")
        self._last = Snapshot()

    async def take(self) -> Snapshot:
        """The cluster now, or a moment ago.

        Raises:
            Unavailable: the API server does not answer.
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
        pods = _Usage()
        visible = await self._pods(pods)
        return Snapshot(nodes, tuple(pods.kept), pods.others, await self._priorities(), visible, problem)

    async def _nodes(self) -> tuple[tuple[NodeFacts, ...], str]:
        try:
            return tuple([node_facts(n) async for page, _ in self._cluster.pages(Selection(NODES)) for n in page]), ""
        except Refused as error:
            return (), f"nodes can't be listed: {error}"

    async def _pods(self, usage: "_Usage") -> bool:
        """Adds up all pods; False when only the watched namespaces' can be seen."""
        try:
            await self._add_up(usage, None)
        except Refused:
            for namespace in self._namespaces:
                await self._add_up(usage, namespace)
            return False
        return True

    async def _add_up(self, usage: "_Usage", namespace: str | None) -> None:
        async for page, _ in self._cluster.pages(Selection(PODS, namespace, fields=RUNNING)):
            for item in page:
                usage.add(pod_facts(item))

    async def _priorities(self) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            async for page, _ in self._cluster.pages(Selection(PRIORITY_CLASSES)):
                for item in page:
                    found[item["metadata"]["name"]] = item["value"]
                    if item.get("globalDefault"):
                        found[""] = item["value"]
        except Refused:
            return {}  # all jobs are then alike, and age alone decides
        return found


class _Usage:
    """Pods that hold GPUs or are ours, one by one; all others summed up by node."""

    def __init__(self) -> None:
        self.kept: list[PodFacts] = []
        self.others: dict[str, Amounts] = {}

    def add(self, pod: PodFacts | None) -> None:
        if pod is None:
            return
        if pod.grpojob_uid or any("/" in resource for resource in pod.takes):
            self.kept.append(pod)
            return
        total = self.others.setdefault(pod.node, {})
        for resource, value in pod.takes.items():
            total[resource] = total.get(resource, 0.0) + value
