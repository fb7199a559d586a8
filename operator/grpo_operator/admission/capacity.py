"""Computes which GPUs are free: a snapshot of the cluster, minus what admitted gangs and jobs ahead
still need.

Admission plays the queue through: each job ahead reserves its nodes before the next job is
considered. A Capacity is made for one cycle of the queue and changes only within it. How many pods
a node has room for follows from what the roles of a gang request. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.run_policy import PlacementSpec
from grpo_planner.hardware.inventory import Inventory, Node, declared_inventory
from grpo_planner.result.formatting import plural

from ..pods.roles import Role, roles
from ..records.records import GRPOJobRecord
from .inventory import Amounts, Cards, NodeFacts, PodFacts, planner_node, takers, thousandths
from .node_fit import CPU, MEMORY, Suitability, Suitable, amount_message, is_short_of, pod_amounts
from .snapshot import Snapshot

MOST_HOLDERS = 3
"""Holders that a message names."""
NOT_VISIBLE = (
    "pods of other namespaces can't be seen; whether the gang fits is left to the scheduler"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An admitted attempt: the GPUs of its plan that it does not hold yet stay reserved."""

    job: GRPOJobRecord
    plan: ExecutionPlan
    attempt: int


def claim_of(job: GRPOJobRecord) -> Claim | None:
    """The claim of a job whose attempt was committed."""
    if not job.is_active or not job.is_competing:
        return None
    plan = job.status.plan
    if plan is None or not plan.gpus:
        return None
    return Claim(job=job, plan=plan, attempt=job.status.attempt)


class Capacity:
    """The snapshot's nodes with what is taken of each."""

    def __init__(
        self, snapshot: Snapshot, claims: Iterable[Claim], suitability: Suitability | None = None
    ) -> None:
        """Reserves what the claims' gangs still lack, the widest pods first: these find a node
        least easily.

        `suitability` is that of the snapshot's nodes. Pass it when making several of these for
        one snapshot.
        """
        self._snapshot = snapshot
        self._suitability = suitability or Suitability(snapshot.nodes)
        self._allocated_by_node: dict[str, Amounts] = {node.name: {} for node in snapshot.nodes}
        self._nodes: dict[str, tuple[Node, ...]] = {}
        self._inventories: dict[Suitable, Inventory] = {}
        self._holders: dict[tuple[Suitable, str, str], dict[str, int]] = {}
        self._pods: dict[str, list[PodFacts]] = {}
        self._reserved: list[PodFacts] = []
        for name, use in snapshot.other_use.items():
            self._allocate(name, use)
        for pod in snapshot.gpu_pods:
            self._allocate(pod.node, pod.takes)
            # labels alone are a hint that anybody can set
            if pod.controlled:
                self._pods.setdefault(pod.grpojob_uid, []).append(pod)
        self.add_claims(claims)

    def add_claims(self, claims: Iterable[Claim]) -> None:
        """Reserve what the claims' gangs lack."""
        claimed_roles: list[tuple[Claim, Role]] = []
        for claim in claims:
            claimed_roles += [(claim, role) for role in gpu_roles(claim.job, claim.plan)]
        for claim, role in sorted(claimed_roles, key=_widest_first):
            self._reserve_missing(claim, role)
        self._holders.clear()

    def _allocate(self, node: str, use: Amounts, sign: float = 1.0) -> None:
        # A pod may be bound to a node that the snapshot does not have (yet, or any more).
        allocated_resources = self._allocated_by_node.get(node)
        if allocated_resources is not None:
            for name, value in use.items():
                before = allocated_resources.get(name, 0.0)
                allocated_resources[name] = before + sign * value
            self._nodes.pop(node, None)
            self._inventories.clear()

    def _reserve_missing(self, claim: Claim, role: Role) -> None:
        """Reserves nodes for the pods of a role that an admitted gang still lacks."""
        job = claim.job
        attempt = str(claim.attempt)
        job_pods = self._pods.get(job.uid, ())
        attempt_pods = [pod for pod in job_pods if pod.attempt == attempt]
        nodes_of_pods = [pod.node for pod in attempt_pods if pod.engine == role.is_engines]
        # pods that are bound take their node already; ranks will each go to a node without one of
        # them
        if role.is_engines:
            avoid = set[str]()
            missing = role.plan.nodes - len(nodes_of_pods)
        else:
            avoid = set(nodes_of_pods)
            missing = role.plan.nodes - len(avoid)
        if missing <= 0:
            return
        with self._without_own(job, but=attempt):
            placements = self._place(job, role, missing, avoid, firm=True)
        for node, use in placements:
            reserved = PodFacts(
                namespace=job.key.namespace,
                name="",
                node=node,
                takes=use,
                grpojob=job.name,
                grpojob_uid=job.uid,
                attempt=attempt,
                engine=role.is_engines,
            )
            self._reserved.append(reserved)

    def has_bound_pod(self, job: GRPOJobRecord) -> bool:
        """True if any pod of the job has a node."""
        return job.uid in self._pods

    def inventory(self, job: GRPOJobRecord) -> Inventory:
        """The nodes and GPUs for a plan of the job. Those of its earlier attempts count as free."""
        with self._without_own(job):
            return self.usable_by(job.valid_spec, job.status.avoided_nodes)

    @contextmanager
    def _without_own(self, job: GRPOJobRecord, but: str = "") -> Iterator[None]:
        """As if the job's own pods had ended: its next attempt starts then, and must not wait for
        itself.

        `but`: an attempt whose pods stay.
        """
        job_pods = self._pods.get(job.uid, ())
        ending_pods = [pod for pod in job_pods if pod.attempt != but]
        for pod in ending_pods:
            self._allocate(pod.node, pod.takes, -1.0)
        try:
            yield
        finally:
            for pod in ending_pods:
                self._allocate(pod.node, pod.takes)

    def usable_by(self, spec: GRPOJobSpec, avoided: Sequence[str] = ()) -> Inventory:
        """The nodes for pods of the spec, and a sentence for each GPU node left out."""
        suitable = self._suitability.suitable_nodes(spec, avoided)
        return self._inventory(suitable).with_prices(spec.platform.gpu_hour_prices)

    def _inventory(self, suitable: Suitable) -> Inventory:
        # Kept until something is taken: jobs that ask the same of nodes are judged one after the
        # other.
        known_inventory = self._inventories.get(suitable)
        if known_inventory is not None:
            return known_inventory
        visible = self._snapshot.visible
        warnings = list(suitable.warnings)
        if self._snapshot.problem:
            warnings.append(self._snapshot.problem)
        if not visible:
            warnings.append(NOT_VISIBLE)
        short_of_disk: list[Node] = []
        for node, node_cards in suitable.short_of_disk:
            short_of_disk += self._planner_nodes(node, node_cards)
        nodes = tuple(self._usable_nodes(suitable))
        inventory = Inventory(
            nodes, tuple(warnings), visible, suitable.reports_disk, tuple(short_of_disk)
        )
        self._inventories[suitable] = inventory
        return inventory

    def _usable_nodes(self, suitable: Suitable) -> Iterator[Node]:
        """What the planner sees of each node."""
        for node, node_cards in suitable.nodes:
            planner_nodes = self._planner_nodes(node, node_cards)
            # cards that no pod can be given, since the RDMA beside them is taken, are not free
            allocated_resources = self._allocated_by_node[node.name]
            if suitable.extra and is_short_of(node, allocated_resources, suitable.extra):
                planner_nodes = tuple(replace(node, gpus_free=0) for node in planner_nodes)
            yield from planner_nodes

    def _planner_nodes(self, node: NodeFacts, node_cards: tuple[Cards, ...]) -> tuple[Node, ...]:
        planner_nodes = self._nodes.get(node.name)
        if planner_nodes is None:
            allocated_resources = self._allocated_by_node[node.name]
            planner_nodes = tuple(
                planner_node(node, kind, allocated_resources) for kind in node_cards
            )
            self._nodes[node.name] = planner_nodes
        return planner_nodes

    def reserve(self, job: GRPOJobRecord, plan: ExecutionPlan) -> set[str]:
        """Give a gang that is ahead in the queue its nodes: free ones, or those it waits for."""
        reserved_nodes: set[str] = set()
        for role in gpu_roles(job, plan):
            placements = self._place(job, role, role.plan.nodes, set())
            reserved_nodes |= {node for node, _ in placements}
        return reserved_nodes

    def _place(
        self, job: GRPOJobRecord, role: Role, pods: int, avoid: set[str], *, firm: bool = False
    ) -> list[tuple[str, Amounts]]:
        """Puts pods of a role on nodes that have room, those with most free GPUs first as the
        scheduler does; else on those that they must wait for. Says what was taken where.

        `firm`: these pods come, wherever the scheduler puts them.
        """
        use = pod_amounts(role.spec, role.plan)
        width = role.plan.gpus_per_node
        most = self._most_pods_per_node(role)
        wide = [node for node in self._wide_nodes(job, role) if node.name not in avoid]
        room_now = {node.name: min(most, rooms(node, role, use)) for node in wide}
        wide.sort(key=lambda node: (not room_now[node.name], -node.gpus_free, node.name))
        placements: list[tuple[str, Amounts]] = []
        gpus_found = 0
        for node in wide:
            missing = pods - len(placements)
            count = min(missing, room_now[node.name])
            placements += [(node.name, use)] * count
            gpus_found += count * width
        # The rest waits for GPUs that others hold now; what is free beside them on these nodes is
        # found as well.
        for node in wide:
            room = room_now[node.name]
            room_later = min(most, node.gpus_total // width) - room
            missing = pods - len(placements)
            count = max(0, min(missing, room_later))
            placements += [(node.name, use)] * count
            free_beside = max(0, node.gpus_free - room * width)
            gpus_found += min(count * width, free_beside)
        for name, amounts in placements:
            self._allocate(name, amounts)
        if firm:
            gpus_missing = pods * width - gpus_found
            placements += self._cover_shortfall(job, role, gpus_missing)
        return placements

    def _most_pods_per_node(self, role: Role) -> int:
        """Most pods of the role on one node. Ranks never share a node. Engines share one only if
        they request nothing but GPUs, memory and cores."""
        if not role.is_engines or self._suitable_for(role).extra:
            return 1
        return role.plan.nodes

    def _cover_shortfall(
        self, job: GRPOJobRecord, role: Role, missing: int
    ) -> list[tuple[str, Amounts]]:
        """Reserve free GPUs on any nodes for pending pods that no longer fit on theirs, so that
        these GPUs do not count as free.

        However the scheduler has packed the gangs, what was promised is never more than there is.
        """
        covered_by: list[tuple[str, Amounts]] = []
        for node in self._matching_nodes(job, role):
            part = min(missing, node.gpus_free)
            if part > 0:
                use = {role.plan.gpu_resource: float(part)}
                covered_by.append((node.name, use))
                self._allocate(node.name, use)
                missing -= part
        return covered_by

    def _suitable_for(self, role: Role, avoided: Sequence[str] = ()) -> Suitable:
        """Nodes that pods of the role may be bound to."""
        return self._suitability.suitable_nodes(role.spec, avoided, disk=not role.is_engines)

    def _matching_nodes(self, job: GRPOJobRecord, role: Role) -> list[Node]:
        """The job's nodes that have the role's GPUs, as they are now."""
        suitable = self._suitable_for(role, job.status.avoided_nodes)
        inventory = self._inventory(suitable)
        return [node for node in inventory.nodes if has_gpus_for(node, role.plan)]

    def _wide_nodes(self, job: GRPOJobRecord, role: Role) -> list[Node]:
        """The nodes of `_matching_nodes` that are large enough for one pod of the role, ignoring
        what runs there."""
        width = role.plan.gpus_per_node
        return [node for node in self._matching_nodes(job, role) if node.gpus_total >= width]

    def has_room_now(self, job: GRPOJobRecord, plan: ExecutionPlan) -> bool:
        """True if a plan that is fixed already fits what is free, all of its roles together; where
        that can't be seen, the scheduler decides."""
        if not self._snapshot.visible:
            return True
        # The roles are placed one after the other, since each takes nodes that the next may have
        # wanted.
        wanted = gpu_roles(job, plan)
        with self._without_own(job), self._temporary_allocations() as allocations:
            for role, next_role in zip_longest(wanted, wanted[1:]):
                nodes = role.plan.nodes
                if self._pods_with_room_now(job, role) < nodes:
                    return False
                # What the last role leaves is not read, and taking it would count every node
                # again.
                if next_role:
                    placements = self._place(job, role, nodes, set())
                    allocations.extend(placements)
        return True

    def _pods_with_room_now(self, job: GRPOJobRecord, role: Role) -> int:
        """Pods of the role that fit what is free."""
        use = pod_amounts(role.spec, role.plan)
        most = self._most_pods_per_node(role)
        return sum(min(most, rooms(node, role, use)) for node in self._wide_nodes(job, role))

    @contextmanager
    def _temporary_allocations(self) -> Iterator[list[tuple[str, Amounts]]]:
        """Gives back what was taken, and put into the list, in between."""
        allocations: list[tuple[str, Amounts]] = []
        try:
            yield allocations
        finally:
            for name, amounts in allocations:
                self._allocate(name, amounts, -1.0)

    def has_nodes_for(self, job: GRPOJobRecord, plan: ExecutionPlan) -> bool:
        """True if a fixed plan fits the nodes that there are, whatever runs on them."""
        return all(self._could_hold(job, role) >= role.plan.nodes for role in gpu_roles(job, plan))

    def _could_hold(self, job: GRPOJobRecord, role: Role) -> int:
        """Pods of the role for which the nodes are large enough."""
        most = self._most_pods_per_node(role)
        width = role.plan.gpus_per_node
        pods = 0
        for node in self._wide_nodes(job, role):
            pods += node.count * min(most, node.gpus_total // width)
        return pods

    def shortage(self, job: GRPOJobRecord, plan: ExecutionPlan) -> str:
        """`needs 8 × NVIDIA-H100-80GB-HBM3 on 1 node; 4 free, 2 held by team-a/run-7, 2 held in
        other namespaces`, and the same of engines.

        Where enough GPUs are free, and still a pod has no room, it says what a pod needs.
        """
        needed_roles = gpu_roles(job, plan)
        with self._without_own(job):
            return ", and ".join(self._shortage_of_role(job, role) for role in needed_roles)

    def _shortage_of_role(self, job: GRPOJobRecord, role: Role) -> str:
        plan = role.plan
        free = sum(node.gpus_free for node in self._matching_nodes(job, role))
        gpus_by_holder = self._gpus_by_holder(job, role)
        # Names of other namespaces' jobs and pods are not for this job's users.
        own = f"{job.key.namespace}/"
        holders = [item for item in gpus_by_holder.items() if item[0].startswith(own)]
        foreign = sum(gpus_by_holder.values()) - sum(count for _, count in holders)
        biggest = holders[:MOST_HOLDERS]
        others = holders[MOST_HOLDERS:]
        parts = [f"{free} free"]
        if free >= plan.gpus and self._pods_with_room_now(job, role) < plan.nodes:
            parts = [f"{free} free, but too few nodes have {pod_needs_message(role)} free together"]
        parts += [f"{count} held by {holder}" for holder, count in biggest]
        if others:
            total = sum(count for _, count in others)
            parts.append(f"{total} by {len(others)} others")
        if foreign:
            parts.append(f"{foreign} held in other namespaces")
        preposition, noun = ("for", "engine") if role.is_engines else ("on", "node")
        product = plan.gpu_product or plan.gpu_resource
        need = f"needs {plan.gpus} × {product} {preposition} {plural(plan.nodes, noun)}"
        available = ", ".join(parts)
        return f"{need}; {available}"

    def _gpus_by_holder(self, job: GRPOJobRecord, role: Role) -> dict[str, int]:
        """GPUs on the role's nodes by holder, the job itself left out."""
        suitable = self._suitable_for(role, job.status.avoided_nodes)
        resource = role.plan.gpu_resource
        key = (suitable, resource, role.plan.gpu_product)
        holders = self._holders.get(key)
        if holders is None:
            names = {node.name for node in self._matching_nodes(job, role)}
            all_pods = (*self._snapshot.gpu_pods, *self._reserved)
            holders = takers((pod for pod in all_pods if pod.node in names), resource)
            self._holders[key] = holders
        job_name = str(job.key)
        return {holder: count for holder, count in holders.items() if holder != job_name}


def pod_needs_message(role: Role) -> str:
    """What one pod of the role requests, as `4 GPUs, 8 cores and 60.0 GiB of memory`."""
    amounts = pod_amounts(role.spec, role.plan)
    gpus = plural(role.plan.gpus_per_node, "GPU")
    cores = f"{amounts.get(CPU, 0.0):g} cores"
    memory = amount_message(MEMORY, amounts.get(MEMORY, 0.0))
    other_names = sorted(amounts.keys() - {role.plan.gpu_resource, CPU, MEMORY})
    others = [amount_message(name, amounts[name]) for name in other_names]
    return f"{', '.join([gpus, cores, *others])} and {memory}"


def gpu_roles(job: GRPOJobRecord, plan: ExecutionPlan) -> tuple[Role, ...]:
    """The roles of a gang that need GPUs, in starting order."""
    return tuple(role for role in roles(job.valid_spec, plan) if role.plan.gpus_per_node)


def _widest_first(claim_and_role: tuple[Claim, Role]) -> tuple[int, int, str]:
    """Sort key for the roles of several claims, those of equal width by their job's uid."""
    claim, role = claim_and_role
    return -role.plan.gpus_per_node, -role.plan.nodes, claim.job.uid


def has_gpus_for(node: Node, plan: ExecutionPlan) -> bool:
    """True if the node has the plan's GPUs."""
    if (node.gpu_resource, node.gpu_product) != (plan.gpu_resource, plan.gpu_product):
        return False
    # Machines of two types may have the same GPU, and the pods select one type. A label that the
    # plan does not select by does not concern it: NVIDIA's labels may have come since.
    return all(plan.node_selector.get(label, value) == value for label, value in node.node_selector)


def rooms(node: Node, role: Role, use: Amounts) -> int:
    """How many pods of the role could be bound to the node now, by its GPUs, memory and cores."""
    free_and_wanted = [
        (node.gpus_free, float(role.plan.gpus_per_node)),
        (node.host_memory_free, use.get(MEMORY, 0.0)),
        (node.cpu_free, use.get(CPU, 0.0)),
    ]
    in_thousandths = [(thousandths(free), thousandths(wanted)) for free, wanted in free_and_wanted]
    counts = [free // wanted for free, wanted in in_thousandths if wanted]
    return max(0, min(counts))


def empty_nodes(job: GRPOJobRecord, snapshot: Callable[[], Snapshot]) -> Inventory:
    """The nodes to plan a job of Kueue on; for another cluster, those that the spec declares."""
    placement = job.valid_spec.placement
    if job.is_dispatched and (gpus := _declared_per_node(placement)):
        placement = placement.model_copy(update={"gpus_per_node": gpus})
        return declared_inventory(placement)
    capacity = Capacity(snapshot(), ())
    return capacity.inventory(job).without_usage


def _declared_per_node(placement: PlacementSpec) -> int:
    """GPUs of each node of a gang; 0 where the spec leaves some of it open."""
    gpus = placement.gpus
    nodes = placement.nodes
    # Only a gang of one shape is planned alike on both clusters; everything else is planned on what
    # this one has.
    if not (gpus and nodes and placement.gpu_product):
        return 0
    is_one_shape = gpus.min == gpus.max and gpus.min % nodes == 0
    return gpus.min // nodes if is_one_shape else 0
