"""Turns options into plans, and numbers into sentences.

Exists so that the search stays free of text. Used by plan.py and fixes.py.
"""

from collections.abc import Sequence

from grpo_api.plan import ExecutionPlan, MemoryPhases, MemoryPrediction

from .memory.device import checkpoint_bytes, whole_mib
from .result import Candidate, Rejection
from .search.batch import save_every_steps
from .search.demand import Demand
from .search.search import Option
from .words import gib, plural


def gpus(option: Option) -> str:
    """`8 x NVIDIA-L4 on 2 nodes`."""
    layout = option.layout
    return f"{layout.world} x {option.pool.label or option.pool.resource} on {plural(layout.nodes, 'node')}"


def as_plan(demand: Demand, option: Option, reason: str = "", warnings: Sequence[str] = ()) -> ExecutionPlan:
    """The candidate as an ExecutionPlan."""
    spec, setup, method, split = demand.spec, option.setup, option.method, option.split
    sub_batch = setup.generation_batch if setup.generation_batch < split.generation_batch else 0
    return ExecutionPlan(
        strategy=method.strategy, method="LoRA" if method.lora else "Full", zero_stage=method.zero,
        offload="CPU" if method.offload else "None", gpus=option.layout.world, nodes=option.layout.nodes,
        gpus_per_node=option.layout.per_node, processes_per_node=option.layout.per_node,
        gpu_product=option.pool.label, gpu_resource=option.pool.resource, node_selector=dict(option.pool.selector),
        micro_batch=split.micro_batch, gradient_accumulation=split.gradient_accumulation,
        steps_per_generation=split.steps_per_generation, generation_sub_batch=sub_batch,
        gradient_checkpointing=setup.checkpointing, gather_for_generation=setup.gather,
        optimizer="AdamW8bit" if setup.eight_bit else "AdamW",
        dtype="bfloat16" if setup.precision == "bfloat16" else "float32",
        autocast=setup.precision == "mixed" or (setup.precision == "bfloat16" and not setup.zero),
        parameters=demand.label, architecture=demand.source, memory=_memory(demand, option),
        host_memory_bytes=demand.pod_memory or whole_mib(option.host), estimated_step_seconds=round(option.seconds, 2),
        save_every_steps=save_every_steps(spec), reason=reason, changes=changes(demand, option),
        warnings=[*warnings][:16],
    )  # fmt: skip


def _memory(demand: Demand, option: Option) -> MemoryPrediction:
    """The prediction as the plan publishes it."""
    prediction = option.prediction
    return MemoryPrediction(
        phases=MemoryPhases(**prediction.phases), peak_phase=prediction.peak_phase,
        peak_allocated_bytes=prediction.peak, device_bytes=option.device, usable_bytes=option.pool.usable,
        host_bytes_per_node=option.host,
        checkpoint_bytes=checkpoint_bytes(demand.shape, option.setup, demand.spec.reference.sync is not None),
    )  # fmt: skip


def changes(demand: Demand, option: Option) -> list[str]:
    """What a user who asked for neither an adapter nor 8 bits must be told."""
    spec, told = demand.spec, []
    if option.method.lora and spec.adapter.use != "Always" and spec.reference.strategy != "Adapter":
        trained = demand.shape.adapter_parameters(spec.adapter.rank)
        told.append(
            f"trains a LoRA adapter of rank {spec.adapter.rank} on {', '.join(spec.adapter.target_modules)} only "
            f"({trained / demand.shape.parameters:.2%} of the parameters), because no plan with all parameters fits; "
            f"learningRate {spec.training.learning_rate:g} is not rescaled (adapters usually want about ten times "
            "more); set spec.adapter.use to Never to refuse this, or to Always to ask for it"
        )
    if option.setup.eight_bit and spec.training.optimizer == "Auto":
        told.append("keeps AdamW's moments in 8 bits, because no plan with 32-bit moments fits")
    return told


def warnings(demand: Demand, option: Option) -> list[str]:
    """What the planner could not know about the chosen option."""
    told = list(demand.notes)
    if not option.pool.hardware.known:
        told.append(f"GPU product {option.pool.label!r} is unknown: its speed, and that it has bfloat16, are guesses")
    if option.setup.precision == "bfloat16" and not option.method.lora and not option.method.zero:
        told.append(
            "dtype bfloat16 without ZeRO has no float32 master weights: small updates can round away; "
            "set spec.training.dtype to Auto for float32 weights under bfloat16 autocast"
        )
    if not option.pool.hardware.bfloat16:
        told.append(f"{option.pool.label} has no bfloat16: everything runs in float32")
    return told


def reason(option: Option) -> str:
    """Why this plan, in a sentence with its numbers."""
    return (
        f"{option.method.name} on {gpus(option)}: needs {gib(option.device)} of {gib(option.pool.usable)} per GPU "
        f"at {option.prediction.peak_phase}, about {option.seconds:.1f} s per step"
    )


def candidates(demand: Demand, options: Sequence[Option], chosen: Option | None) -> list[Candidate]:
    """Every family's best: the chosen one first, then what fits by time, then what does not by how much it lacks."""
    ordered = sorted(
        options,
        key=lambda o: (
            o is not chosen, o.shortage is not None, o.method.tier if not o.shortage else 0,
            o.seconds if not o.shortage else o.device / max(1, o.pool.usable), o.preference,
        ),
    )  # fmt: skip
    return [Candidate.of(as_plan(demand, o), _rejection(o, chosen)) for o in ordered]


def _rejection(option: Option, chosen: Option | None) -> Rejection | None:
    """Why an option was not chosen."""
    phase = option.prediction.peak_phase
    need, have = option.device, option.pool.usable
    if option is chosen:
        return None
    if option.shortage == "DeviceMemory":
        message = f"needs {gib(need)} at {phase}, has {gib(have)}"
    elif option.shortage == "HostMemory":
        need, have = option.host, option.host_room
        message = f"needs {gib(need)} of host memory per node, has {gib(have)}"
    elif chosen and option.method.tier > chosen.method.tier:
        message = "not needed: all parameters fit" if option.method.lora else "not needed: 32-bit moments fit"
        return Rejection(reason="NotNeeded", message=message, phase=phase, need_bytes=need, have_bytes=have)
    elif chosen and option.seconds > chosen.seconds:
        message = f"{option.seconds / chosen.seconds - 1:.1%} slower"
        return Rejection(reason="Slower", message=message, phase=phase, need_bytes=need, have_bytes=have)
    else:
        message = _no_better(option, chosen) if chosen else ""
        return Rejection(reason="NoBetter", message=message, phase=phase, need_bytes=need, have_bytes=have)
    return Rejection(reason=option.shortage, message=message, phase=phase, need_bytes=need, have_bytes=have)


def _no_better(option: Option, chosen: Option) -> str:
    """What an option that is no slower would cost: `2.1% faster, but 4 GPUs instead of 1`."""
    costs = {
        f"{option.layout.world} GPUs instead of {chosen.layout.world}": option.layout.world > chosen.layout.world,
        "optimizer offload": option.method.offload and not chosen.method.offload,
        "its reference in host memory": option.method.reference == "Offload" and chosen.method.reference != "Offload",
        f"ZeRO-{option.method.zero}": option.method.zero > chosen.method.zero,
        plural(option.layout.nodes, "node"): option.layout.nodes > chosen.layout.nodes,
    }
    gain = 1 - option.seconds / chosen.seconds
    cost = next((cost for cost, dearer in costs.items() if dearer), f"on {option.pool.label}")
    return f"{gain:.1%} faster, but {cost}"
