"""Nodes that a spec declares and nobody has seen: an autoscaler will add them for pods that find none."""

from grpo_api.spec.run_policy import PlacementSpec

from .inventory import Inventory, Node
from .products import resource_of

ENDLESS = 2**50
"""Host memory in bytes, and cores, of a node that is not there yet: how much it has is left to the autoscaler."""


def declared(placement: PlacementSpec) -> Inventory:
    """The declared nodes, empty. Their product's label is no selector: a node has it only once it is up."""
    gpus = placement.gpus_per_node or 0
    product = placement.gpu_product or ""
    return Inventory((
        Node(
            gpu_product=product,
            gpus_free=gpus,
            gpus_total=gpus,
            gpu_resource=resource_of(product),
            host_memory_free=ENDLESS,
            host_memory_total=ENDLESS,
            cpu_free=float(ENDLESS),
            cpu_total=float(ENDLESS),
            count=placement.nodes or 0,
        ),
    ))  # fmt: skip
