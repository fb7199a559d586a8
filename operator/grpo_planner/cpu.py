"""Plans jobs with placement.accelerator CPU: small models and tests, one plan, no search.

Exists because a CPU job has no device to fit: only the split of the batch and the pod's memory request are to be
found. Called by plan.plan_job.
"""

from typing import Literal

from grpo_api.base import quantity_bytes
from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan

from .batch import micro_batches, refuse_split, save_every_steps, split

MAX_MICRO_BATCH = 16
"""Larger micro-batches gain nothing on a few cores."""

Strategy = Literal["Clone", "Adapter", "Sharded", "Offload", "None"]


def cpu_strategy(spec: GRPOJobSpec) -> Strategy:
    """The reference strategy of a CPU job: what was asked for, else the plainest that beta and the adapter allow."""
    wanted = spec.reference.strategy
    if spec.training.beta == 0:
        return "None"
    if wanted != "Auto":
        return wanted
    if spec.adapter.use == "Always":
        return "Adapter"
    if spec.reference.offload:
        return "Offload"
    return "Clone"


def plan_cpu(
    spec: GRPOJobSpec, parameters: str, architecture: Literal["Exact", "Catalogue", "Estimated"], host_bytes: int
) -> ExecutionPlan:
    """The plan of a CPU job.

    Args:
        spec: the job.
        parameters: size of the model for the plan, such as `494M`.
        architecture: where the model's shape came from.
        host_bytes: predicted memory of one process; placement.memory takes precedence.

    Raises:
        PlanRefused: the batch can't be split over the processes.
    """
    nodes, processes = spec.placement.nodes or 1, spec.placement.processes_per_node or 1
    world = nodes * processes
    sizes = micro_batches(spec, world, MAX_MICRO_BATCH)
    if not sizes:
        raise refuse_split(spec, world, f"{nodes} nodes * {processes} processes")
    parts = split(spec, world, sizes[-1])
    strategy = cpu_strategy(spec)
    nvme = spec.reference.offload is not None and spec.reference.offload.target == "NVMe"
    return ExecutionPlan(
        strategy=strategy,
        method="LoRA" if spec.adapter.use == "Always" or strategy == "Adapter" else "Full",
        zero_stage=3 if strategy == "Sharded" or nvme else 0,
        accelerator="CPU",
        nodes=nodes,
        processes_per_node=processes,
        micro_batch=parts.micro_batch,
        gradient_accumulation=parts.gradient_accumulation,
        steps_per_generation=parts.steps_per_generation,
        gradient_checkpointing=spec.training.gradient_checkpointing == "Enabled",
        optimizer="AdamW8bit" if spec.training.optimizer == "AdamW8bit" else "AdamW",
        dtype="bfloat16" if spec.training.dtype == "bfloat16" else "float32",
        parameters=parameters,
        architecture=architecture,
        host_memory_bytes=quantity_bytes(spec.placement.memory) if spec.placement.memory else host_bytes * processes,
        save_every_steps=save_every_steps(spec),
        reason=f"accelerator CPU: {world} processes on {nodes} nodes, float32, reference {strategy}",
    )
