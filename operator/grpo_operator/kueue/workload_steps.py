"""What the operator does to a GRPOJob's Workload next: a table of the Workload's state and the
job's.

It follows from what is there alone, and each step is one write. So if an operator ends between two
steps, the next one goes on from what it has left. An attempt is committed only once Kueue has
admitted the pods of its plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_api.plan.plan import ExecutionPlan

from ..decide.decisions import Action, Decision
from ..decide.next_action import UNKNOWN_PAUSE
from ..decide.observation import Observation
from ..decide.preflight import is_checked
from ..pods.pod_spec import PodDefaults
from ..records.reasons import UNCHECKED, Reason
from ..records.records import ENDED_PHASES, GRPOJobRecord
from ..records.workloads import EVICTED, FINISHED, PODS_READY, QUOTA_RESERVED, WorkloadRecord
from .pod_sets import is_made_for, plan_of_workload, pod_sets


def gate_by_workload(observation: Observation, decision: Decision, pods: PodDefaults) -> Decision:
    """The decision; a COMMIT becomes QUEUE, with the reason, until Kueue has admitted it."""
    if decision.action is not Action.COMMIT or decision.plan is None:
        return decision
    queued = replace(decision, action=Action.QUEUE, reason=Reason.WAITING_FOR_KUEUE)
    workload = observation.workload
    if observation.kueue_problem:
        return replace(
            queued,
            reason=Reason.NO_KUEUE,
            message=observation.kueue_problem,
            requeue_after=UNKNOWN_PAUSE,
        )
    if workload is None:
        return replace(queued, message=f"waits for Kueue's LocalQueue {observation.job.queue_name}")
    if not is_for_plan(observation, workload, decision.plan, pods):
        return _queued_for_new_workload(observation, queued, workload)
    if workload.may_start:
        return decision
    return replace(queued, message=_waiting_message(observation, workload))


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


def _queued_for_new_workload(
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


def _quota_message(observation: Observation, workload: WorkloadRecord) -> str:
    """Which pod the quota of an evicted Workload is kept for, such as one of a lost node; else
    empty.

    The last of many, which is another only now and then: each change is a write.
    """
    pods = (*observation.earlier_pods, *observation.pods, *observation.engine_pods)
    left = [pod for pod in pods if pod.phase not in ENDED_PHASES]
    if not (left and workload.is_true(EVICTED) and workload.has_reservation):
        return ""
    last = max(left, key=lambda pod: (pod.index, pod.name))
    where = f" on node {last.node}" if last.node else ""
    return f"Workload {workload.name} keeps its quota until pod {last.name}{where} has ended"


def _waiting_message(observation: Observation, workload: WorkloadRecord) -> str:
    """Why the Workload waits, with Kueue's own message."""
    if workload.deleting:
        return f"Workload {workload.name} is being deleted; once it is gone, a new one is created"
    waits = f"Workload {workload.name} waits for Kueue's LocalQueue {observation.job.queue_name}"
    kept_quota = _quota_message(observation, workload)
    if kept_quota:
        return f"{kept_quota}; it was evicted: {workload.condition(EVICTED)}"
    if not workload.active:
        return (
            f"{waits}: its spec.active is false, so Kueue admits it when somebody sets that to true"
        )
    if workload.is_true(EVICTED):
        return f"{waits}; it was evicted: {workload.condition(EVICTED)}"
    if workload.is_true(QUOTA_RESERVED):
        checks = f", {workload.checks_message}" if workload.checks_message else ""
        return f"{waits}: its quota is reserved{checks}"
    message = workload.condition(QUOTA_RESERVED).message
    return f"{waits}: {message}" if message else waits


WAITS_FOR_KUEUE = (Reason.WAITING_FOR_KUEUE, Reason.WORKLOAD_REPLACED, Reason.NO_KUEUE)
WORKLOAD_PRIORITY, POD_PRIORITY = "WorkloadPriorityClass", "PriorityClass"


class Write(StrEnum):
    """One write to a Workload."""

    CREATE = "Create"
    ADOPT = "Adopt"
    """Takes the one that MultiKueue has made on this cluster."""
    DELETE = "Delete"
    AMEND = "Amend"
    """Its queue or its priority."""
    PAUSE = "Pause"
    RESUME = "Resume"
    CLEAR = "Clear"
    """Removes the admission that an eviction has revoked, so that the Workload queues again."""
    READY = "Ready"
    RECOVER = "Recover"
    """Says that the pods of a further attempt are not all ready yet."""
    FINISH = "Finish"


GIVES_BACK = (Write.CLEAR, Write.DELETE, Write.FINISH)
"""Writes after which Kueue gives the quota to others."""


@dataclass(frozen=True, slots=True)
class Step:
    """A write, and for CREATE the plan that the Workload is made for."""

    write: Write
    plan: ExecutionPlan | None = None


DefaultPriority = Callable[[], str | None]
"""Gives the name of the default PriorityClass, empty without one; None if it is unknown."""


def next_step(
    observation: Observation,
    decision: Decision,
    pods: PodDefaults,
    default_priority: DefaultPriority = lambda: None,
) -> Step | None:
    """The next write; None where there is nothing to do, or only to wait."""
    workload = observation.workload
    if observation.kueue_problem:
        return None
    if workload is None:
        return None if observation.job.deleting else _creation_step(observation, decision)
    if workload.deleting:
        return None
    if observation.job.deleting:
        return _once_idle(observation, Write.DELETE)
    if observation.job.is_finished:
        may_finish = not workload.is_true(FINISHED) and not observation.pods_left
        return Step(Write.FINISH) if may_finish else None
    if _is_given_up(observation.job):
        # Kueue has no say any more in a gang that runs on without its queue.
        is_active = observation.job.is_active
        return Step(Write.DELETE) if is_active else _once_idle(observation, Write.DELETE)
    return _step_of_unfinished_job(observation, decision, workload, pods, default_priority)


def _creation_step(observation: Observation, decision: Decision) -> Step | None:
    """The write that makes a Workload for a job that waits with a plan; None for other jobs."""
    has_plan = decision.action is Action.QUEUE and decision.plan is not None
    if not has_plan or observation.job.is_active or not observation.job.queue_name:
        return None
    preflight = observation.preflight
    if preflight and preflight.is_needed and not is_checked(observation.job):
        return None
    if observation.job.kueue.prebuilt:
        return Step(Write.ADOPT)
    return Step(Write.CREATE, decision.plan)


def _is_given_up(job: GRPOJobRecord) -> bool:
    """True if the job has left its queue, or waits with a spec that can't be read."""
    if job.spec is not None:
        return not job.queue_name
    # The queue's name may be in the spec: a gang whose spec can't be read runs on by its Workload.
    return not job.is_active and not job.kueue.prebuilt


def _step_of_unfinished_job(
    observation: Observation,
    decision: Decision,
    workload: WorkloadRecord,
    pods: PodDefaults,
    default_priority: DefaultPriority,
) -> Step | None:
    """The next write for a job that runs or waits to run."""
    job = observation.job
    is_prebuilt = bool(job.kueue.prebuilt)
    if workload.is_true(FINISHED) and not is_prebuilt:
        return _once_idle(observation, Write.DELETE)
    if workload.is_true(EVICTED) and workload.has_reservation:
        return _once_idle(observation, Write.CLEAR)
    if _is_outdated(observation, decision, workload, pods):
        return _once_idle(observation, Write.DELETE)
    if job.is_suspended or _is_blocked(observation, decision):
        pauses = workload.active and not is_prebuilt
        return Step(Write.PAUSE) if pauses else None
    if workload.paused:
        return Step(Write.RESUME)
    if job.is_active:
        return _readiness_step(observation, workload)
    return Step(Write.AMEND) if _should_amend(job, workload, default_priority) else None


def _is_blocked(observation: Observation, decision: Decision) -> bool:
    """True if the job could not start with its quota: its preflight or a missing object holds it
    up, or it pauses after a release. An inactive Workload keeps its place in the queue."""
    if decision.action is not Action.QUEUE:
        return decision.action is Action.WAIT and observation.job.is_released
    preflight = observation.preflight
    # A preflight that has just passed is in the status after this reconcile.
    if decision.reason in UNCHECKED and preflight and preflight.check.has_passed:
        return False
    return decision.reason not in WAITS_FOR_KUEUE


def _readiness_step(observation: Observation, workload: WorkloadRecord) -> Step | None:
    """The write of whether the whole gang runs, where the Workload says otherwise."""
    is_ready = observation.has_gang_started
    if not workload.may_continue or workload.is_true(PODS_READY) == is_ready:
        return None
    if is_ready:
        return Step(Write.READY)
    # Kueue limits how long a gang waits for nodes only while its pods are not ready. The end of one
    # that has run is judged first: the next attempt may follow at once.
    return None if observation.has_gang_run else Step(Write.RECOVER)


def _once_idle(observation: Observation, write: Write) -> Step | None:
    """The write once no pod of the gang is left: until then Kueue must count its quota."""
    is_idle = not observation.job.is_active and not observation.gang_left
    return Step(write) if is_idle else None


def _is_outdated(
    observation: Observation, decision: Decision, workload: WorkloadRecord, pods: PodDefaults
) -> bool:
    """True if the job will not run the plan of the Workload: it has another by now, or none."""
    job = observation.job
    if job.is_active or job.kueue.prebuilt or decision.action not in (Action.QUEUE, Action.REJECT):
        return False
    return decision.plan is None or not is_for_plan(observation, workload, decision.plan, pods)


def _should_amend(
    job: GRPOJobRecord, workload: WorkloadRecord, default_priority: DefaultPriority
) -> bool:
    """True if it waits in another queue, or with another priority, than its job says by now."""
    if job.kueue.prebuilt or workload.is_true(QUOTA_RESERVED):
        return False
    if workload.queue != job.queue_name:
        return True
    kind, name = wanted_class(job)
    if not name:
        # A job that names no class any more has the cluster's default.
        default = default_priority()
        if default is None:
            return workload.priority_class[0] == WORKLOAD_PRIORITY
        kind, name = (POD_PRIORITY, default) if default else ("", "")
    return workload.priority_class != (kind, name)


def wanted_class(job: GRPOJobRecord) -> tuple[str, str]:
    """Kind and name of the class of the Workload's priority; empty if the job names none."""
    if job.kueue.priority_class:
        return WORKLOAD_PRIORITY, job.kueue.priority_class
    name = job.spec.placement.priority_class_name if job.spec else None
    return (POD_PRIORITY, name) if name else ("", "")
