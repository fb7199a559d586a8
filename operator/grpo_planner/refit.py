"""Adapts the plan of a resumed run to a spec that has changed since: the same split of work, maybe on other nodes.

A checkpoint requires the number of processes, the split of the batch, the method and the ZeRO stage that it was made
with, so these stay. Placement, resource requests and the engine that samples completions follow the current spec: they
are no part of a checkpoint. Where the spec excludes the plan, the error names the field to change back.
"""

from collections.abc import Iterator

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.generation import EngineServersSpec, GenerationSpec
from grpo_api.text.quantity import quantity_bytes

from .cpu import cpu_engine
from .hardware.declared import ENDLESS
from .hardware.inventory import Inventory
from .hardware.pools import Place, Pool, build_pools
from .memory.device import whole_mib
from .memory.disk import disk_request
from .run import Run
from .search.engines import Engines, server_pools
from .words import gib, plural


class PlanExcluded(ValueError):
    """The spec excludes the plan that the run's checkpoints need; the message says what to change back."""


def refit(plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory) -> ExecutionPlan:
    """The plan, where and with what the spec says now; the same object where nothing concerns it.

    Raises:
        PlanExcluded: the spec's placement leaves no room for it.
    """
    if contradictions := list(_contradictions(plan, spec)):
        extent = f"{plural(plan.nodes, 'node')} with {plural(plan.processes_per_node, 'process')} each"
        changes = "; ".join(contradictions)
        raise PlanExcluded(f"the run goes on from checkpoints of {extent}, and resumes only so: {changes}")
    placed = _with_engine(_on_product(plan, spec, inventory), spec, inventory)
    return _with_requests(placed, spec, inventory)


def _contradictions(plan: ExecutionPlan, spec: GRPOJobSpec) -> Iterator[str]:
    placement, gpus = spec.placement, spec.placement.gpus
    on_cpus = plan.accelerator == "CPU"
    if (spec.nodes or (1 if on_cpus else plan.nodes)) != plan.nodes:
        yield f"set spec.placement.nodes, which is {placement.nodes or 'unset'}, to {plan.nodes}"
    if on_cpus and (placement.processes_per_node or 1) != plan.processes_per_node:
        now = placement.processes_per_node or "unset"
        yield f"set spec.placement.processesPerNode, which is {now}, to {plan.processes_per_node}"
    if gpus and gpus.min > plan.gpus:
        yield f"set spec.placement.gpus.min, which is {gpus.min}, to {plan.gpus} at most"
    if gpus and gpus.max and gpus.max < plan.gpus:
        yield f"set spec.placement.gpus.max, which is {gpus.max}, to {plan.gpus} at least"


def _on_product(plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory) -> ExecutionPlan:
    """The plan on the first GPUs of the wanted product that can run it; it stays where the spec lets it."""
    wanted = spec.placement.gpu_product
    if plan.accelerator == "CPU" or plan.gpu_product.startswith(wanted or ""):
        return plan
    pools, left_out = build_pools(inventory.emptied, spec)
    for pool in pools:
        if not _lacks(plan, pool):
            memory = plan.memory and plan.memory.model_copy(update={"usable_bytes": pool.usable})
            return plan.model_copy(
                update={
                    "gpu_product": pool.label,
                    "gpu_hour_price": pool.price or None,
                    "gpu_resource": pool.resource,
                    "node_selector": dict(pool.selector),
                    "memory": memory,
                    "estimated_step_seconds": None,
                    "reason": f"goes on as it began, on {plan.gpus} x {pool.gpu_name}",
                }
            )
    problems = {f"{pool.gpu_name} {_lacks(plan, pool)}" for pool in pools}
    why = "; ".join([*sorted(problems), *left_out])
    raise PlanExcluded(
        f"spec.placement.gpuProduct {wanted}: the run goes on from checkpoints of {plan.gpus} x {plan.gpu_product} on "
        f"{plural(plan.nodes, 'node')}, and {why or 'no node has such GPUs'}: change it, or set it back to "
        f"{plan.gpu_product}"
    )


def _with_engine(plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory) -> ExecutionPlan:
    """The plan with an engine as the spec says now; as it is where the spec leaves it so."""
    if _agrees(plan, spec.generation):
        return plan
    run = Run(plan, spec, Learned(), inventory)
    if run.plan.accelerator == "CPU":
        return run.with_engine(cpu_engine(run.demand), None).plan
    nodes = inventory.emptied
    pools, _ = build_pools(nodes, spec)
    pools = [pool for pool in pools if (pool.label, pool.resource) == _gpu(plan)]
    if not pools:
        return plan
    place = Place(pools[0], plan.nodes, plan.gpus_per_node, ENDLESS)
    engines = Engines(run.demand, server_pools(nodes, spec))
    engines_to_try = engines.tried(place, run.setup.precision)
    runs = (run.with_engine(engine, engines.server_pool(place)) for engine in engines_to_try)
    for candidate in runs:
        if candidate.fits():
            return candidate.plan
    # An engine that the spec doesn't ask for must not end the run: it goes on as it has run.
    if spec.generation.engine == "Auto":
        return plan
    raise PlanExcluded(
        f"spec.generation.engine {spec.generation.engine}: beside the split that the run goes on with, on "
        f"{plan.gpus} x {plan.gpu_product}, there is no room for it: set it to Auto, or to what it was"
    )


def _gpu(plan: ExecutionPlan) -> tuple[str, str]:
    return plan.gpu_product, plan.gpu_resource


def _agrees(plan: ExecutionPlan, wanted: GenerationSpec) -> bool:
    """Whether the plan's engine is one that the spec asks for, or leaves open."""
    engine = plan.engine
    if wanted.engine not in ("Auto", engine.kind if engine else "Transformers"):
        return False
    if engine is None:
        return True
    if engine.kind == "Colocated":
        same_share = wanted.memory_share in (None, engine.memory_share)
        # An engine on CPUs never sleeps, whatever the spec says.
        same_sleep = wanted.sleep in (None, engine.sleep) or plan.accelerator == "CPU"
        return same_share and same_sleep
    servers = wanted.servers or EngineServersSpec()
    product = engine.gpu_product.startswith(servers.gpu_product or plan.gpu_product)
    gpus = servers.gpus_per_replica == engine.gpus_per_replica or plan.accelerator == "CPU"
    return product and gpus and servers.replicas == engine.replicas


def _lacks(plan: ExecutionPlan, pool: Pool) -> str:
    """Why the pool's GPUs can't run the plan; empty when they can."""
    needs_bfloat16 = plan.dtype == "bfloat16" or plan.autocast
    if needs_bfloat16 and not pool.hardware.bfloat16:
        return "has no bfloat16"
    if plan.memory and plan.memory.device_bytes > pool.usable:
        return f"has {gib(pool.usable)} per GPU, where {gib(plan.memory.device_bytes)} are needed"
    wide_nodes = sum(count for room, count in pool.rooms if room.gpus >= plan.gpus_per_node)
    return "" if wide_nodes >= plan.nodes else f"has {plural(wide_nodes, 'node')} with {plan.gpus_per_node} GPUs"


def _with_requests(plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory) -> ExecutionPlan:
    """The plan with the memory and the disk that a pod asks for: the spec's requests, or what was predicted."""
    wanted = {
        "host_memory_bytes": _memory(plan, spec),
        "ephemeral_storage_bytes": disk_request(spec, reported=inventory.reports_disk),
    }
    same = all(getattr(plan, name) == amount for name, amount in wanted.items())
    return plan if same else plan.model_copy(update=wanted)


def _memory(plan: ExecutionPlan, spec: GRPOJobSpec) -> int:
    requested = spec.resources.requested.get("memory")
    if requested is not None:
        return quantity_bytes(requested)
    return whole_mib(plan.memory.host_bytes_per_node) if plan.memory else plan.host_memory_bytes
