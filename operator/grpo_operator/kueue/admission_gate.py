"""Answers a job that Kueue admits: its attempt is committed only once Kueue has admitted the pods
of its plan."""

from dataclasses import replace

from grpo_api.plan.plan import ExecutionPlan

from ..decide.decisions import Action, Decision
from ..decide.observation import Observation
from ..decide.policies import UNKNOWN_PAUSE
from ..pods.pod_spec import PodDefaults
from ..records.reasons import Reason
from ..records.workloads import EVICTED, QUOTA_RESERVED, WorkloadRecord
from .pod_sets import is_made_for, plan_of_workload, pod_sets


def gate_by_workload(observation: Observation, decision: Decision, pods: PodDefaults) -> Decision:
    """The decision to commit an attempt, as long as Kueue has admitted it; else to queue the job,
    and why."""
    if decision.action is not Action.COMMIT or decision.plan is None:
        return decision
    queued = replace(decision, action=Action.QUEUE, reason=Reason.WAITING_FOR_KUEUE)
    workload = observation.workload
    if observation.kueue_problem:
        return replace(
            queued,
            reason=Reason.NO_KUEUE,
            message=observation.kueue_problem,
            look_again=UNKNOWN_PAUSE,
        )
    if workload is None:
        return replace(queued, message=f"waits for Kueue's LocalQueue {observation.job.queue_name}")
    if not is_for_plan(observation, workload, decision.plan, pods):
        return _of_another_shape(observation, queued, workload)
    if workload.may_start:
        return decision
    return replace(queued, message=_waits(observation, workload))


def is_for_plan(
    observation: Observation, workload: WorkloadRecord, plan: ExecutionPlan, pods: PodDefaults
) -> bool:
    """True if a Workload asks for the pods of a plan."""
    job = observation.job
    if job.spec is None:
        return False
    sets = pod_sets(job.key, job.spec, plan, pods)
    planned = plan_of_workload(workload)
    return is_made_for(workload, sets, planned.shape if planned else "")


def _of_another_shape(
    observation: Observation, queued: Decision, workload: WorkloadRecord
) -> Decision:
    if observation.job.kueue.prebuilt:
        message = (
            f"Workload {workload.name}, which MultiKueue made, is for other pods than those of "
            "this cluster's plan: "
            "declare placement.gpuProduct, gpus and nodes, so that both clusters plan alike"
        )
        return replace(queued, message=message)
    message = (
        f"the plan has other pods than Workload {workload.name}, which is given up with its quota; "
        f"a new one waits for Kueue's LocalQueue {observation.job.queue_name}"
    )
    return replace(queued, reason=Reason.WORKLOAD_REPLACED, message=message)


def _waits(observation: Observation, workload: WorkloadRecord) -> str:
    """What keeps it, in Kueue's words."""
    waits = f"Workload {workload.name} waits for Kueue's LocalQueue {observation.job.queue_name}"
    if not workload.active:
        return (
            f"{waits}: its spec.active is false, so Kueue admits it when somebody sets that to true"
        )
    if workload.is_true(EVICTED):
        evicted = workload.condition(EVICTED)
        return f"{waits}; it was evicted: {evicted}"
    if workload.is_true(QUOTA_RESERVED):
        checks = f", {workload.checks_message}" if workload.checks_message else ""
        return f"{waits}: its quota is reserved{checks}"
    message = workload.condition(QUOTA_RESERVED).message
    return f"{waits}: {message}" if message else waits
