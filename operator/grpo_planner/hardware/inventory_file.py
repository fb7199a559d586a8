"""Reads the inventory that users write.

Its format is `nodes: [{count, gpuProduct, gpuMemoryMiB?, gpusPerNode, hostMemoryGiB, cpu}]`.
Optional are `interconnect: {nodeGBps, gpuGBps}` and `gpuHourPrice`. With such a file a job is
planned without a cluster. It is parsed as strictly as a job: an unknown field is an error.

GPU products may have their short names in it.
"""

import math
import re
from typing import Annotated, Any

from pydantic import Field, ValidationError

from grpo_api.text.base import Model, dotted_path
from grpo_api.text.problems import requirement
from grpo_api.text.units import GIB

from .inventory import Inventory, Node, allocatable_memory
from .products import is_slice, label_of, resource_of, unknown_product

DEFAULT_HOST_GIB = 128
"""Host memory per GPU that is assumed where the inventory gives none; a note then states the
assumption."""
DEFAULT_CPU = 16
"""CPU cores per GPU that `--gpus` assumes."""


class Interconnect(Model):
    """How fast GPUs reach each other, GB/s per direction: 10 Gbit/s Ethernet is 1.25, a 400 Gbit/s
    card 50."""

    node_gbps: Annotated[float, Field(ge=0, le=100_000, alias="nodeGBps")] = 0
    """Network of one node, all its cards together; 0: assumed by product."""
    gpu_gbps: Annotated[float, Field(ge=0, le=100_000, alias="gpuGBps")] = 0
    """Between two GPUs of one node; 0: by product."""


class NodeGroup(Model):
    """A number of nodes of one kind."""

    count: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Nodes of this kind."""
    gpu_product: Annotated[str, Field(max_length=63)] = ""
    """`nvidia.com/gpu.product` label, or a short name of it such as `H100`."""
    gpu_memory_mib: Annotated[int, Field(ge=0, le=10_000_000, alias="gpuMemoryMiB")] = 0
    """Memory of one GPU; 0: by product."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of one node."""
    host_memory_gib: Annotated[float, Field(ge=0, le=1e6, alias="hostMemoryGiB")]
    """Host memory that is built into one node; a kubelet keeps some of it."""
    cpu: Annotated[float, Field(ge=0, le=100_000)]
    """CPU cores of one node."""
    interconnect: Interconnect = Interconnect()
    """Links of the GPUs."""
    gpu_hour_price: Annotated[float, Field(ge=0, le=1e6)] = 0
    """Price of one GPU for an hour, in any currency; 0: none."""


USUAL_GPUS = 8
"""Most GPUs of nearly all machines."""


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
        raise InventoryInvalid(_problems_of(error)) from error
    nodes = tuple(_node(group) for group in file.nodes if group.count)
    return Inventory(nodes, reports_disk=True)


def parse_gpus(text: str, host_memory: int | None = None) -> Inventory:
    """The inventory that `H100`, `8xH100` or `4x8xNVIDIA-H200` means: [[nodes x] GPUs per node x]
    product.

    Args:
        text: as above; the product is a label or a short name.
        host_memory: of one node in bytes. None: DEFAULT_HOST_GIB per GPU, which a warning says.

    Raises:
        InventoryInvalid: the text is neither, or names no known product.
    """
    pattern = r"(?:(?:([1-9]\d{0,4}) *x *)?([1-9]\d?) *x *)?(?!\d+ *x)(\S.*)"
    match = re.fullmatch(pattern, text.strip())
    if not match:
        raise InventoryInvalid(
            f"{text!r} does not say which GPUs; write L4, 8xL4, or 4x8xH200 for 4 nodes of 8"
        )
    count = int(match[1] or 1)
    gpus = int(match[2] or 1)
    name = match[3]
    product = label_of(name)
    if product is None:
        problem = unknown_product(name)
        raise InventoryInvalid(f"{text!r}: {problem}")
    host_gib: float
    assumptions: tuple[str, ...] = ()
    if match[1] is None and gpus > USUAL_GPUS:
        nodes = math.ceil(gpus / USUAL_GPUS)
        assumptions += (
            f"{text} is one node of {gpus} GPUs: for nodes of {USUAL_GPUS} write "
            f"{nodes}x{USUAL_GPUS}x{name}",
        )
    if host_memory is None:
        host_gib = DEFAULT_HOST_GIB * gpus
        assumptions += (
            f"{host_gib} GiB of host memory per node are assumed: say how much there is by "
            "--host-memory",
        )
    else:
        host_gib = host_memory / GIB
    try:
        group = NodeGroup.model_validate({
            "count": count,
            "gpuProduct": product,
            "gpusPerNode": gpus,
            "hostMemoryGiB": host_gib,
            "cpu": DEFAULT_CPU * gpus,
        })  # fmt: skip
    except ValidationError as error:
        raise InventoryInvalid(f"{text!r}: {_problems_of(error)}") from error
    return Inventory((_node(group),), assumptions=assumptions, reports_disk=True)


def _problems_of(error: ValidationError) -> str:
    """Every wrong field, by its path."""
    return "; ".join(
        f"{dotted_path(problem['loc']) or 'inventory'}: {requirement(problem, {})}"
        for problem in error.errors()
    )


def _node(group: NodeGroup) -> Node:
    """The group as the planner takes it; of a node's MIG instances a pod takes one."""
    memory = allocatable_memory(round(group.host_memory_gib * GIB))
    product = label_of(group.gpu_product) or group.gpu_product
    resource = resource_of(product)
    label = f"{resource}.product-name" if resource.startswith("amd") else f"{resource}.product"
    selector = ((label, product),) if product else ()
    gpus = min(1, group.gpus_per_node) if is_slice(product) else group.gpus_per_node
    links = group.interconnect
    node = Node(
        gpu_product=product,
        gpu_memory_mib=group.gpu_memory_mib,
        gpus_total=gpus,
        gpu_resource=resource,
        host_memory_total=memory,
        cpu_total=group.cpu,
        node_selector=selector,
        count=group.count,
        gpu_hour_price=group.gpu_hour_price,
        node_gbps=links.node_gbps,
        gpu_gbps=links.gpu_gbps,
    )
    return node.without_usage
