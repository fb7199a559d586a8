"""Computes the new status.learned from what an attempt measured: architecture, link speed, step
times, missing memory. The next plan uses it; otherwise it would fail the same way.

After MAX_REPLANS plans that ran out of memory the job fails. All of it is kept in the status, so
that a new operator process goes on where the last one was.
"""

from dataclasses import replace

from grpo_api.plan.learned import HOST, MAX_REPLANS, Learned, MeasuredLinks
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import Outcome, Result
from grpo_api.report.training_metrics import ALLREDUCE
from grpo_api.text.quantity import MAX_COUNT
from grpo_planner.replan.measured_step import learned_with_step
from grpo_planner.replan.oom_replan import (
    last_shortfall_message,
    learned_with_architecture,
    learned_with_shortage,
    remedy_message,
    shortage_message,
)
from grpo_planner.replan.past_run import Run
from grpo_planner.result.result import SpecRejected

from .decisions import Action, Decision
from .observation import Observation


def learned_with_progress(observation: Observation) -> Learned:
    """`status.learned` with what the current attempt reports of model, links and steps."""
    job = observation.job
    plan = job.status.plan
    learned = job.status.learned or Learned()
    if observation.pull is None or job.spec is None or plan is None:
        return learned
    progress = observation.pull.progress
    allreduce = progress.metrics.get(ALLREDUCE.key)
    if links := measured_links(plan, allreduce):
        learned = learned.model_copy(update={"links": links})
    if progress.architecture is not None:
        run = Run(plan, job.spec, learned)
        learned = learned_with_architecture(run, progress.architecture)
    return learned_with_step(Run(plan, job.spec, learned), progress.metrics)


def measured_links(plan: ExecutionPlan, measured: float | None) -> MeasuredLinks | None:
    """The links between a plan's GPUs by its all-reduce; None without one that can be believed."""
    if plan.gpus <= 1 or measured is None or not 1 <= measured <= MAX_COUNT:
        return None
    return MeasuredLinks(
        gpu_product=plan.gpu_product, nodes=plan.nodes, bytes_per_second=round(measured)
    )


def record_shortage(observation: Observation, outcome: Outcome, decision: Decision) -> Decision:
    """The decision on an end as OutOfMemory, with its lesson; fails without a further plan."""
    if decision.action not in (Action.ADMIT, Action.FAIL):
        return decision
    run = run_with_shortage(observation, outcome)
    if run is None:
        return decision
    if decision.action is Action.FAIL:
        shortage = shortage_message(run)
        message = f"{decision.message}. The job {shortage}"
        return replace(decision, message=message, learned=run.learned)
    tried = ""
    if len(run.learned.shortfalls) > MAX_REPLANS:
        tried = f"{MAX_REPLANS} new plans"
    elif has_repeated_plan(run):
        tried = "the same plan twice"
    if tried:
        # The remedy takes the place of what the outcome advises after its cause.
        cause, _, _ = outcome.message.partition("; ")
        last = last_shortfall_message(run)
        message = f"out of memory after {tried}, {last}: {cause}. {remedy_message(run)}"
        return replace(
            decision,
            action=Action.FAIL,
            reason=Result.OUT_OF_MEMORY,
            message=message,
            learned=run.learned,
        )
    return replace(decision, learned=run.learned)


def has_repeated_plan(run: Run) -> bool:
    """True if two attempts in a row lacked host memory with the same plan, and the next would have
    it, too: the spec sets what a pod requests."""
    last_two = run.learned.shortfalls[-2:]
    if len(last_two) < 2 or run.demand.pod_memory is None:
        return False
    before, now = last_two
    is_same_plan = before.tried == now.tried and before.usable_bytes == now.usable_bytes
    return is_same_plan and before.where == now.where == HOST


def run_with_shortage(observation: Observation, outcome: Outcome) -> Run | None:
    """The attempt's plan with the shortage that ended it; None if the model's size is unknown."""
    job = observation.job
    if job.spec is None or job.status.plan is None:
        return None
    try:
        learned_before = learned_with_progress(observation)
        run = Run(job.status.plan, job.spec, learned_before)
        learned = learned_with_shortage(run, job.status.attempt, outcome)
        return replace(run, learned=learned)
    except SpecRejected:
        return None
