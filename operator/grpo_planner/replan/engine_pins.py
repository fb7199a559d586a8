"""Whether the engine of a running plan is one that a changed spec still asks for, so that the run
may go on with it."""

from math import ceil

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.generation import EnginePlan, EngineServersSpec, GenerationSpec

from ..hardware.product_names import is_of_product


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
