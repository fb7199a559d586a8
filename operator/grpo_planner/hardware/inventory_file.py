"""The inventory as users write it: `nodes: [{count, gpuProduct, gpuMemoryMiB?, gpusPerNode, hostMemoryGiB, cpu}]`.

With it a job is planned without a cluster. Strict like the job itself: an unknown field is an error.
"""

import re
from typing import Annotated, Any

from pydantic import Field, ValidationError

from grpo_api.base import Model, dotted
from grpo_api.quantity import GIB

from .inventory import Inventory, Node

DEFAULT_HOST_GIB = 128
"""Host memory per GPU that `--gpus` assumes."""
DEFAULT_CPU = 16
"""CPU cores per GPU that `--gpus` assumes."""


class NodeGroup(Model):
    """So many nodes of one kind."""

    count: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Nodes of this kind."""
    gpu_product: Annotated[str, Field(max_length=63)] = ""
    """`nvidia.com/gpu.product` label."""
    gpu_memory_mib: Annotated[int, Field(ge=0, le=10_000_000, alias="gpuMemoryMiB")] = 0
    """Memory of one GPU; 0: by product."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of one node."""
    host_memory_gib: Annotated[float, Field(ge=0, le=1e6, alias="hostMemoryGiB")]
    """Host memory of one node."""
    cpu: Annotated[float, Field(ge=0, le=100_000)]
    """CPU cores of one node."""


class InventoryFile(Model):
    """The file."""

    nodes: Annotated[list[NodeGroup], Field(max_length=10_000)]
    """Groups of nodes."""


class InventoryInvalid(ValueError):
    """An inventory that is not written as it must be; the message names every wrong field."""


def parse_inventory(document: Any) -> Inventory:
    """The inventory of a parsed YAML or JSON file; all nodes are free.

    Raises:
        InventoryInvalid: with every wrong field, by its path.
    """
    try:
        file = InventoryFile.model_validate(document)
    except ValidationError as error:
        problems = [f"{dotted(problem['loc']) or 'inventory'}: {problem['msg']}" for problem in error.errors()]
        raise InventoryInvalid("; ".join(problems)) from error
    return Inventory(tuple(_node(group) for group in file.nodes if group.count))


def parse_gpus(text: str) -> Inventory:
    """The inventory that `8xNVIDIA-L4` or `4x8xNVIDIA-H200` means: [nodes x] GPUs per node x product.

    Raises:
        InventoryInvalid: the text is neither.
    """
    match = re.fullmatch(r"(?:(\d{1,5})x)?(\d{1,2})x(\S+)", text)
    if not match:
        raise InventoryInvalid(
            f"{text!r} does not say which GPUs; write 8xNVIDIA-L4, or 4x8xNVIDIA-H200 for 4 nodes of 8"
        )
    gpus = int(match[2])
    group = NodeGroup(
        count=int(match[1] or 1), gpu_product=match[3], gpus_per_node=gpus,
        host_memory_gib=DEFAULT_HOST_GIB * gpus, cpu=DEFAULT_CPU * gpus,
    )  # fmt: skip
    return Inventory((_node(group),) if group.count else ())


def _node(group: NodeGroup) -> Node:
    """The group as the planner takes it."""
    memory = round(group.host_memory_gib * GIB)
    selector = (("nvidia.com/gpu.product", group.gpu_product),) if group.gpu_product else ()
    return Node(
        gpu_product=group.gpu_product, gpu_memory_mib=group.gpu_memory_mib, gpus_free=group.gpus_per_node,
        gpus_total=group.gpus_per_node, host_memory_free=memory, host_memory_total=memory, cpu_free=group.cpu,
        cpu_total=group.cpu, node_selector=selector, count=group.count,
    )  # fmt: skip
