"""The engine of an option as the plan publishes it, and in words."""

from math import ceil
from typing import Any

from grpo_api.plan.plan import ExecutionPlan, mismatch_limit
from grpo_api.spec.generation import PROVEN_FAMILIES, EnginePlan
from grpo_api.text.units import GIB

from ..hardware.pools import Pool
from ..memory import engine as terms
from ..memory.host import PROCESS
from ..memory.phases import whole_mib
from ..memory.setup import Setup
from ..result.formatting import engine_plan_name, gib, plural
from .demand import Demand
from .engines import OWN_SHARE

LEAST_SHARE = 0.001
"""Shares are rounded up to a multiple of it."""
CPU_ENGINE_POD = round(1.5 * GIB)
"""Host memory of an engine's pod on CPUs without weights and cache: a process with torch and vLLM
takes 1.1 GiB (measured, vLLM 0.30), and serving some."""
GPU_ENGINE_POD = 2 * GIB
"""The same on GPUs, beside a process for each of them (assumed)."""


def engine_plan(
    demand: Demand, setup: Setup, usable: int, *, sync: float | None, servers: Pool | None
) -> EnginePlan:
    """The engine of a setup on GPUs that have `usable` bytes each; of `servers`, if it has its own.

    `sync`: seconds of one sync.
    """
    engine = terms.engine_of(setup)
    fields = settings(demand, setup) | {"sync_seconds": None if sync is None else round(sync, 2)}
    if servers:
        fields |= {
            "replicas": engine.replicas, "gpus_per_replica": engine.tensor_parallel,
            "gpu_product": servers.label,
            "gpu_hour_price": servers.price or None, "gpu_resource": servers.resource,
            "node_selector": dict(servers.selector),
            "cpu_millicores": servers.default_millicores(engine.tensor_parallel, engine=True),
            "host_memory_bytes": whole_mib(GPU_ENGINE_POD + engine.tensor_parallel * PROCESS),
        }  # fmt: skip
    share = OWN_SHARE if servers else share_of(terms.awake_bytes(demand.shape, setup), usable)
    return EnginePlan(**fields, memory_share=share)


def cpu_engine_plan(demand: Demand, setup: Setup, host: int) -> EnginePlan:
    """The engine of a setup on CPUs; `host` is the memory of the trainer's pod."""
    shape, engine = demand.shape, terms.engine_of(setup)
    fields = settings(demand, setup)
    if engine.kind == "Servers":
        host = whole_mib(CPU_ENGINE_POD + terms.awake_bytes(shape, setup))
        fields |= {"replicas": engine.replicas, "host_memory_bytes": host}
    return EnginePlan(**fields, memory_share=share_of(terms.awake_bytes(shape, setup), host))


def settings(demand: Demand, setup: Setup) -> dict[str, Any]:
    """The fields of EnginePlan that follow from the job and the setup alone."""
    shape, engine = demand.shape, terms.engine_of(setup)
    guard, generation = demand.spec.guard, demand.spec.generation
    return {
        "kind": engine.kind,
        "tensor_parallel": engine.tensor_parallel,
        "sleep": engine.sleeps,
        "offload_base": engine.offloads_base,
        "model_runner": engine.model_runner,
        "max_mismatch": mismatch_limit(guard, generation, setup.compute_dtype),
        "max_model_length": engine.length,
        "max_sequences": terms.sequences(setup),
        "weights_bytes": round(terms.weights(shape, setup)),
        "cache_bytes": terms.cache(shape, setup),
        "graphs_bytes": round(terms.graphs(shape, setup) + terms.work(shape, setup)),
    }


def share_of(needed: int, there: int) -> float:
    """The least share of what is there that holds what is needed, at most 1."""
    steps = ceil(needed / max(1, there) / LEAST_SHARE)
    share = round(steps * LEAST_SHARE, 3)
    return min(1.0, max(LEAST_SHARE, share))


def engine_warnings(demand: Demand, setup: Setup) -> list[str]:
    """What a user of the setup's engine should know; nothing without one."""
    if setup.engine is None:
        return []
    sentences, kind = [], demand.model.model_type
    if kind not in PROVEN_FAMILIES:
        sentences.append(
            f"whether the weights of {f'model type {kind}' if kind else 'this model'} in an "
            "engine can be proven shows "
            f"only at the start; shown for {', '.join(PROVEN_FAMILIES)}"
        )
    return sentences


def sampler_name(plan: ExecutionPlan) -> str:
    """What samples a plan's completions: `Transformers`, `vLLM Colocated over 2 GPUs, asleep while
    training`."""
    engine = plan.engine
    if engine is None:
        return "Transformers"
    beside = ""
    if engine.gpus:
        beside = f", {plural(engine.gpus, 'GPU')} {engine.gpu_product} beside the trainer's"
    runner = ", model runner V1 without CUDA graphs" if engine.model_runner == "V1" else ""
    return f"{engine_plan_name(engine)}{runner}{beside}"


def short_sampler_name(plan: ExecutionPlan) -> str:
    """What samples a plan's completions, short enough for a column of a table: `Transformers`,
    `vLLM over 2, asleep`, `vLLM 2 x 1 GPU`."""
    engine = plan.engine
    if engine is None:
        return "Transformers"
    if engine.kind == "Servers":
        return f"vLLM {engine.replicas} x {plural(engine.gpus_per_replica, 'GPU')}"
    shared = f" over {engine.tensor_parallel}" if engine.tensor_parallel > 1 else ""
    runner = ", runner V1" if engine.model_runner == "V1" else ""
    asleep = ", asleep" if engine.sleep else ""
    base = ", base offloaded" if engine.offload_base else ""
    return f"vLLM{shared}{asleep}{base}{runner}"


def engine_numbers(engine: EnginePlan) -> str:
    """The predicted memory and times of an engine as text, which says what is assumed."""
    sync = ""
    if engine.sync_seconds is not None:
        sync = f", a sync of weights takes {engine.sync_seconds:.1f} s (assumed)"
    if engine.offload_base:
        sync += ", for which the frozen base waits in host memory and comes back over the host link"
    mismatch = "log-probabilities that differ from the trainer's are only printed"
    if engine.max_mismatch is not None:
        mismatch = (
            "log-probabilities may differ from the trainer's by "
            f"{engine.max_mismatch:g} nats in the mean"
        )
    return (
        f"weights {gib(engine.weights_bytes)}, cache {gib(engine.cache_bytes)} for "
        f"{plural(engine.max_sequences, 'completion')} at a time, graphs and work space "
        f"{gib(engine.graphs_bytes)} (assumed), memory share {engine.memory_share:.1%}{sync}; "
        f"{mismatch}"
    )
