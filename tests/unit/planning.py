"""Short ways to write jobs, nodes and plans in the planner's tests."""

from typing import Any

from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.units import GIB
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanResult
from tests.samples import changed

H100, A100, L4, T4 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", "NVIDIA-L4", "Tesla-T4"
A10G, H200, RTX_4090 = "NVIDIA-A10G", "NVIDIA-H200", "NVIDIA-GeForce-RTX-4090"
MEMORY_MIB = {
    H100: 81559, A100: 81920, L4: 23034, T4: 15360, A10G: 23028, H200: 143771, RTX_4090: 24564,
}  # fmt: skip
LLAMA_1B, QWEN_7B, QWEN_32B = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-32B",
)
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
BARE: dict[str, Any] = {
    "model": {"name": QWEN_7B},
    "dataset": {"name": "openai/gsm8k"},
    "rewards": [{"accuracy": {}}],
    "export": {"to": "None"},
}


def spec(model: str = QWEN_7B, **changes: Any) -> GRPOJobSpec:
    """A job with defaults, and `training__beta=0` for spec.training.beta."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return parse_spec(changed({"model.name": model} | dotted, BARE))


def nodes(count: int, gpus: int, product: str, host_gib: int = 1024, **facts: Any) -> Node:
    """So many nodes of one kind with nothing on them."""
    values: dict[str, Any] = {
        "gpu_product": product, "gpu_memory_mib": MEMORY_MIB.get(product, 0), "gpus_free": gpus,
        "gpus_total": gpus,
        "host_memory_free": host_gib * GIB, "host_memory_total": host_gib * GIB, "cpu_free": 128.0,
        "cpu_total": 128.0, "node_selector": (("nvidia.com/gpu.product", product),), "count": count,
    }  # fmt: skip
    return Node(**values | facts)


def inventory(*groups: Node) -> Inventory:
    """These nodes."""
    return Inventory(tuple(groups))


def result(job: GRPOJobSpec, *groups: Node) -> PlanResult:
    """The planner's answer."""
    return plan_job(job, inventory(*groups))


def plan(job: GRPOJobSpec, *groups: Node) -> ExecutionPlan:
    """The plan, which there must be."""
    answer = result(job, *groups)
    assert answer.chosen is not None, answer.message
    return answer.chosen


def risk(plan: ExecutionPlan) -> float:
    """By how much longer a plan's time counts to every objective but Fastest."""
    assert plan.memory is not None
    return counted_risk(
        plan.memory.device_bytes / plan.memory.usable_bytes,
        offloads=plan.offload == "CPU",
        strategy=plan.strategy,
        offloads_base=plan.engine is not None and plan.engine.offload_base,
        nodes=plan.nodes,
        zero=plan.zero_stage,
    )


def counted_risk(
    share: float, *, offloads: bool, strategy: str, offloads_base: bool, nodes: int, zero: int
) -> float:
    """The documented rules of spec.placement.objective; `share` is what is taken of a GPU."""
    least_shares = {0.97: 1.3, 0.9: 1.25, 0.8: 1.05}
    crowded = next((factor for least, factor in least_shares.items() if share > least), 1.0)
    optimizer = 1.25 if offloads else 1.0
    weights = 1.05 if strategy == "Offload" or offloads_base else 1.0
    several = 1.25 if nodes > 1 else 1.0
    return crowded * optimizer * weights * several * {0: 1.0, 2: 1.02, 3: 1.04}[zero]
