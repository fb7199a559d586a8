"""plan_job: the planner's front door, from a spec and an inventory to a PlanResult.

Exists to bring the parts together and to turn a refusal into an answer. Called by the operator before each attempt
and by `grpo plan`.
"""

from collections.abc import Mapping
from typing import Any

from grpo_api.base import quantity_bytes
from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan

from .architecture import Resolved, resolve
from .batch import micro_batches, refuse_split, save_every_steps, split
from .cpu import plan_cpu
from .inventory import Inventory, Node
from .result import Candidate, PlanReason, PlanRefused, PlanResult
from .seed_rule import seed_rule

MIB, GIB = 2**20, 2**30


def plan_job(spec: GRPOJobSpec, inventory: Inventory, *, config: Mapping[str, Any] | None = None) -> PlanResult:
    """How to run a job on these nodes, or why not. Deterministic: the same arguments give the same bytes.

    Args:
        spec: the job.
        inventory: nodes that its pods may be bound to.
        config: the model's config.json, where the caller could read it.
    """
    try:
        _refuse_impossible(spec)
        resolved = resolve(spec.model, config)
        chosen = _cpu(spec, resolved) if spec.placement.accelerator == "CPU" else _gpu(spec, resolved, inventory)
    except PlanRefused as refused:
        return PlanResult(feasible=False, reason=refused.reason, message=str(refused))
    return PlanResult(
        feasible=True,
        fits_now=True,
        reason=PlanReason.PLANNED,
        message=chosen.reason,
        chosen=chosen,
        candidates=[Candidate(plan=chosen)],
        changes=chosen.changes,
        architecture=chosen.architecture,
    )


def _refuse_impossible(spec: GRPOJobSpec) -> None:
    """Refuses combinations that no plan can honour."""
    if spec.adapter.use == "Always" and spec.reference.strategy in ("Clone", "Sharded", "Offload"):
        raise PlanRefused(
            PlanReason.INVALID_COMBINATION,
            f"spec.reference.strategy {spec.reference.strategy} with spec.adapter.use Always: the reference of an "
            "adapter is its own frozen base; set strategy to Auto or Adapter, or adapter.use to Never",
        )


def _cpu(spec: GRPOJobSpec, resolved: Resolved) -> ExecutionPlan:
    """A CPU plan: 24 bytes per parameter (float32 weights, gradients, Adam, reference) above the libraries."""
    return plan_cpu(spec, resolved.label, resolved.source, GIB + 24 * resolved.shape.parameters)


def _gpu(spec: GRPOJobSpec, resolved: Resolved, inventory: Inventory) -> ExecutionPlan:
    """The seed's rule on the node with most GPUs."""
    nodes = [node for node in inventory.nodes if node.gpus_total]
    if not nodes:
        raise PlanRefused(PlanReason.NO_GPUS, "no node with usable GPUs: " + ("; ".join(inventory.warnings) or "none"))
    node = max(nodes, key=lambda one: (one.gpus_total, one.gpu_memory_mib, one.name))
    wanted = spec.placement.gpus
    pods = spec.placement.nodes or 1
    most = min(node.gpus_total * pods, (wanted.max if wanted and wanted.max else 8))
    counts = [n for n in range(most, 0, -1) if n % pods == 0 and micro_batches(spec, n, 8)]
    if not counts or (wanted and counts[0] < wanted.min):
        raise refuse_split(spec, wanted.min if wanted else pods, f"{wanted.min if wanted else pods} GPUs")
    return _simple_plan(spec, resolved, node, pods, counts[0])


def _simple_plan(spec: GRPOJobSpec, resolved: Resolved, node: Node, pods: int, gpus: int) -> ExecutionPlan:
    """The plan of the seed's rule on `gpus` GPUs of `pods` nodes like this one."""
    memory = node.gpu_memory_mib * MIB
    if spec.placement.gpu_memory:
        memory = quantity_bytes(spec.placement.gpu_memory)
    rule = seed_rule(resolved.shape.parameters, memory)
    strategy = rule if spec.reference.strategy == "Auto" else spec.reference.strategy
    parts = split(spec, gpus, micro_batches(spec, gpus, 8)[-1])
    return ExecutionPlan(
        strategy="None" if spec.training.beta == 0 else strategy,
        method="LoRA" if strategy == "Adapter" else "Full",
        zero_stage=3 if strategy == "Sharded" else 0,
        gpus=gpus,
        nodes=pods,
        gpus_per_node=gpus // pods,
        processes_per_node=gpus // pods,
        gpu_product=node.gpu_product,
        gpu_resource=node.gpu_resource,
        node_selector=dict(node.node_selector),
        micro_batch=parts.micro_batch,
        gradient_accumulation=parts.gradient_accumulation,
        steps_per_generation=parts.steps_per_generation,
        gradient_checkpointing=True,
        dtype="bfloat16",
        parameters=resolved.label,
        architecture=resolved.source,
        host_memory_bytes=16 * GIB,
        save_every_steps=save_every_steps(spec),
        reason=f"{resolved.label} parameters on {gpus} GPUs",
    )
