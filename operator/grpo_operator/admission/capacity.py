"""What is free: a snapshot of the cluster, less what admitted gangs still lack, less what jobs ahead will take.

Admission plays the queue through: each job ahead reserves its nodes before the next is looked at. A Capacity is made
for one pass of the queue and changes only within it.
"""

from collections.abc import Iterable
from dataclasses import replace

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan
from grpo_planner import Inventory, Node

from ..records import GRPOJobRecord
from .inventory import Cards, PodFacts, cards, left_out, planner_node, takers
from .node_fit import extra_amounts, lacks, pod_amounts, unfit
from .resources import Amounts
from .snapshot import Snapshot

MOST_HOLDERS = 3
"""Holders that a message names."""


class Capacity:
    """The snapshot's nodes with what is taken of each."""

    def __init__(self, snapshot: Snapshot, jobs: Iterable[GRPOJobRecord]) -> None:
        """Takes the reservations of active jobs among `jobs` into account: the pods that they still lack."""
        self._snapshot = snapshot
        self._cards: dict[str, tuple[list[Cards], list[str]]] = {node.name: cards(node) for node in snapshot.nodes}
        self._taken: dict[str, Amounts] = {node.name: {} for node in snapshot.nodes}
        self._reserved: list[PodFacts] = []
        for name, use in snapshot.other_use.items():
            self._take(name, use)
        for pod in snapshot.gpu_pods:
            self._take(pod.node, pod.takes)
        for job in jobs:
            self._reserve_missing(job)

    def _take(self, node: str, use: Amounts, sign: float = 1.0) -> None:
        taken = self._taken.get(node)
        if taken is not None:
            for name, value in use.items():
                taken[name] = taken.get(name, 0.0) + sign * value

    def _reserve_missing(self, job: GRPOJobRecord) -> None:
        """Reserves nodes for the pods that an admitted gang still lacks."""
        spec, plan = job.spec, job.status.plan
        if spec is None or plan is None or not plan.gpus or not job.active or job.queue_name:
            return
        attempt = str(job.status.attempt)
        # pods that are bound take their node already; the gang's others will each go to a node without one of them
        there = {p.node for p in self._snapshot.gpu_pods if (p.grpojob_uid, p.attempt) == (job.uid, attempt)}
        placed = self._place(spec, plan, plan.nodes - len(there), there)
        use = pod_amounts(spec, plan)
        self._reserved += [
            PodFacts(
                namespace=job.key.namespace,
                name="",
                node=node,
                takes=use,
                grpojob=job.name,
                grpojob_uid=job.uid,
                attempt=attempt,
            )
            for node in placed
        ]

    def inventory(self, job: GRPOJobRecord) -> Inventory:
        """What the planner may use for the job. Pods of its own earlier attempts make room for the next."""
        if job.spec is None:
            return Inventory()
        # its next attempt starts when these have ended, so that they must not make it wait for itself
        own = [pod for pod in self._snapshot.gpu_pods if pod.grpojob_uid == job.uid]
        for pod in own:
            self._take(pod.node, pod.takes, -1.0)
        found = self.usable_by(job.spec)
        for pod in own:
            self._take(pod.node, pod.takes)
        return found

    def usable_by(self, spec: GRPOJobSpec) -> Inventory:
        """The nodes that pods of the spec may be bound to, and a sentence for each GPU node that is left out."""
        nodes, warnings = self._nodes(spec)
        if self._snapshot.problem:
            warnings.append(self._snapshot.problem)
        if not self._snapshot.visible:
            warnings.append("pods of other namespaces can't be seen; whether the gang fits is left to the scheduler")
        return Inventory(tuple(nodes), tuple(warnings), self._snapshot.visible)

    def _nodes(self, spec: GRPOJobSpec) -> tuple[list[Node], list[str]]:
        nodes: list[Node] = []
        warnings: list[str] = []
        extra = extra_amounts(spec)
        for node in self._snapshot.nodes:
            found, said = self._cards[node.name]
            if not (found or said):
                continue
            if why := left_out(node, spec.placement) or unfit(node, spec, extra):
                warnings.append(f"node {node.name}: left out, {why}")
                continue
            warnings += said
            # cards that no pod can be given, since the RDMA beside them is taken, are not free
            seen = [planner_node(node, kind, self._taken[node.name]) for kind in found]
            nodes += [replace(one, gpus_free=0) for one in seen] if lacks(node, self._taken[node.name], extra) else seen
        return nodes, warnings

    def reserve(self, job: GRPOJobRecord, plan: ExecutionPlan) -> None:
        """Gives a gang that is ahead in the queue its nodes: free ones now, or the nodes that it waits for."""
        if job.spec:
            self._place(job.spec, plan, plan.nodes, set())

    def _place(self, spec: GRPOJobSpec, plan: ExecutionPlan, pods: int, avoid: set[str]) -> list[str]:
        """Puts pods on the nodes with most free GPUs, as the scheduler does, each on a node of its own; says where."""
        use = pod_amounts(spec, plan)
        choice = sorted(
            (-node.gpus_free, node.name)
            for node in self._nodes(spec)[0]
            if node.name not in avoid and matches(node, plan) and node.gpus_total >= plan.gpus_per_node
        )
        placed = [name for _, name in choice[: max(0, pods)]]
        for name in placed:
            self._take(name, use)
        return placed

    def shortage(self, job: GRPOJobRecord, plan: ExecutionPlan) -> str:
        """`needs 8 × NVIDIA-H100-80GB-HBM3 on 1 node; 6 free, 2 held by team-a/run-7`."""
        nodes = [node for node in self.inventory(job).nodes if matches(node, plan)]
        free, names = sum(node.gpus_free for node in nodes), {node.name for node in nodes}
        pods = (*self._snapshot.gpu_pods, *self._reserved)
        held = takers((p for p in pods if p.node in names and p.grpojob_uid != job.uid), plan.gpu_resource)
        holders = [f"{count} held by {holder}" for holder, count in list(held.items())[:MOST_HOLDERS]]
        if len(held) > MOST_HOLDERS:
            holders.append(f"{sum(list(held.values())[MOST_HOLDERS:])} by {len(held) - MOST_HOLDERS} others")
        where = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes"
        product = plan.gpu_product or plan.gpu_resource
        return f"needs {plan.gpus} × {product} on {where}; {', '.join([f'{free} free', *holders])}"


def matches(node: Node, plan: ExecutionPlan) -> bool:
    """Whether the node has the plan's GPUs."""
    return node.gpu_resource == plan.gpu_resource and node.gpu_product == plan.gpu_product


def fits(inventory: Inventory, plan: ExecutionPlan) -> bool:
    """Whether a plan that is fixed already fits what is free."""
    whole = sum(n.count for n in inventory.nodes if matches(n, plan) and n.gpus_free >= plan.gpus_per_node)
    return whole >= plan.nodes or not inventory.visible
