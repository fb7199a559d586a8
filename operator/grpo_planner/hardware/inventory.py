"""Defines the inventory: the nodes that the planner may use, with free and total GPUs, host memory
and CPUs.

The operator fills it from Nodes and Pods, `grpo plan` fills it from a file, and the planner sees no
cluster. The caller that fills it has already applied the job's node selector and tolerations. It
may contain nodes that a spec declares and that do not exist yet, because an autoscaler will add
them for pending pods.

A cluster's nodes report what a kubelet leaves to pods. For GPUs that are only named, and for an
inventory file, it is derived from the memory that is built in. A plan that filled all of it would
have pods that no node takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from grpo_api.spec.run_policy import PlacementSpec
from grpo_api.text.units import GIB, MIB

from .products import is_slice, label_of, resource_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, or `count` nodes that are the same in everything."""

    name: str = ""
    """Name for messages; empty for a group of nodes."""
    gpu_product: str = ""
    """`nvidia.com/gpu.product` label (or AMD's product name); empty when unknown."""
    gpu_memory_mib: int = 0
    """Memory of one GPU as its label says, in MiB; 0 when unknown."""
    gpus_free: int = 0
    """GPUs that no non-terminal pod requests."""
    gpus_total: int = 0
    """Allocatable GPUs."""
    gpu_resource: str = "nvidia.com/gpu"
    """Extended resource that a pod requests for one GPU."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, None when unknown."""
    host_memory_free: int = 0
    """Bytes of host memory that no non-terminal pod requests."""
    host_memory_total: int = 0
    """Allocatable host memory in bytes."""
    cpu_free: float = 0.0
    """CPU cores that no non-terminal pod requests."""
    cpu_total: float = 0.0
    """Allocatable CPU cores."""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels that tie a pod to nodes with this GPU, sorted."""
    node_gbps: float = 0.0
    """Network of the whole node, GB/s per direction; 0 when unknown: assumed by product."""
    gpu_gbps: float = 0.0
    """Between two GPUs of the node, GB/s per direction; 0 when unknown: that of the product."""
    gpu_hour_price: float = 0.0
    """Price of one GPU for an hour, in any currency; 0 when none is declared."""
    count: int = 1
    """How many nodes are like this."""

    @property
    def without_usage(self) -> "Node":
        """The same node with nothing running on it."""
        return replace(
            self,
            gpus_free=self.gpus_total,
            host_memory_free=self.host_memory_total,
            cpu_free=self.cpu_total,
        )


_GIVES = attrgetter(
    *("gpu_product", "gpu_memory_mib", "gpu_resource", "node_selector", "gpus_free", "gpus_total"),
    *("host_memory_free", "host_memory_total", "cpu_free", "cpu_total"),
    *("node_gbps", "gpu_gbps", "gpu_hour_price"),
)


@dataclass(frozen=True)
class Inventory:
    """All nodes that a job may use, and what its reader wants the user to know."""

    nodes: tuple[Node, ...] = ()
    """Nodes that a pod of this job could be bound to."""
    warnings: tuple[str, ...] = ()
    """Sentences about nodes that were left out, such as shared GPUs; they end up in
    plan.warnings."""
    visible: bool = True
    """False when other namespaces' pods can't be seen: `free` is then a guess, and the fit is left
    to the scheduler."""
    reports_disk: bool = False
    """Whether nodes say how much ephemeral storage they have, so that pods may request it."""
    short_of_disk: tuple[Node, ...] = ()
    """Nodes that would do, but for the room on their disks; `warnings` has a sentence of each."""
    assumptions: tuple[str, ...] = ()
    """Sentences about how the inventory was read; warnings that never explain a refusal."""

    @cached_property
    def without_usage(self) -> "Inventory":
        """The same nodes with nothing running on them: what the cluster has at all."""
        return self._with(lambda nodes: tuple(node.without_usage for node in nodes))

    @cached_property
    def with_merged_nodes(self) -> "Inventory":
        """The same for the planner, with one entry for all nodes that give the same: quick to plan
        on and to compare.

        Only a node whose GPUs' memory is unknown is named to the user, so only it keeps its name.
        """
        return self._with(_merge)

    def with_prices(self, prices: Mapping[str, float]) -> "Inventory":
        """The same nodes with these prices of a GPU hour, by product; others stay."""

        def priced(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
            return tuple(
                replace(node, gpu_hour_price=prices.get(node.gpu_product, node.gpu_hour_price))
                for node in nodes
            )

        return self._with(priced) if prices else self

    @property
    def with_larger_disks(self) -> "Inventory":
        """What there would be if all disks had room."""
        all_nodes = self.nodes + self.short_of_disk
        return replace(self, nodes=all_nodes, short_of_disk=())

    def _with(self, change: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> "Inventory":
        return replace(self, nodes=change(self.nodes), short_of_disk=change(self.short_of_disk))


def _merge(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        name = "" if node.gpu_memory_mib else node.name
        capability = node.compute_capability or ()
        key = (name, capability, *_GIVES(node))
        groups.setdefault(key, []).append(node)
    merged_nodes = []
    for key in sorted(groups):
        name = key[0]
        group = groups[key]
        count = sum(node.count for node in group)
        merged_nodes.append(replace(group[0], name=name, count=count))
    return tuple(merged_nodes)


ENDLESS = 2**50
"""Host memory in bytes, and cores, of a node that is not there yet: how much it has is left to the
autoscaler."""


def declared_inventory(placement: PlacementSpec) -> Inventory:
    """The declared nodes, empty. Their product's label is no selector: a node has it only once it
    is up."""
    product = label_of(placement.gpu_product or "") or placement.gpu_product or ""
    gpus = placement.gpus_per_node or 0
    if is_slice(product):
        gpus = min(1, gpus)
    group = Node(
        gpu_product=product,
        gpus_total=gpus,
        gpu_resource=resource_of(product),
        host_memory_total=ENDLESS,
        cpu_total=float(ENDLESS),
        count=placement.nodes or 0,
    )
    return Inventory((group.without_usage,))


RESERVED_SHARES = ((4, 0.25), (4, 0.20), (8, 0.10), (112, 0.06))
"""GKE's reservation, which takes more of a large node than EKS' and AKS' do: pairs of GiB and the
share reserved of them, in turn (GKE documentation, "Plan GKE Standard node sizes")."""
RESERVED_BEYOND = 0.02
"""The share of all that is beyond them."""
EVICTION_THRESHOLD = 100 * MIB
"""Free memory below which a kubelet evicts pods, by default."""


def allocatable_memory(built_in: int) -> int:
    """Bytes that pods may request on a node with `built_in` bytes of memory."""
    remaining = float(built_in)
    reserved = float(EVICTION_THRESHOLD)
    for size_gib, share in RESERVED_SHARES:
        part = min(remaining, size_gib * GIB)
        reserved += share * part
        remaining -= part
    reserved += RESERVED_BEYOND * remaining
    return max(0, round(built_in - reserved))
