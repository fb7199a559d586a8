"""What a refused job would need: the smallest hardware on which it is planned.

A refusal tells what is missing on the GPUs at hand; somebody who rents GPUs asks which ones to rent. Every answer has
been planned.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.run_policy import GPURange, PlacementSpec
from grpo_api.text.quantity import GIB

from .hardware.inventory import Inventory, Node
from .hardware.inventory_file import DEFAULT_CPU, DEFAULT_HOST_GIB
from .hardware.products import lookup
from .result import Hardware
from .search.option import Option
from .words import gib, plural

RENTED = (
    "Tesla-T4", "NVIDIA-L4", "NVIDIA-A10G", "NVIDIA-L40S", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB",
    "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200", "NVIDIA-B200",
)  # fmt: skip
"""Products that are looked at: what most clouds have."""
EXTENTS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
"""Nodes and GPUs of each, as they are rented."""

MOST_RENTED = max(nodes * per_node for nodes, per_node in EXTENTS)
"""GPUs of the largest of EXTENTS."""

Planner = Callable[[GRPOJobSpec, Inventory], Option | None]
"""What a spec would be planned as on an inventory; None where nothing fits."""


class _Rented(NamedTuple):
    """Nodes with the same GPUs."""

    memory: int
    """MiB of all GPUs."""
    nodes: int
    per_node: int
    product: str

    @property
    def inventory(self) -> Inventory:
        """They alone, with the host memory and cores that such nodes usually have."""
        host, cpu = DEFAULT_HOST_GIB * GIB * self.per_node, float(DEFAULT_CPU * self.per_node)
        node = Node(
            gpu_product=self.product, gpus_free=self.per_node, gpus_total=self.per_node, host_memory_free=host,
            host_memory_total=host, cpu_free=cpu, cpu_total=cpu, count=self.nodes,
        )  # fmt: skip
        return Inventory((node,))


def smallest(spec: GRPOJobSpec, plan: Planner) -> Hardware | None:
    """The hardware with the least GPU memory in all that the job fits; None where none of RENTED does.

    What spec.placement demands at least stays; its upper bounds and its product are what may have to change.
    """
    placed = spec.model_copy(update={"placement": _loosened(spec.placement)})
    by_size = sorted(_rented())
    # The largest has a place for all that the others have one for, and more memory: one plan instead of all of them.
    if plan(placed, by_size[-1].inventory) is None:
        return None
    option = next(filter(None, (plan(placed, rented.inventory) for rented in by_size)))
    return _hardware(option)


def _rented() -> Iterator[_Rented]:
    for product in RENTED:
        for nodes, per_node in EXTENTS:
            yield _Rented(lookup(product).memory_mib * nodes * per_node, nodes, per_node, product)


def _loosened(placement: PlacementSpec) -> PlacementSpec:
    """A placement with the lower bounds of another; the fewest GPUs are wanted."""
    least = placement.gpus.min if placement.gpus else 1
    nodes = None if placement.declared_gpus else placement.nodes
    return PlacementSpec(objective="FewestGPUs", gpus=GPURange(min=least), nodes=nodes)


def _hardware(option: Option) -> Hardware:
    """The place of an option as an answer, with what it needs of it."""
    place, footprint = option.place, option.footprint
    more = f" and {plural(option.engine_gpus, 'GPU')} more for engines" if option.engine_gpus else ""
    per_gpu = f"{gib(footprint.device)} of {gib(place.pool.usable)} per GPU"
    per_node = f"{gib(option.host)} of host memory per node"
    message = f"{place.name}{more}, {footprint.method.name}: {per_gpu}, {per_node}"
    return Hardware(
        nodes=place.nodes, gpus_per_node=place.per_node, gpu_product=place.pool.label,
        host_memory_bytes=option.host, message=message,
    )  # fmt: skip
