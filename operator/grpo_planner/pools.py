"""Pools: nodes with the same GPU, and which gangs they can hold.

Exists because a gang runs on one kind of GPU, and because a thousand nodes must be looked at once, not per candidate.
Used by search.py.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from grpo_api.base import quantity_bytes
from grpo_api.running import PlacementSpec

from .inventory import Inventory, Node
from .memory.device import usable_bytes
from .products import Product, lookup

BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability from which tensor cores multiply bfloat16."""

Key = tuple[str, int, bool, str, tuple[tuple[str, str], ...]]
"""What makes GPUs alike: product, MiB, bfloat16, resource and node selector."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A gang's extent: pods, one per node, and GPUs of each."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        """Processes of the gang, one per GPU."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Pool:
    """Nodes with the same GPU."""

    label: str
    hardware: Product
    usable: int
    """Bytes that torch sees on one GPU."""
    resource: str
    selector: tuple[tuple[str, str], ...]
    nodes: tuple[Node, ...]
    _room: dict[tuple[int, float], list[tuple[int, int]]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def widest(self) -> int:
        """Most free GPUs on one node."""
        return max(node.gpus_free for node in self.nodes)

    @cached_property
    def gpus(self) -> int:
        """Free GPUs of all nodes."""
        return sum(node.gpus_free * node.count for node in self.nodes)

    def layout(self, world: int, nodes: int | None, cpu: float | None) -> Layout | None:
        """The extent of `world` processes on as few nodes as can be, or on exactly `nodes`; None if they don't fit.

        Args:
            world: processes.
            nodes: exact number of nodes, None for the fewest.
            cpu: cores of one pod, None for one per process.
        """
        for count in [nodes] if nodes else range(1, world + 1):
            per_node, rest = divmod(world, count)
            if rest or not per_node or per_node > self.widest:
                continue
            if self.host_room(Layout(count, per_node), cpu) is not None:
                return Layout(count, per_node)
        return None

    def host_room(self, layout: Layout, cpu: float | None) -> int | None:
        """Free host memory of the layout's worst node, taking the roomiest; None if there are too few nodes."""
        key = (layout.per_node, layout.per_node if cpu is None else cpu)
        if key not in self._room:
            fitting = [node for node in self.nodes if node.gpus_free >= key[0] and node.cpu_free >= key[1]]
            fitting.sort(key=lambda node: -node.host_memory_free)
            self._room[key] = [(node.count, node.host_memory_free) for node in fitting]
        taken = 0
        for count, memory in self._room[key]:
            taken += count
            if taken >= layout.nodes:
                return memory
        return None


def build_pools(inventory: Inventory, placement: PlacementSpec) -> tuple[list[Pool], list[str]]:
    """The pools that a job may use, largest GPUs first, and sentences about nodes that it can't use."""
    groups: dict[Key, dict[Node, int]] = {}
    left_out: set[str] = set()
    for node in inventory.nodes:
        if not node.gpus_total or not node.gpu_product.startswith(placement.gpu_product or ""):
            continue
        memory = node.gpu_memory_mib or lookup(node.gpu_product).memory_mib or _declared_mib(placement)
        if not memory:
            left_out.add(_unknown_memory(node))
            continue
        key = (node.gpu_product, memory, _has_bfloat16(node), node.gpu_resource, node.node_selector)
        alike = replace(node, name="", count=1) if node.name or node.count != 1 else node
        members = groups.setdefault(key, {})
        members[alike] = members.get(alike, 0) + node.count
    pools = [_pool(key, members) for key, members in groups.items()]
    pools.sort(key=lambda pool: (-pool.usable, pool.label, pool.resource, pool.selector))
    return pools, sorted(left_out)


def _pool(key: Key, members: dict[Node, int]) -> Pool:
    """One pool of alike GPUs; nodes that are alike in everything become one entry with a count."""
    label, memory, bfloat16, resource, selector = key
    nodes = sorted(
        (replace(node, count=count) for node, count in members.items()),
        key=lambda node: (-node.gpus_free, -node.host_memory_free, -node.cpu_free, -node.gpus_total),
    )
    hardware = replace(lookup(label), bfloat16=bfloat16)
    return Pool(label, hardware, usable_bytes(memory), resource, selector, tuple(nodes))


def _has_bfloat16(node: Node) -> bool:
    """By compute capability where it is known, else by product."""
    if node.compute_capability is not None and node.gpu_resource == "nvidia.com/gpu":
        return node.compute_capability >= BFLOAT16_CAPABILITY
    return lookup(node.gpu_product).bfloat16


def _declared_mib(placement: PlacementSpec) -> int:
    """placement.gpuMemory in MiB, 0 when unset."""
    return quantity_bytes(placement.gpu_memory) // 2**20 if placement.gpu_memory else 0


def _unknown_memory(node: Node) -> str:
    """The sentence about a node whose GPUs have no known memory."""
    what = f"{node.gpu_resource} of product {node.gpu_product!r}" if node.gpu_product else node.gpu_resource
    return (
        f"node {node.name or '(unnamed)'}: memory of {what} is unknown: "
        "set spec.placement.gpuMemory, or install GPU feature discovery"
    )
