"""Keeps the plan of a run that has made progress: it resumes as it began, however cluster and spec
have changed.

After it ran out of memory the run resumes with another split of the same batch. It is planned again
from the spec only while it has no checkpoint, because a checkpoint continues exactly only with the
plan that made it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned, Shortfall
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.replan.oom_replan import mildest_fitting_split, shortage_message, split_name
from grpo_planner.replan.past_run import PlanExcluded, Run, refit
from grpo_planner.result.result import PlanReason, PlanResult

from ..records.records import GRPOJobRecord

WANT_OF_MEMORY = (
    PlanReason.OUT_OF_DEVICE_MEMORY,
    PlanReason.OUT_OF_HOST_MEMORY,
    PlanReason.ONLY_ADAPTER_FITS,
)
"""Reasons for which a job that ran out of memory has no plan any more."""


class NextPlan(NamedTuple):
    """How a job's next attempt runs, or why it has no plan."""

    result: PlanResult
    is_reused: bool
    """True if a run goes on by it, so that nobody has looked yet for free GPUs."""


def next_plan(
    job: GRPOJobRecord,
    spec: GRPOJobSpec,
    inventory: Inventory,
    plan: Callable[[GRPOJobSpec, Learned | None], PlanResult],
) -> NextPlan:
    """The plan by which the run goes on, and where none binds it what the planner answers."""
    if reused := reuse_plan(job, inventory):
        return NextPlan(reused, is_reused=True)
    result = plan_again(job, spec, plan)
    return NextPlan(result, is_reused=False)


def kept_plan(job: GRPOJobRecord) -> ExecutionPlan | None:
    """The plan, if the run has made a step with it, or begins with checkpoints that another made
    with it, or was given it after another ran out of memory.

    Another number of ranks or another batch would make other steps of the same checkpoint.
    """
    status = job.status
    has_stepped = status.progress and status.progress.step
    was_relieved = status.learned and status.learned.shortfalls
    if status.resume_from or has_stepped or was_relieved:
        return status.plan
    return None


def reuse_plan(job: GRPOJobRecord, inventory: Inventory) -> PlanResult | None:
    """Return the kept plan, or why the current spec excludes it; None for a job that is to be
    planned from its spec."""
    plan = kept_plan(job)
    if plan is None or job.spec is None:
        return None
    if short := shortfall(job):
        learned = job.status.learned or Learned()
        run = Run(plan, job.spec, learned, inventory)
        may_plan_again = _may_plan_again(job, short)
        relief = mildest_fitting_split(run, last_resort=not may_plan_again)
        if relief is None and may_plan_again:
            return None
        if relief is None:
            message = f"the job {shortage_message(run)}"
            return PlanResult(
                feasible=False, reason=PlanReason.OUT_OF_DEVICE_MEMORY, message=message
            )
        plan = relief
    try:
        plan = refit(plan, job.spec, inventory)
    except PlanExcluded as excluded:
        return PlanResult(feasible=False, reason=PlanReason.PLAN_EXCLUDED, message=str(excluded))
    return PlanResult(feasible=True, reason=PlanReason.PLANNED, message=plan.reason, chosen=plan)


def learning(job: GRPOJobRecord, learned: Learned) -> GRPOJobRecord:
    """The same job, once it knows this of its memory."""
    status = job.status.model_copy(update={"learned": learned})
    content = replace(job.content, status=status)
    return replace(job, typed=content)


def shortfall(job: GRPOJobRecord) -> Shortfall | None:
    """How the plan in the status ran out of memory; None where it didn't, or is the answer to
    that."""
    learned = job.status.learned
    return learned.last_shortfall_of(job.status.attempt) if learned else None


def _may_plan_again(job: GRPOJobRecord, short: Shortfall) -> bool:
    """True if no checkpoint binds the run to its plan."""
    if job.status.resume_from:
        return False
    if short.checkpoint_step is not None:
        return short.checkpoint_step == 0
    progress = job.status.progress
    return progress is None or not progress.step


def plan_again(
    job: GRPOJobRecord, spec: GRPOJobSpec, plan: Callable[[GRPOJobSpec, Learned | None], PlanResult]
) -> PlanResult:
    """What a planner answers on a job; after a shortfall of memory with what was learned, and never
    by an adapter where all parameters were trained."""
    before = job.status.plan
    learned = job.status.learned
    if learned is None or not learned.memory or before is None:
        return plan(spec, learned)
    # What is trained never changes silently: less memory must not turn a full training into a LoRA
    # adapter.
    if before.method == "Full":
        without_adapter = spec.adapter.model_copy(update={"use": "Never"})
        spec = spec.model_copy(update={"adapter": without_adapter})
    result = plan(spec, learned)
    short = shortfall(job)
    if short is None:
        return result
    new_plan = result.chosen
    if new_plan is None:
        shortage = shortage_message(Run(before, spec, learned))
        message = f"{result.message}. The job {shortage}"
        return result.model_copy(update={"message": message})
    split = split_name(new_plan)
    change = f"after OutOfMemory at {short.where} in attempt {short.attempt}: runs as {split}"
    changes = [*new_plan.changes, change][-16:]
    new_plan = new_plan.model_copy(update={"changes": changes})
    return result.model_copy(update={"chosen": new_plan, "changes": changes})
