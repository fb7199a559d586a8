"""Plans of jobs that nobody else's GPUs stand in the way of: on CPUs, or admitted by Kueue as if all were free."""

from collections.abc import Callable

from grpo_api.job import GRPOJobSpec
from grpo_api.learned import Learned
from grpo_api.running import PlacementSpec
from grpo_planner import Inventory, PlanResult, plan_job
from grpo_planner.hardware.declared import declared

from ..records import GRPOJobRecord
from .capacity import Capacity
from .checks import plan_problem
from .judge import Verdict, refusal, verdict_of
from .kept import next_plan
from .snapshot import Snapshot


def planned_on(there: Inventory, job: GRPOJobRecord, spec: GRPOJobSpec) -> Verdict:
    """The verdict on a job that may have all of these nodes."""

    def plan(spec: GRPOJobSpec, learned: Learned | None) -> PlanResult:
        return plan_job(spec, there, learned=learned)

    verdict = verdict_of(job, next_plan(job, spec, there, plan).result, admitted=True)
    problem = plan_problem(job, verdict.plan) if verdict.plan else None
    return refusal(job, problem) if problem else verdict


def empty_nodes(job: GRPOJobRecord, spec: GRPOJobSpec, snapshot: Callable[[], Snapshot]) -> Inventory:
    """The nodes on which a job that Kueue admits is planned; those of another cluster are as the spec declares them."""
    if job.dispatched and (gpus := _declared_per_node(spec.placement)):
        return declared(spec.placement.model_copy(update={"gpus_per_node": gpus}))
    return Capacity(snapshot(), ()).inventory(job).emptied


def _declared_per_node(placement: PlacementSpec) -> int:
    """GPUs of each node of a gang; 0 where the spec leaves some of it open."""
    gpus, nodes = placement.gpus, placement.nodes
    # Only a gang of one shape is planned alike on both clusters; everything else is planned on what this one has.
    if not (gpus and nodes and placement.gpu_product) or gpus.min != gpus.max or gpus.min % nodes:
        return 0
    return gpus.min // nodes
