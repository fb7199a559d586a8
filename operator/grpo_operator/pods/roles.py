"""Splits a gang into roles: trainers, and engines in their own pods. Each role has a spec and a
plan, so one code path makes pods of both.

The same holds for the search of nodes and the count of what a pod takes. Pure.
"""

from dataclasses import dataclass

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.checkpoint import CheckpointSpec
from grpo_api.spec.generation import EnginePlan, EngineServersSpec

from ..records.names import COMPONENT_ENGINE, COMPONENT_TRAINER

ENGINE_COMMAND = ["python", "-m", "grpo_trainer.engine_pod"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Pods of a gang that are alike: `plan.nodes` of them, each with `plan.gpus_per_node` GPUs."""

    component: str
    """Value of names.LABEL_COMPONENT of its Job and pods."""
    spec: GRPOJobSpec
    plan: ExecutionPlan

    @property
    def is_engines(self) -> bool:
        """True if these are engines: several may share a node, and they keep nothing on it."""
        return self.component == COMPONENT_ENGINE


def roles(spec: GRPOJobSpec, plan: ExecutionPlan) -> tuple[Role, ...]:
    """The roles of a gang, in the order in which they are started."""
    trainers = Role(component=COMPONENT_TRAINER, spec=spec, plan=plan)
    engines = engine_role(spec, plan)
    return (trainers, engines) if engines else (trainers,)


def engine_role(spec: GRPOJobSpec, plan: ExecutionPlan) -> Role | None:
    """The engines of a plan that has any in pods of their own."""
    engine = plan.engine
    if engine is None or engine.kind != "Servers":
        return None
    engine_spec = _as_engine(spec)
    engine_plan = _engine_gang_plan(plan, engine)
    return Role(component=COMPONENT_ENGINE, spec=engine_spec, plan=engine_plan)


def replicas(plan: ExecutionPlan | None) -> int:
    """How many engine pods the plan has."""
    engine = plan.engine if plan else None
    if engine is None or engine.kind != "Servers":
        return 0
    return engine.replicas


def _as_engine(spec: GRPOJobSpec) -> GRPOJobSpec:
    """The spec without what only training needs: data, rewards, checkpoints, export, secrets."""
    servers = spec.generation.servers or EngineServersSpec()
    dataset = spec.dataset.model_copy(update={"files": None, "token_secret_ref": None})
    changes = {
        "command": ENGINE_COMMAND,
        "resources": servers.resources.with_amounts(spec.platform.resources),
        "dataset": dataset,
        "rewards": [],
        "checkpoint": CheckpointSpec(),
        "resume_from": None,
        "export": None,
        "tracking": None,
    }
    return spec.model_copy(update=changes)


def _engine_gang_plan(plan: ExecutionPlan, engine: EnginePlan) -> ExecutionPlan:
    """The plan of the engines as if they were the gang, one process to a GPU."""
    changes = {
        "gpus": engine.gpus,
        "nodes": engine.replicas,
        "gpus_per_node": engine.gpus_per_replica,
        "processes_per_node": max(1, engine.gpus_per_replica),
        "gpu_product": engine.gpu_product,
        "gpu_hour_price": engine.gpu_hour_price,
        "gpu_resource": engine.gpu_resource,
        "node_selector": engine.node_selector,
        "cpu_millicores": engine.cpu_millicores,
        "host_memory_bytes": engine.host_memory_bytes,
        "ephemeral_storage_bytes": 0,
    }
    return plan.model_copy(update=changes)
