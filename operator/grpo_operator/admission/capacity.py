"""What is free: a snapshot of the cluster, less what admitted gangs still lack, less what jobs ahead will take.

Admission plays the queue through: each job ahead reserves its nodes before the next is looked at. A Capacity is made
for one pass of the queue and changes only within it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan
from grpo_planner import Inventory, Node

from ..records import GRPOJobRecord
from .inventory import Cards, NodeFacts, PodFacts, planner_node, takers
from .node_fit import lacks, pod_amounts
from .resources import Amounts
from .snapshot import Snapshot
from .suitability import Suitability, Suitable

MOST_HOLDERS = 3
"""Holders that a message names."""
NOT_VISIBLE = "pods of other namespaces can't be seen; whether the gang fits is left to the scheduler"
MEMORY, CPU = "memory", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An attempt that was admitted: what it lacks yet of its plan is nobody else's."""

    job: GRPOJobRecord
    plan: ExecutionPlan
    attempt: int


def claim_of(job: GRPOJobRecord) -> Claim | None:
    """The claim of a job whose attempt was committed."""
    if not job.active or not job.competes:
        return None
    plan = job.status.plan
    if plan is None or not plan.gpus:
        return None
    return Claim(job=job, plan=plan, attempt=job.status.attempt)


class Capacity:
    """The snapshot's nodes with what is taken of each."""

    def __init__(self, snapshot: Snapshot, claims: Iterable[Claim], suitability: Suitability | None = None) -> None:
        """Reserves what the claims' gangs still lack, the widest pods first: these find a node least easily.

        `suitability` is that of the snapshot's nodes, for who makes several of these.
        """
        self._snapshot = snapshot
        self._suitability = suitability or Suitability(snapshot.nodes)
        self._taken: dict[str, Amounts] = {node.name: {} for node in snapshot.nodes}
        self._nodes: dict[str, tuple[Node, ...]] = {}
        self._inventories: dict[Suitable, Inventory] = {}
        self._holders: dict[tuple[Suitable, str, str], dict[str, int]] = {}
        self._pods: dict[str, list[PodFacts]] = {}
        self._reserved: list[PodFacts] = []
        for name, use in snapshot.other_use.items():
            self._take(name, use)
        for pod in snapshot.gpu_pods:
            self._take(pod.node, pod.takes)
            # labels alone are a hint that anybody can set
            if pod.controlled:
                self._pods.setdefault(pod.grpojob_uid, []).append(pod)
        for claim in sorted(claims, key=lambda one: (-one.plan.gpus_per_node, -one.plan.nodes, one.job.uid)):
            self._reserve_missing(claim)

    def _take(self, node: str, use: Amounts, sign: float = 1.0) -> None:
        taken = self._taken.get(node)
        if taken is not None:
            for name, value in use.items():
                taken[name] = taken.get(name, 0.0) + sign * value
            self._nodes.pop(node, None)
            self._inventories.clear()

    def _reserve_missing(self, claim: Claim) -> None:
        """Reserves nodes for the pods that an admitted gang still lacks."""
        job, plan = claim.job, claim.plan
        # pods that are bound take their node already; the gang's others will each go to a node without one of them
        own = (pod for pod in self._pods.get(job.uid, ()) if pod.attempt == str(claim.attempt))
        there = {pod.node for pod in own}
        if plan.nodes <= len(there):
            return
        with self._without_own(job, but=str(claim.attempt)):
            placed = self._place(job, plan, plan.nodes - len(there), there, firm=True)
        self._reserved += [
            PodFacts(
                namespace=job.key.namespace,
                name="",
                node=node,
                takes=use,
                grpojob=job.name,
                grpojob_uid=job.uid,
                attempt=str(claim.attempt),
            )
            for node, use in placed
        ]

    def bound(self, job: GRPOJobRecord) -> bool:
        """Whether any pod of the job has a node."""
        return job.uid in self._pods

    def inventory(self, job: GRPOJobRecord) -> Inventory:
        """What the planner may use for the job. Pods of its own earlier attempts make room for the next."""
        if job.spec is None:
            return Inventory()
        with self._without_own(job):
            return self.usable_by(job.spec, job.status.avoided_nodes)

    @contextmanager
    def _without_own(self, job: GRPOJobRecord, but: str = "") -> Iterator[None]:
        """As if the job's own pods had ended: its next attempt starts then, and must not wait for itself.

        `but`: an attempt whose pods stay.
        """
        own = [pod for pod in self._pods.get(job.uid, ()) if pod.attempt != but]
        for pod in own:
            self._take(pod.node, pod.takes, -1.0)
        try:
            yield
        finally:
            for pod in own:
                self._take(pod.node, pod.takes)

    def usable_by(self, spec: GRPOJobSpec, avoided: Sequence[str] = ()) -> Inventory:
        """The nodes that pods of the spec may be bound to, and a sentence for each GPU node that is left out."""
        return self._inventory(self._suitability.of(spec, avoided))

    def _inventory(self, suitable: Suitable) -> Inventory:
        if suitable not in self._inventories:
            warnings, visible = list(suitable.warnings), self._snapshot.visible
            if self._snapshot.problem:
                warnings.append(self._snapshot.problem)
            if not visible:
                warnings.append(NOT_VISIBLE)
            short = tuple(one for node, found in suitable.short_of_disk for one in self._planner_nodes(node, found))
            self._inventories[suitable] = Inventory(
                tuple(self._seen(suitable)), tuple(warnings), visible, suitable.reports_disk, short
            )
        return self._inventories[suitable]

    def _seen(self, suitable: Suitable) -> Iterator[Node]:
        """What the planner sees of each node."""
        for node, found in suitable.nodes:
            seen = self._planner_nodes(node, found)
            # cards that no pod can be given, since the RDMA beside them is taken, are not free
            if suitable.extra and lacks(node, self._taken[node.name], suitable.extra):
                seen = tuple(replace(one, gpus_free=0) for one in seen)
            yield from seen

    def _planner_nodes(self, node: NodeFacts, found: tuple[Cards, ...]) -> tuple[Node, ...]:
        known = self._nodes.get(node.name)
        if known is None:
            known = tuple(planner_node(node, kind, self._taken[node.name]) for kind in found)
            self._nodes[node.name] = known
        return known

    def reserve(self, job: GRPOJobRecord, plan: ExecutionPlan) -> set[str]:
        """Gives a gang that is ahead in the queue its nodes: free ones now, or the nodes that it waits for."""
        return {name for name, _ in self._place(job, plan, plan.nodes, set())}

    def _place(
        self, job: GRPOJobRecord, plan: ExecutionPlan, pods: int, avoid: set[str], *, firm: bool = False
    ) -> list[tuple[str, Amounts]]:
        """Puts pods on nodes that have room, those with most free GPUs first as the scheduler does, each on a node of
        its own; else on those that they must wait for. Says what was taken where.

        `firm`: these pods come, wherever the scheduler puts them.
        """
        if job.spec is None:
            return []
        use = pod_amounts(job.spec, plan)
        wide = [node for node in self._wide(job, plan) if node.name not in avoid]
        wide.sort(key=lambda node: (not _has_room(node, plan, use), -node.gpus_free, node.name))
        chosen = wide[: max(0, pods)]
        taken = [(node.name, use) for node in chosen]
        for name, amounts in taken:
            self._take(name, amounts)
        if firm:
            found = sum(min(plan.gpus_per_node, node.gpus_free) for node in chosen)
            taken += self._cover(job, plan, pods * plan.gpus_per_node - found)
        return taken

    def _cover(self, job: GRPOJobRecord, plan: ExecutionPlan, missing: int) -> list[tuple[str, Amounts]]:
        """Takes GPUs anywhere for what pods that come lack on their nodes, so that nobody takes these as free.

        However the scheduler has packed the gangs, what was promised is never more than there is.
        """
        taken: list[tuple[str, Amounts]] = []
        for node in self._matching(job, plan):
            part = min(missing, node.gpus_free)
            if part > 0:
                taken.append((node.name, {plan.gpu_resource: float(part)}))
                self._take(*taken[-1])
                missing -= part
        return taken

    def _matching(self, job: GRPOJobRecord, plan: ExecutionPlan) -> list[Node]:
        """The job's nodes that have the plan's GPUs, as they are now."""
        if job.spec is None:
            return []
        return [node for node in self.usable_by(job.spec, job.status.avoided_nodes).nodes if matches(node, plan)]

    def _wide(self, job: GRPOJobRecord, plan: ExecutionPlan) -> list[Node]:
        """Those of them that are large enough for one of its pods, whatever runs there."""
        return [node for node in self._matching(job, plan) if node.gpus_total >= plan.gpus_per_node]

    def fits(self, job: GRPOJobRecord, plan: ExecutionPlan) -> bool:
        """Whether a plan that is fixed already fits what is free; where that can't be seen, the scheduler decides."""
        if job.spec is None:
            return False
        use, inventory = pod_amounts(job.spec, plan), self.inventory(job)
        whole = sum(matches(node, plan) and _has_room(node, plan, use) for node in inventory.nodes)
        return whole >= plan.nodes or not inventory.visible

    def possible(self, job: GRPOJobRecord, plan: ExecutionPlan) -> bool:
        """Whether a plan that is fixed already fits the nodes that there are, whatever runs on them."""
        return sum(node.count for node in self._wide(job, plan)) >= plan.nodes

    def shortage(self, job: GRPOJobRecord, plan: ExecutionPlan) -> str:
        """`needs 8 × NVIDIA-H100-80GB-HBM3 on 1 node; 6 free, 2 held by team-a/run-7`."""
        free = sum(node.gpus_free for node in self.inventory(job).nodes if matches(node, plan))
        held = self._held(job, plan)
        holders = [f"{count} held by {holder}" for holder, count in list(held.items())[:MOST_HOLDERS]]
        if len(held) > MOST_HOLDERS:
            holders.append(f"{sum(list(held.values())[MOST_HOLDERS:])} by {len(held) - MOST_HOLDERS} others")
        where = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes"
        product = plan.gpu_product or plan.gpu_resource
        return f"needs {plan.gpus} × {product} on {where}; {', '.join([f'{free} free', *holders])}"

    def _held(self, job: GRPOJobRecord, plan: ExecutionPlan) -> dict[str, int]:
        """GPUs on the job's nodes by holder, the job itself left out."""
        if job.spec is None:
            return {}
        suitable = self._suitability.of(job.spec, job.status.avoided_nodes)
        key = (suitable, plan.gpu_resource, plan.gpu_product)
        if key not in self._holders:
            names = {node.name for node in self._inventory(suitable).nodes if matches(node, plan)}
            pods = (pod for pod in (*self._snapshot.gpu_pods, *self._reserved) if pod.node in names)
            self._holders[key] = takers(pods, plan.gpu_resource)
        return {holder: count for holder, count in self._holders[key].items() if holder != str(job.key)}


def matches(node: Node, plan: ExecutionPlan) -> bool:
    """Whether the node has the plan's GPUs."""
    return node.gpu_resource == plan.gpu_resource and node.gpu_product == plan.gpu_product


def _has_room(node: Node, plan: ExecutionPlan, use: Amounts) -> bool:
    """Whether one pod of the plan could be bound to the node now."""
    if node.gpus_free < plan.gpus_per_node:
        return False
    return node.host_memory_free >= use.get(MEMORY, 0.0) and node.cpu_free >= use.get(CPU, 0.0)
