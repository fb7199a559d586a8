"""Plans jobs with placement.accelerator CPU: small models and tests, one plan, no search.

Exists because a CPU job has no device to fit: only the split of the batch and the pod's memory request are to be
found. Called by plan.plan_job.
"""

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan

from .memory import Setup, predict
from .memory.device import CPU_PROCESS, whole_mib
from .search.batch import micro_batches, refuse_split, save_every_steps, split
from .search.demand import Demand, Method, methods, refuse_pins
from .words import plural

MAX_MICRO_BATCH = 16
"""Larger micro-batches gain nothing on a few cores."""


def cpu_method(spec: GRPOJobSpec) -> Method:
    """The simplest way of training that the pins allow; ZeRO-2 and an offloaded optimizer save nothing on CPUs.

    Raises:
        PlanRefused: the pins exclude one another.
    """
    found = [method for method in methods(spec) if method.zero != 2 and not method.offload]
    if not found:
        raise refuse_pins(spec)
    return found[0]


def cpu_process_bytes(demand: Demand, setup: Setup) -> int:
    """Memory of one process: the libraries and the model's peak, all of it in host memory."""
    prediction = predict(demand.shape, setup, demand.reward_bytes)
    reference = demand.shape.parameters * setup.weight_bytes if setup.reference == "Offload" else 0
    return round(CPU_PROCESS + prediction.peak + reference)


def plan_cpu(demand: Demand) -> ExecutionPlan:
    """The plan of a CPU job.

    Raises:
        PlanRefused: the batch can't be split over the processes, or the pins exclude one another.
    """
    spec = demand.spec
    method = cpu_method(spec)
    nodes, processes = spec.placement.nodes or 1, spec.placement.processes_per_node or 1
    world = nodes * processes
    sizes = micro_batches(spec, world, MAX_MICRO_BATCH)
    if not sizes:
        raise refuse_split(spec, world, f"{plural(nodes, 'node')} with {plural(processes, 'process')} each")
    parts = split(spec, world, sizes[-1])
    extent = f"{plural(world, 'process')} on {plural(nodes, 'node')}"
    bfloat16 = spec.training.dtype == "bfloat16"
    setup = Setup(
        "bfloat16" if bfloat16 else "float32", spec.training.max_prompt_length, spec.training.max_completion_length,
        parts.micro_batch, parts.gradient_accumulation, parts.generation_batch, world, method.zero,
        lora_rank=spec.adapter.rank if method.lora else 0, eight_bit=method.eight_bit,
        checkpointing=spec.training.gradient_checkpointing == "Enabled", reference=method.reference,
    )  # fmt: skip
    host = demand.pod_memory or processes * cpu_process_bytes(demand, setup)
    return ExecutionPlan(
        strategy=method.strategy,
        method="LoRA" if method.lora else "Full",
        zero_stage=setup.zero,
        accelerator="CPU",
        nodes=nodes,
        processes_per_node=processes,
        micro_batch=parts.micro_batch,
        gradient_accumulation=parts.gradient_accumulation,
        steps_per_generation=parts.steps_per_generation,
        gradient_checkpointing=setup.checkpointing,
        optimizer="AdamW8bit" if setup.eight_bit else "AdamW",
        dtype="bfloat16" if bfloat16 else "float32",
        parameters=demand.label,
        architecture=demand.source,
        host_memory_bytes=whole_mib(host),
        save_every_steps=save_every_steps(spec),
        reason=f"accelerator CPU: {extent}, {setup.precision}, reference {method.strategy}",
    )
