"""Pools: nodes with the same GPU, and the places that they have for gangs.

A gang runs on one kind of GPU, and a thousand nodes must be examined once, not once per candidate.
So a pool sorts its nodes by what they give, and keeps every answer.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.run_policy import GPU_PROCESS_MILLICPU, PlacementSpec
from grpo_api.text.contract import GPU_PRICE_LABEL
from grpo_api.text.quantity import quantity_bytes
from grpo_api.text.units import MIB

from ..result.formatting import plural
from .inventory import Inventory, Node
from .products import (
    OWN_IMAGE,
    Capability,
    Product,
    is_of_product,
    lookup_product,
    obstacle_message,
    usable_bytes,
)

Kind = tuple[str, int, Capability | None, str, tuple[tuple[str, str], ...]]
"""What makes two nodes' GPUs the same: product, MiB, compute capability, resource and node
selector."""


_GPU = attrgetter(
    *("gpu_product", "gpu_memory_mib", "compute_capability", "gpu_resource", "node_selector")
)
MILLICORES_PER_GPU = 2000
"""Default CPU request per GPU. The main thread of a process launches kernels, and loses time where
it has no core of its own. NCCL, the tokenizer, rewards and the engine take the second one."""
OTHER_PODS_CORES = 1.0
OTHER_PODS_SHARE = 0.1
"""What is left of a node to pods without GPUs: the larger of these many cores and this share of the
allocatable ones. Assumed: network, metrics and device plugins mostly request less."""
ENGINE_POD_MILLICORES = 1000
"""What an engine pod requests besides, for its HTTP server and scheduler: vLLM asks for two cores
and one per GPU (its page "Optimization and Tuning", CPU resources for GPU deployments)."""

UNPRICED = (
    "has no price, which objective Cheapest needs: set the chart's gpuHourPrices, label its nodes "
    f"with {GPU_PRICE_LABEL}, or set gpuHourPrice in the inventory file"
)


class Links(NamedTuple):
    """What a node's inventory declares of its links and price; 0 where it doesn't."""

    node_gbps: float
    gpu_gbps: float
    price: float


class Room(NamedTuple):
    """What one node has to give."""

    gpus: int
    memory: int
    """Bytes of host memory."""
    cpu: float
    """Cores."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool:
    """Nodes with the same GPU."""

    label: str
    hardware: Product
    usable_bytes: int
    """Bytes that torch sees on one GPU."""
    resource: str
    selector: tuple[tuple[str, str], ...]
    price: float = 0.0
    """Of one GPU for an hour, the dearest of its nodes'; 0 when none is declared."""
    cores_per_gpu: float = inf
    """Cores of a node for each of its GPUs, on the node that has fewest: the allocatable ones but
    for those that other pods need."""
    rooms: tuple[tuple[Room, int], ...]
    """What its nodes have to give, and how many nodes give just that; a thousand nodes are often a
    handful of rooms."""
    _places: dict[tuple[int, int | None, float | None, int | None], "Place | None"] = field(
        default_factory=dict, repr=False
    )
    _memory: dict[tuple[int, float], tuple[list[int], list[int]]] = field(
        default_factory=dict, repr=False
    )

    @property
    def gpu_name(self) -> str:
        """Label of the GPUs, or their resource where their nodes have no label."""
        return self.label or self.resource

    def is_same(self, other: "Pool") -> bool:
        """Return True if both have the same nodes, though each was built for another product."""
        kind = (self.label, self.usable_bytes, self.resource, self.selector)
        return kind == (other.label, other.usable_bytes, other.resource, other.selector)

    @cached_property
    def most_gpus_per_node(self) -> int:
        """Most GPUs that one node gives."""
        return max(room.gpus for room, _ in self.rooms)

    @cached_property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(room.gpus * count for room, count in self.rooms)

    @cached_property
    def nodes(self) -> int:
        """Nodes of all rooms."""
        return sum(count for _, count in self.rooms)

    def gpus_on(self, nodes: int) -> int:
        """GPUs of `nodes` nodes, as many of each as all of them have; 0 if there are fewer."""
        found = 0
        for room, count in reversed(self.rooms):
            found += count
            if found >= nodes:
                return nodes * room.gpus
        return 0

    def default_millicores(self, gpus: int, *, engine: bool = False) -> int:
        """Return the CPU request of a pod with `gpus` GPUs, in thousandths of a core.

        It is never more than the pod's share of its node, in whole cores, so that the rest of the
        node's GPUs stay usable.
        """
        wanted = gpus * MILLICORES_PER_GPU + (ENGINE_POD_MILLICORES if engine else 0)
        share = gpus * self.cores_per_gpu
        if share * 1000 >= wanted:
            return wanted
        return max(int(share) * 1000, gpus * GPU_PROCESS_MILLICPU)

    def place(
        self, world: int, nodes: int | None, cpu: float | None, memory: int | None
    ) -> "Place | None":
        """Where `world` processes run on as few nodes as can be, or on exactly `nodes`; None if
        there is no room.

        `cpu`: cores of one pod, None for the default; `memory`: host memory that one pod asks for
        in bytes, None for all that its node has.
        """
        key = (world, nodes, cpu, memory)
        if key not in self._places:
            self._places[key] = self._place(*key)
        return self._places[key]

    def _place(
        self, world: int, nodes: int | None, cpu: float | None, memory: int | None
    ) -> "Place | None":
        # As many GPUs of a node as can be: between nodes a gang is slower.
        for per_node in range(min(world, self.most_gpus_per_node), 0, -1):
            count, rest = divmod(world, per_node)
            if rest or (nodes and count != nodes):
                continue
            available = self._host_memory(count, per_node, cpu)
            if available is not None:
                host_memory = min(available, memory or available)
                return Place(self, count, per_node, host_memory)
        return None

    def _host_memory(self, nodes: int, per_node: int, cpu: float | None) -> int | None:
        """Host memory of the worst of the roomiest `nodes` nodes with enough GPUs and cores; None
        if there are fewer.

        Nodes that qualify are sorted by memory, the roomiest first, with running totals of their
        number: the worst of the first n is then found by bisection, for any n.
        """
        cores = self.default_millicores(per_node) / 1000 if cpu is None else cpu
        key = (per_node, cores)
        if key not in self._memory:
            fitting = [
                (room.memory, count)
                for room, count in self.rooms
                if room.gpus >= per_node and room.cpu >= cores
            ]
            fitting.sort(reverse=True)
            sizes = [size for size, _ in fitting]
            counts = [count for _, count in fitting]
            totals = list(accumulate(counts))
            self._memory[key] = (sizes, totals)
        sizes, totals = self._memory[key]
        worst = bisect_left(totals, nodes)
        return sizes[worst] if worst < len(sizes) else None


class Place(NamedTuple):
    """Where a gang would run: pods, one per node of a pool, with `per_node` GPUs each."""

    pool: Pool
    nodes: int
    per_node: int
    """GPUs, and so processes, of one pod."""
    host_memory: int
    """Bytes of host memory that one pod can have."""

    @property
    def world(self) -> int:
        """Processes of the gang, one per GPU."""
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """`8 x NVIDIA-L4 on 2 nodes`."""
        nodes = plural(self.nodes, "node")
        return f"{self.world} x {self.pool.gpu_name} on {nodes}"


def pool_of(pools: Iterable[Pool], label: str, resource: str) -> Pool | None:
    """The first pool whose GPUs have this label and are requested as this resource."""
    return next((pool for pool in pools if (pool.label, pool.resource) == (label, resource)), None)


MOST_LISTED = 8
"""Products of the cluster that a refusal names."""


def build_pools(inventory: Inventory, spec: GRPOJobSpec) -> tuple[list[Pool], list[str]]:
    """Return the pools that a job may use, largest GPUs first, and sentences about nodes that it
    can't use."""
    placement = spec.placement
    wanted_product = placement.gpu_product or ""
    nodes_by_kind: dict[Kind, list[Node]] = {}
    problems: set[str] = set()
    products: set[str] = set()
    for nodes in _nodes_by_gpu(inventory).values():
        first = nodes[0]
        products.add(first.gpu_product or first.gpu_resource)
        if not is_of_product(first.gpu_product, wanted_product):
            continue
        kind, _ = _kind_of_gpu(first, spec)
        if kind is None:
            problems.update(_kind_of_gpu(node, spec)[1] for node in nodes)
        else:
            nodes_by_kind.setdefault(kind, []).extend(nodes)
    if products and not (nodes_by_kind or problems):
        problems.add(f"the cluster has {_first_names(products)}")
    pools = [_pool(kind, nodes) for kind, nodes in nodes_by_kind.items()]
    if placement.objective == "Cheapest":
        problems |= {f"{pool.gpu_name} {UNPRICED}" for pool in pools if not pool.price}
        pools = [pool for pool in pools if pool.price]
    pools.sort(key=lambda pool: (-pool.usable_bytes, pool.label, pool.resource, pool.selector))
    usable_pools = [pool for pool in pools if pool.most_gpus_per_node]
    return usable_pools, sorted(problems)


def _nodes_by_gpu(inventory: Inventory) -> dict[tuple[Any, ...], list[Node]]:
    """The nodes that have GPUs, by what decides whether a job can use them."""
    nodes_by_gpu: dict[tuple[Any, ...], list[Node]] = {}
    for node in inventory.nodes:
        if node.gpus_total:
            nodes_by_gpu.setdefault(_GPU(node), []).append(node)
    return nodes_by_gpu


def _first_names(products: set[str]) -> str:
    """The products by name, the first of many."""
    names = sorted(products)
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{', '.join(names[:MOST_LISTED])}{more}"


def _cores_for_gpu_pods(cores: float) -> float:
    """Cores that pods on a node's GPUs may request by default, all together; `cores`: all that it
    has."""
    # DaemonSets request cores of every node. A gang that requested all the others have left would
    # wait for ever on nodes that are otherwise free.
    others = max(OTHER_PODS_CORES, OTHER_PODS_SHARE * cores)
    return max(0.0, cores - others)


def _kind_of_gpu(node: Node, spec: GRPOJobSpec) -> tuple[Kind | None, str]:
    """Return the kind of a node's GPUs and "", or None and a sentence why the job can't use
    them."""
    product = lookup_product(node.gpu_product)
    # The node's own labels first: a MIG slice has less memory than the product that it is named
    # after.
    capability = node.compute_capability or product.capability
    why = obstacle_message(node.gpu_product, node.gpu_resource, capability)
    # What an image of the user's own can compute on isn't known, so no generation is left out
    # there.
    if why and spec.image is None:
        return None, f"{why}: {OWN_IMAGE}"
    memory_mib = node.gpu_memory_mib or product.memory_mib or _declared_mib(spec.placement)
    if not memory_mib:
        return None, _unknown_memory(node)
    kind = (node.gpu_product, memory_mib, capability, node.gpu_resource, node.node_selector)
    return kind, ""


def _pool(kind: Kind, nodes: list[Node]) -> Pool:
    """One pool; nodes that have the same to give are one entry with a count.

    Its links are the slowest that are declared, and its price the highest: a gang may land on any
    of its nodes.
    """
    label, memory_mib, capability, resource, selector = kind
    product = lookup_product(label)
    rooms: dict[Room, int] = {}
    for node in nodes:
        room = Room(node.gpus_free, node.host_memory_free, node.cpu_free)
        rooms[room] = rooms.get(room, 0) + node.count
    links = {Links(node.node_gbps, node.gpu_gbps, node.gpu_hour_price) for node in nodes}
    sizes = {(node.cpu_total, node.gpus_total) for node in nodes}
    cores_per_gpu = min(_cores_for_gpu_pods(cores) / gpus for cores, gpus in sizes)
    link = _slowest(node_links.gpu_gbps for node_links in links) or product.link
    node_network = _slowest(node_links.node_gbps for node_links in links)
    hardware = replace(product, capability=capability, link=link, node_network=node_network)
    price = max(node_links.price for node_links in links)
    sorted_rooms = sorted(rooms.items())
    return Pool(
        label=label,
        hardware=hardware,
        usable_bytes=usable_bytes(memory_mib),
        resource=resource,
        selector=selector,
        price=price,
        cores_per_gpu=cores_per_gpu,
        rooms=tuple(sorted_rooms),
    )


def _slowest(gbps: Iterable[float]) -> float:
    """The smallest of those that are declared; 0 if none is."""
    return min((value for value in gbps if value), default=0.0)


def _declared_mib(placement: PlacementSpec) -> int:
    """placement.gpuMemory in MiB, 0 when unset."""
    return quantity_bytes(placement.gpu_memory) // MIB if placement.gpu_memory else 0


def _unknown_memory(node: Node) -> str:
    """The sentence about a node whose GPUs have no known memory."""
    name = node.name or "(unnamed)"
    what = node.gpu_resource
    if node.gpu_product:
        what = f"{node.gpu_resource} of product {node.gpu_product!r}"
    return (
        f"node {name}: memory of {what} is unknown: "
        "set spec.placement.gpuMemory, or install GPU feature discovery"
    )
