"""The plan of a run that has made progress: it resumes as it began, whatever the cluster and the spec have become."""

from grpo_api.plan import ExecutionPlan
from grpo_planner import Inventory, PlanReason, PlanResult
from grpo_planner.refit import PlanExcluded, refit

from ..records import GRPOJobRecord


def kept_plan(job: GRPOJobRecord) -> ExecutionPlan | None:
    """The plan, if the run has made a step with it, or begins with checkpoints that another made with it.

    Another number of ranks or another batch split would make other steps of the same checkpoint.
    """
    progress = job.status.progress
    return job.status.plan if job.status.resume_from or (progress and progress.step) else None


def resumed(job: GRPOJobRecord, inventory: Inventory) -> PlanResult | None:
    """The kept plan where the spec, as it is now, lets it run; or why it doesn't. None for a job to be planned anew."""
    plan = kept_plan(job)
    if plan is None or job.spec is None:
        return None
    try:
        plan = refit(plan, job.spec, inventory)
    except PlanExcluded as excluded:
        return PlanResult(feasible=False, reason=PlanReason.PLAN_EXCLUDED, message=str(excluded))
    return PlanResult(feasible=True, reason=PlanReason.PLANNED, message=plan.reason, chosen=plan)
