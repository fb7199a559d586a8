"""Plans jobs with placement.accelerator CPU: small models and tests, one plan, no search.

A CPU job has no device to fit: only the split of the batch and the pod's memory request are to be
found. A vLLM engine is no faster there, so it has one only where the spec asks for it.
"""

from dataclasses import replace
from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import HOST
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.generation import EngineServersSpec

from ..hardware.products import CPU, CPU_LABEL
from ..memory.host import CPU_ENGINE_PROCESS, CPU_PROCESS
from ..memory.phases import predict, whole_mib
from ..memory.setup import Engine, Setup
from ..result.formatting import plan_texts, plural
from ..time.measured_runs import sampler_of
from ..time.step_time import step_time
from .batch import (
    accumulation,
    generate_calls,
    generation_share,
    generation_sizes,
    indivisible,
    micro_batches,
    should_score_old_policy,
)
from .demand import Demand, step_fields, training_fields
from .engine_plan import cpu_engine_plan, engine_warnings
from .engines import check, engine_of
from .methods import Method, conflicting_pins, methods


def plan_cpu(demand: Demand) -> ExecutionPlan:
    """The plan of a CPU job.

    Raises:
        SpecRejected: the batch can't be split over the processes, or the pins exclude one another.
    """
    check(demand)
    spec = demand.spec
    method = cpu_method(spec)
    nodes = spec.placement.nodes or 1
    processes = spec.placement.processes_per_node or 1
    world = nodes * processes
    sizes = micro_batches(spec, world)
    if not sizes:
        raise indivisible(
            spec, world, f"{plural(nodes, 'node')} with {plural(processes, 'process')} each"
        )
    setup = cpu_setup(spec, method, world, sizes[-1], cpu_engine(demand))
    memory = whole_mib(demand.pod_memory or cpu_pod_bytes(demand, setup, processes))
    sampled = f", completions by vLLM {setup.engine.kind}" if setup.engine else ""
    extent = f"{plural(world, 'process')} on {plural(nodes, 'node')}"
    engine = cpu_engine_plan(demand, setup, memory) if setup.engine else None
    time = _time_fields(demand, setup, nodes)
    return ExecutionPlan(
        **training_fields(demand, method, setup),
        accelerator="CPU",
        nodes=nodes,
        processes_per_node=processes,
        host_memory_bytes=memory,
        engine=engine,
        reason=(
            f"accelerator CPU: {extent}, {setup.precision}, reference {method.strategy}{sampled}"
        ),
        **time,
        warnings=plan_texts([*demand.notes, *engine_warnings(demand, setup)]),
    )


def _time_fields(demand: Demand, setup: Setup, nodes: int) -> dict[str, Any]:
    """What a plan says of its time: nothing where no run on CPUs was measured, as machines differ
    too much."""
    sampler = sampler_of(setup.engine)
    correction = demand.correction(CPU_LABEL, setup.world, nodes, sampler)
    if correction is None:
        return {}
    prompts = demand.learned.prompts
    timed = replace(setup, expected=demand.expected_completion, prompts=prompts)
    whole = generation_share(demand.spec, setup.world)
    calls = generate_calls(timed, whole, demand.updates_per_generation)
    time = step_time(demand.shape, timed, CPU, nodes, calls, measured=correction)
    seconds = round(time.total, 2)
    return {
        "estimated_step_seconds": seconds,
        "expected_completion_length": demand.expected_completion,
        **step_fields(correction),
    }


def cpu_method(spec: GRPOJobSpec) -> Method:
    """Return the simplest way of training that the pins allow.

    Raises:
        SpecRejected: the pins exclude one another.
    """
    for method in methods(spec):
        # ZeRO-2 and an offloaded optimizer save nothing on CPUs.
        if method.zero != 2 and not method.offload:
            return method
    raise conflicting_pins(spec)


def cpu_setup(
    spec: GRPOJobSpec, method: Method, world: int, micro_batch: int, engine: Engine | None
) -> Setup:
    """The settings of a CPU job: nothing is saved that isn't asked for, since host memory can be
    asked for."""
    whole = generation_share(spec, world)
    lora_rank = spec.adapter.rank if method.lora else 0
    return Setup(
        precision="bfloat16" if spec.training.dtype == "bfloat16" else "float32",
        prompt=spec.training.max_prompt_length,
        completion=spec.training.max_completion_length,
        micro_batch=micro_batch,
        accumulation=accumulation(spec, world, micro_batch),
        generation_batch=whole if engine else generation_sizes(spec, world)[0],
        world=world,
        zero=method.zero,
        lora_rank=lora_rank,
        lora_targets=tuple(spec.adapter.target_modules),
        eight_bit=method.eight_bit,
        checkpointing=spec.training.gradient_checkpointing == "Enabled",
        sorts_words=spec.training.top_p < 1,
        iterations=spec.training.num_iterations,
        reference=method.reference,
        scores_old_policy=should_score_old_policy(spec, has_engine=engine is not None),
        engine=engine,
    )


def cpu_engine(demand: Demand) -> Engine | None:
    """The engine that the spec asks for; it has no GPUs to share, no sleep and no graphs."""
    wanted = demand.spec.generation
    if wanted.engine not in ("Colocated", "Servers") or demand.has_given_up_engine:
        return None
    replicas = 0
    if wanted.engine == "Servers":
        servers = wanted.servers or EngineServersSpec()
        replicas = servers.replicas
    return engine_of(demand, wanted.engine, 1, replicas=replicas)


def cpu_pod_bytes(demand: Demand, setup: Setup, processes: int) -> int:
    """Memory of a pod with `processes` processes."""
    return demand.tracker_bytes + processes * cpu_process_bytes(demand, setup)


def cpu_process_bytes(demand: Demand, setup: Setup) -> int:
    """Memory of one process: the libraries and the model's peak, all of it in host memory."""
    prediction = predict(demand.shape, setup, demand.reward_bytes)
    reference = demand.shape.parameters * setup.weight_bytes if setup.reference == "Offload" else 0
    has_engine_inside = setup.engine is not None and setup.engine.kind == "Colocated"
    engine = CPU_ENGINE_PROCESS if has_engine_inside else 0
    return round((CPU_PROCESS + engine + prediction.peak + reference) * demand.learned.factor(HOST))
