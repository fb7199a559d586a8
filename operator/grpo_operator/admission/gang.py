"""What the roles of a gang ask of nodes: how many of their pods a node has room for. Pure."""

from grpo_api.plan import ExecutionPlan
from grpo_planner import Node

from ..records import GRPOJobRecord
from ..roles import Role, roles
from .resources import Amounts

MEMORY, CPU = "memory", "cpu"


def gpu_roles(job: GRPOJobRecord, plan: ExecutionPlan) -> tuple[Role, ...]:
    """The roles of a job's gang that need GPUs, in the order in which they are started; none for an unreadable spec."""
    if job.spec is None:
        return ()
    return tuple(role for role in roles(job.spec, plan) if role.plan.gpus_per_node)


def widest_first(role: Role) -> tuple[int, int]:
    """Sorts the roles of several gangs: the widest pods find a node least easily."""
    return -role.plan.gpus_per_node, -role.plan.nodes


def matches(node: Node, plan: ExecutionPlan) -> bool:
    """True if the node has the plan's GPUs."""
    return node.gpu_resource == plan.gpu_resource and node.gpu_product == plan.gpu_product


def rooms(node: Node, role: Role, use: Amounts) -> int:
    """How many pods of the role could be bound to the node now, by its GPUs, memory and cores."""
    by_gpus = (node.gpus_free, float(role.plan.gpus_per_node))
    by_memory = (node.host_memory_free, use.get(MEMORY, 0.0))
    by_cpu = (node.cpu_free, use.get(CPU, 0.0))
    counts = [int(free // wanted) for free, wanted in (by_gpus, by_memory, by_cpu) if wanted]
    return max(0, min(counts))
