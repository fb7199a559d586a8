"""Keeps the plan of a run that has made progress: it resumes as it began, however cluster and spec
have changed.

After it ran out of memory the run resumes with another split of the same batch. It is planned again
from the spec only while it has no checkpoint, because a checkpoint continues exactly only with the
plan that made it. After its engine failed it resumes with the same split and another engine.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned, Shortfall
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.replan.engine_fallback import (
    NoFallback,
    change_message,
    costly_message,
    fallback_plan,
)
from grpo_planner.replan.oom_replan import mildest_fitting_split, shortage_message, split_name
from grpo_planner.replan.past_run import Run
from grpo_planner.replan.refit import PlanExcluded, refit
from grpo_planner.result.result import PlanReason, PlanResult

from ..records.records import GRPOJobRecord

NO_BETTER_PLAN = (
    PlanReason.OUT_OF_DEVICE_MEMORY,
    PlanReason.OUT_OF_HOST_MEMORY,
    PlanReason.ONLY_ADAPTER_FITS,
    PlanReason.NO_FALLBACK,
)
"""Reasons for which a job has no plan any more after an attempt that its plan made fail."""


class NextPlan(NamedTuple):
    """How a job's next attempt runs, or why it has no plan."""

    result: PlanResult
    is_reused: bool
    """True if a run goes on by it: then free GPUs have not been searched yet."""


def next_plan(
    job: GRPOJobRecord,
    inventory: Inventory,
    plan: Callable[[GRPOJobSpec, Learned | None], PlanResult],
) -> NextPlan:
    """Return the plan that the run is bound to, else the planner's answer."""
    if reused := reuse_plan(job, inventory):
        return NextPlan(reused, is_reused=True)
    result = plan_again(job, plan)
    return NextPlan(result, is_reused=False)


def kept_plan(job: GRPOJobRecord) -> ExecutionPlan | None:
    """Return the status's plan if it binds the next attempt, else None.

    It does after a step, for a run that begins with another's checkpoints, and for a plan that was
    made after a shortage of memory or a failed engine. Another number of ranks or another batch
    would make other steps of the same checkpoint.
    """
    status = job.status
    has_stepped = status.progress and status.progress.step
    learned = status.learned or Learned()
    was_changed = learned.shortfalls or learned.engine_failures
    if status.resume_from or has_stepped or was_changed:
        return status.plan
    return None


def reuse_plan(job: GRPOJobRecord, inventory: Inventory) -> PlanResult | None:
    """The kept plan, or why the spec excludes it; None if the job is planned from its spec."""
    plan = kept_plan(job)
    if plan is None:
        return None
    learned = job.status.learned or Learned()
    run = Run(plan, job.valid_spec, learned, inventory)
    if learned.last_engine_failure_of(job.status.attempt):
        try:
            plan = fallback_plan(run)
        except NoFallback as none:
            return None if _has_no_step(job) and not none.fits else _no_fallback(str(none))
    if short := shortfall(job):
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
        plan = refit(plan, job.valid_spec, inventory, learned)
    except PlanExcluded as excluded:
        return PlanResult(feasible=False, reason=PlanReason.PLAN_EXCLUDED, message=str(excluded))
    return PlanResult(feasible=True, reason=PlanReason.PLANNED, message=plan.reason, chosen=plan)


def learning(job: GRPOJobRecord, learned: Learned) -> GRPOJobRecord:
    """Return the job with this lesson in its status."""
    status = job.status.model_copy(update={"learned": learned})
    content = replace(job.content, status=status)
    return replace(job, typed=content)


def shortfall(job: GRPOJobRecord) -> Shortfall | None:
    """How the plan in the status ran out of memory; None if it didn't, or answers that."""
    learned = job.status.learned
    return learned.last_shortfall_of(job.status.attempt) if learned else None


def _may_plan_again(job: GRPOJobRecord, short: Shortfall) -> bool:
    """True if no checkpoint binds the run to its plan."""
    if short.checkpoint_step is not None and not job.status.resume_from:
        return short.checkpoint_step == 0
    return _has_no_step(job)


def _has_no_step(job: GRPOJobRecord) -> bool:
    """True if the run has nothing to go on from, as far as is known."""
    progress = job.status.progress
    return not (job.status.resume_from or (progress and progress.step))


def _no_fallback(message: str) -> PlanResult:
    return PlanResult(feasible=False, reason=PlanReason.NO_FALLBACK, message=message)


def plan_again(
    job: GRPOJobRecord, plan: Callable[[GRPOJobSpec, Learned | None], PlanResult]
) -> PlanResult:
    """Plan a job again. After a shortage of memory or a failed engine the planner gets the lesson,
    and never answers with an adapter for a run that trains all parameters."""
    spec = job.valid_spec
    before = job.status.plan
    learned = job.status.learned
    if learned is None or before is None or not (learned.memory or learned.engine_failures):
        return plan(spec, learned)
    # What is trained never changes silently: less memory must not turn a full training into a LoRA
    # adapter.
    if before.method == "Full":
        without_adapter = spec.adapter.model_copy(update={"use": "Never"})
        spec = spec.model_copy(update={"adapter": without_adapter})
    result = plan(spec, learned)
    if learned.last_engine_failure_of(job.status.attempt):
        return _answer_to_engine_failure(result, before, learned)
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


def _answer_to_engine_failure(
    result: PlanResult, before: ExecutionPlan, learned: Learned
) -> PlanResult:
    """The planner's answer, if it may follow a plan whose engine failed."""
    new_plan = result.chosen
    if new_plan is None:
        return _no_fallback(result.message)
    seconds = new_plan.estimated_step_seconds
    cost = None if seconds is None else seconds * new_plan.all_gpus
    if new_plan.accelerator == "CPU":
        cost = 0.0
    if new_plan.engine is None and (refusal := costly_message(learned, cost)):
        return _no_fallback(refusal)
    changes = [*new_plan.changes, change_message(learned, before, new_plan)][-16:]
    new_plan = new_plan.model_copy(update={"changes": changes})
    return result.model_copy(update={"chosen": new_plan, "changes": changes})
