"""What an attempt has measured of its links, as nodes would declare it.

A table of products knows what such machines usually have; what the job's own ranks reached is better than that.
"""

from dataclasses import replace

from grpo_api.plan.learned import MeasuredLinks

from ..hardware.inventory import Inventory, Node
from .steptime import GIGA, LINK_EFFICIENCY


def as_measured(inventory: Inventory, links: MeasuredLinks | None) -> Inventory:
    """The inventory whose nodes with these GPUs have the links that were measured; what is declared of them stays."""
    if links is None:
        return inventory
    return replace(inventory, nodes=tuple(_node(node, links) for node in inventory.nodes))


def _node(node: Node, links: MeasuredLinks) -> Node:
    """Ranks on one node tell of the links between its GPUs; on several, of the network, which is never the faster."""
    if node.gpu_product != links.gpu_product:
        return node
    speed = links.bytes_per_second / GIGA / LINK_EFFICIENCY
    if links.nodes > 1:
        return node if node.node_gbps else replace(node, node_gbps=speed)
    return node if node.gpu_gbps else replace(node, gpu_gbps=speed)
