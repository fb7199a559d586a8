"""Pools: nodes with the same GPU, and which gangs they can hold.

Exists because a gang runs on one kind of GPU, and because a thousand nodes must be looked at once, not per candidate.
Used by search.py.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from grpo_api.quantity import quantity_bytes
from grpo_api.running import GPU_PROCESS_MILLICPU, PlacementSpec

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


class Room(NamedTuple):
    """What one node has to give."""

    gpus: int
    memory: int
    """Bytes of host memory."""
    cpu: float
    """Cores."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Nodes with the same GPU."""

    label: str
    hardware: Product
    usable: int
    """Bytes that torch sees on one GPU."""
    resource: str
    selector: tuple[tuple[str, str], ...]
    rooms: tuple[tuple[Room, int], ...]
    """What its nodes have to give, and how many nodes give just that."""
    _layouts: dict[tuple[int, int | None, float | None], Layout | None] = field(default_factory=dict, repr=False)
    _memory: dict[tuple[int, float], tuple[list[int], list[int]]] = field(default_factory=dict, repr=False)

    @cached_property
    def widest(self) -> int:
        """Most GPUs that one node gives."""
        return max(room.gpus for room, _ in self.rooms)

    @cached_property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(room.gpus * count for room, count in self.rooms)

    def layout(self, world: int, nodes: int | None, cpu: float | None) -> Layout | None:
        """The extent of `world` processes on as few nodes as can be, or on exactly `nodes`; None if they don't fit.

        Args:
            world: processes.
            nodes: exact number of nodes, None for the fewest.
            cpu: cores of one pod, None for the default.
        """
        key = (world, nodes, cpu)
        if key not in self._layouts:
            self._layouts[key] = self._layout(*key)
        return self._layouts[key]

    def _layout(self, world: int, nodes: int | None, cpu: float | None) -> Layout | None:
        for per_node in range(min(world, self.widest), 0, -1):
            count, rest = divmod(world, per_node)
            if rest or (nodes and count != nodes):
                continue
            if self.host_room(Layout(count, per_node), cpu) is not None:
                return Layout(count, per_node)
        return None

    def host_room(self, layout: Layout, cpu: float | None) -> int | None:
        """Free host memory of the layout's worst node, taking the roomiest; None if there are too few nodes."""
        key = (layout.per_node, layout.per_node * GPU_PROCESS_MILLICPU / 1000 if cpu is None else cpu)
        if key not in self._memory:
            fitting = [
                (room.memory, count) for room, count in self.rooms if room.gpus >= key[0] and room.cpu >= key[1]
            ]  # fmt: skip
            fitting.sort(reverse=True)
            self._memory[key] = ([size for size, _ in fitting], list(accumulate(count for _, count in fitting)))
        memory, nodes = self._memory[key]
        worst = bisect_left(nodes, layout.nodes)
        return memory[worst] if worst < len(memory) else None


def build_pools(
    inventory: Inventory, placement: PlacementSpec, *, emptied: bool = False
) -> tuple[list[Pool], list[str]]:
    """The pools that a job may use, largest GPUs first, and sentences about nodes that it can't use.

    Args:
        inventory: the nodes.
        placement: the job's pins.
        emptied: as if nothing ran on the nodes, instead of what is free.
    """
    groups: dict[Key, dict[Room, int]] = {}
    left_out: set[str] = set()
    for node in inventory.nodes:
        if not node.gpus_total or not node.gpu_product.startswith(placement.gpu_product or ""):
            continue
        memory = node.gpu_memory_mib or lookup(node.gpu_product).memory_mib or _declared_mib(placement)
        if not memory:
            left_out.add(_unknown_memory(node))
            continue
        rooms = groups.setdefault(
            (node.gpu_product, memory, _has_bfloat16(node), node.gpu_resource, node.node_selector), {}
        )
        room = (
            Room(node.gpus_total, node.host_memory_total, node.cpu_total)
            if emptied
            else Room(node.gpus_free, node.host_memory_free, node.cpu_free)
        )
        rooms[room] = rooms.get(room, 0) + node.count
    pools = [_pool(key, rooms) for key, rooms in groups.items()]
    pools.sort(key=lambda pool: (-pool.usable, pool.label, pool.resource, pool.selector))
    return [pool for pool in pools if pool.widest], sorted(left_out)


def _pool(key: Key, rooms: dict[Room, int]) -> Pool:
    """One pool of alike GPUs; nodes that are alike in everything are one entry with a count."""
    label, memory, bfloat16, resource, selector = key
    hardware = replace(lookup(label), bfloat16=bfloat16)
    return Pool(label, hardware, usable_bytes(memory), resource, selector, tuple(sorted(rooms.items())))


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
