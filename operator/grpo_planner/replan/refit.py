"""Adapts the plan of a resumed run to a spec that has changed since.

A resumed run keeps its split of work, maybe on other nodes. A checkpoint requires the number of
processes, the split of the batch, the method and the ZeRO stage that it was made with. Placement,
resource requests and the engine that samples completions follow the current spec, since they are no
part of a checkpoint. An engine that the spec still asks for goes on. Where the spec excludes the
plan, the error names the field to change back.
"""

from collections.abc import Iterator
from math import ceil

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan, mismatch_limit
from grpo_api.spec.generation import EnginePlan, EngineServersSpec, GenerationSpec
from grpo_api.spec.run_policy import PlacementSpec
from grpo_api.text.quantity import quantity_bytes

from ..hardware.inventory import ENDLESS, Inventory
from ..hardware.pools import Place, Pool, build_pools, pool_of
from ..hardware.products import is_of_product
from ..memory.disk import disk_request
from ..memory.phases import whole_mib
from ..model.architecture import from_architecture
from ..result.formatting import distinct_gib, plural
from ..search.cpu_plan import cpu_engine
from ..search.engines import Engines, server_pools
from ..time.step_time import assumed_link
from .past_run import Run


class PlanExcluded(ValueError):
    """The spec excludes the plan that the run's checkpoints need; the message says what to change
    back."""


def refit(
    plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory, learned: Learned | None = None
) -> ExecutionPlan:
    """The plan, where and with what the spec says now; the same object where nothing concerns it.

    `learned` is what attempts found: engines that failed count for an engine that the spec now asks
    for.

    Raises:
        PlanExcluded: the spec's placement leaves no room for it.
    """
    if contradictions := list(_contradictions(plan, spec)):
        nodes = plural(plan.nodes, "node")
        processes = plural(plan.processes_per_node, "process")
        changes = "; ".join(contradictions)
        raise PlanExcluded(
            f"the run goes on from checkpoints of {nodes} with {processes} each, and resumes only "
            f"so: {changes}"
        )
    on_product = _on_product(plan, spec, inventory)
    run = Run(on_product, spec, learned or Learned(), inventory)
    with_engine = _with_engine(run)
    with_guard = _with_guard(with_engine, spec)
    return _with_requests(with_guard, spec, inventory, run.learned)


def _contradictions(plan: ExecutionPlan, spec: GRPOJobSpec) -> Iterator[str]:
    placement = spec.placement
    on_cpus = plan.accelerator == "CPU"
    default_nodes = 1 if on_cpus else plan.nodes
    wanted_nodes = spec.nodes or default_nodes
    if wanted_nodes != plan.nodes:
        now = placement.nodes or "unset"
        yield f"set spec.placement.nodes, which is {now}, to {plan.nodes}"
    wanted_processes = placement.processes_per_node or 1
    if on_cpus and wanted_processes != plan.processes_per_node:
        now = placement.processes_per_node or "unset"
        yield f"set spec.placement.processesPerNode, which is {now}, to {plan.processes_per_node}"
    yield from _contradicting_gpus(plan, placement)


def _contradicting_gpus(plan: ExecutionPlan, placement: PlacementSpec) -> Iterator[str]:
    gpus = placement.gpus
    per_node = placement.gpus_per_node
    if per_node and per_node < plan.gpus_per_node:
        yield (
            f"set spec.placement.gpusPerNode, which is {per_node}, to {plan.gpus_per_node} at least"
        )
    if gpus and gpus.min > plan.gpus:
        yield f"set spec.placement.gpus.min, which is {gpus.min}, to {plan.gpus} at most"
    if gpus and gpus.max and gpus.max < plan.gpus:
        yield f"set spec.placement.gpus.max, which is {gpus.max}, to {plan.gpus} at least"


def _on_product(plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory) -> ExecutionPlan:
    """The plan on the first GPUs of the wanted product that can run it; it stays where the spec
    lets it."""
    wanted = spec.placement.gpu_product
    if plan.accelerator == "CPU" or is_of_product(plan.gpu_product, wanted or ""):
        return plan
    pools, left_out = build_pools(inventory.without_usage, spec)
    problems: set[str] = set()
    for pool in pools:
        problem = _pool_problem(plan, pool)
        if not problem:
            return _on_pool(plan, pool)
        problems.add(f"{pool.gpu_name} {problem}")
    reasons = sorted(problems) or ["no node has such GPUs"]
    why = "; ".join([*reasons, *left_out])
    gpus = f"{plan.gpus} x {plan.gpu_product}"
    nodes = plural(plan.nodes, "node")
    raise PlanExcluded(
        f"spec.placement.gpuProduct {wanted}: the run goes on from checkpoints of {gpus} on "
        f"{nodes}, and {why}: change it, or set it back to {plan.gpu_product}"
    )


def _on_pool(plan: ExecutionPlan, pool: Pool) -> ExecutionPlan:
    """The plan on the pool's GPUs, which have room for it."""
    memory = plan.memory
    if memory:
        memory = memory.model_copy(update={"usable_bytes": pool.usable_bytes})
    link = assumed_link(pool.hardware, plan.nodes, plan.gpus_per_node)
    fields = {
        "gpu_product": pool.label,
        "gpu_hour_price": pool.price or None,
        "gpu_resource": pool.resource,
        "node_selector": dict(pool.selector),
        "memory": memory,
        "estimated_step_seconds": None,
        "link_bytes_per_second": link,
        "reason": f"goes on as it began, on {plan.gpus} x {pool.gpu_name}",
    }
    return plan.model_copy(update=fields)


def _with_engine(run: Run) -> ExecutionPlan:
    """The plan with an engine as the spec says now; as it is where the spec leaves it so."""
    plan = run.plan
    spec = run.spec
    if is_as_pinned(plan, spec.generation):
        return plan
    if plan.engine is None and run.demand.has_given_up_engine:
        return plan
    if plan.accelerator == "CPU":
        engine_on_cpus = cpu_engine(run.demand)
        return run.with_engine(engine_on_cpus, None).plan
    nodes = run.inventory.without_usage
    all_pools, _ = build_pools(nodes, spec)
    pool = pool_of(all_pools, plan.gpu_product, plan.gpu_resource)
    if pool is None:
        return plan
    place = Place(pool, plan.nodes, plan.gpus_per_node, ENDLESS)
    engines = Engines(run.demand, server_pools(nodes, spec))
    beside = engines.server_pool(place)
    candidates = [
        run.with_engine(engine, beside) for engine in engines.candidates(place, run.setup.precision)
    ]
    fitting = [candidate for candidate in candidates if candidate.may_fit()]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_seconds).plan
    # An engine that the spec doesn't ask for must not end the run: it goes on as it has run.
    if spec.generation.engine == "Auto":
        return plan
    raise PlanExcluded(
        f"spec.generation.engine {spec.generation.engine}: beside the split that the run goes on "
        f"with, on {plan.gpus} x {plan.gpu_product}, there is no room for it: set it to Auto, or "
        "to what it was"
    )


def _pool_problem(plan: ExecutionPlan, pool: Pool) -> str:
    """Why the pool's GPUs can't run the plan; empty when they can."""
    needs_bfloat16 = plan.dtype == "bfloat16" or plan.autocast
    if needs_bfloat16 and not pool.hardware.has_bfloat16:
        return "has no bfloat16"
    needed_bytes = plan.memory.device_bytes if plan.memory else 0
    if needed_bytes > pool.usable_bytes:
        usable, needed = distinct_gib(pool.usable_bytes, needed_bytes)
        return f"has {usable} per GPU, where {needed} are needed"
    wide_nodes = sum(count for room, count in pool.rooms if room.gpus >= plan.gpus_per_node)
    if wide_nodes >= plan.nodes:
        return ""
    nodes = plural(wide_nodes, "node")
    return f"has {nodes} with {plan.gpus_per_node} GPUs"


def _with_guard(plan: ExecutionPlan, spec: GRPOJobSpec) -> ExecutionPlan:
    """The plan with the limit of spec.guard for its engine's numbers."""
    engine = plan.engine
    if engine is None:
        return plan
    limit = mismatch_limit(spec.guard, spec.generation, plan.compute_dtype)
    if engine.max_mismatch == limit:
        return plan
    return plan.model_copy(update={"engine": engine.model_copy(update={"max_mismatch": limit})})


def _with_requests(
    plan: ExecutionPlan, spec: GRPOJobSpec, inventory: Inventory, learned: Learned
) -> ExecutionPlan:
    """The plan with the memory and the disk that a pod asks for: the spec's requests, or what was
    predicted."""
    policy = from_architecture(learned.architecture) if learned.architecture else None
    disk_bytes = disk_request(spec, reported=inventory.reports_disk, policy=policy)
    wanted = {
        "host_memory_bytes": _memory(plan, spec),
        "ephemeral_storage_bytes": disk_bytes,
    }
    is_unchanged = all(getattr(plan, name) == amount for name, amount in wanted.items())
    return plan if is_unchanged else plan.model_copy(update=wanted)


def _memory(plan: ExecutionPlan, spec: GRPOJobSpec) -> int:
    requested = spec.resources.completed_requests.get("memory")
    if requested is not None:
        return quantity_bytes(requested)
    return whole_mib(plan.memory.host_bytes_per_node) if plan.memory else plan.host_memory_bytes


def is_as_pinned(plan: ExecutionPlan, wanted: GenerationSpec) -> bool:
    """True if the plan's engine is one that the spec asks for, or leaves open."""
    engine = plan.engine
    kind = engine.kind if engine else "Transformers"
    if wanted.engine not in ("Auto", kind):
        return False
    if not _samples_as_many(plan, wanted.sequences_at_a_time):
        return False
    if engine is None:
        return True
    on_cpus = plan.accelerator == "CPU"
    if engine.kind == "Colocated":
        return _colocated_is_as_pinned(engine, wanted, on_cpus=on_cpus)
    servers = wanted.servers or EngineServersSpec()
    wanted_product = servers.gpu_product or plan.gpu_product
    same_product = is_of_product(engine.gpu_product, wanted_product)
    same_gpus = on_cpus or servers.gpus_per_replica == engine.gpus_per_replica
    same_replicas = servers.replicas == engine.replicas
    return same_product and same_gpus and same_replicas


def _colocated_is_as_pinned(engine: EnginePlan, wanted: GenerationSpec, *, on_cpus: bool) -> bool:
    """True if an engine beside the trainer has what the spec pins of it."""
    same_share = wanted.memory_share in (None, engine.memory_share)
    # An engine on CPUs or model runner V1 never sleeps, whatever the spec says.
    never_sleeps = on_cpus or engine.model_runner == "V1"
    same_sleep = never_sleeps or wanted.sleep in (None, engine.sleep)
    same_gpus = on_cpus or wanted.tensor_parallel in (None, engine.tensor_parallel)
    return same_share and same_sleep and same_gpus


def _samples_as_many(plan: ExecutionPlan, wanted: int | None) -> bool:
    """True if as many completions are sampled at a time as are wanted, or all there are; true where
    the spec leaves it open."""
    if wanted is None:
        return True
    whole = plan.micro_batch * plan.steps_per_generation
    engine = plan.engine
    if engine is None:
        return (plan.generation_sub_batch or whole) == min(wanted, whole)
    if engine.kind == "Servers":
        all_completions = ceil(whole * plan.world_size / engine.replicas)
    else:
        all_completions = whole * engine.tensor_parallel
    return engine.max_sequences == min(wanted, all_completions)
