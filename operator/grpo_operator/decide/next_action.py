"""Decides what to do about a GRPOJob: the first of the ordered checks that has an answer decides.

An Observation goes in, a Decision with its reason and its message for the user comes out. The order
of CHECKS is the policy.

Attempts of a job that Kueue admits run as long as their Workload is admitted. An eviction is not a
failure: the gang ends, the job is queued again, and no restart is counted.

The answers to the end of an attempt are here. Checks of a gang that starts are in start_checks.py,
those of a running one in running_checks.py.
"""

from dataclasses import replace

from grpo_api.report.report import Outcome, Result
from grpo_api.report.root_cause import (
    DIVERGED,
    PERMANENT,
    attribute_hang,
    blame_engine_of_gang,
)
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.status.status import MAX_ROLLBACKS, ConditionType
from grpo_kube.objects.times import shortest_pause

from ..pods.manifests import has_changed
from ..records.reasons import Reason
from ..records.terminations import PodTermination
from .decisions import Action, Check, Decision, Limits, RequeueAfter
from .engine_fallback import (
    has_failed_for_good,
    outcome_of_engines,
    record_engine_failure,
    rung_after,
)
from .observation import Observation
from .oom_feedback import record_shortage
from .preflight import problems_message
from .restarts import fail_on_second_disk_shortage, pausing, restart_or_fail, rollback_of, rule_for
from .resume_source import source_unresolved
from .running_checks import hangs, hub_unreachable, keep_running, silent
from .start_checks import (
    engines_gone,
    engines_not_started,
    never_bound,
    never_started,
    not_started,
    pods_missing,
)

UNKNOWN_PAUSE = 15.0
"""Seconds until it is looked again whether Kueue's objects can be seen."""


def release_evicted(observation: Observation, limits: Limits) -> Decision | None:
    """Release an attempt that is no longer admitted by Kueue; if unknown, start and end none.

    An attempt that has ended before is recorded as if the next one followed.
    """
    job = observation.job
    workload = observation.workload
    if not job.is_active or not observation.queue_name:
        return None
    if observation.kueue_problem:
        message = f"not started while its Workload is not known: {observation.kueue_problem}"
        wait = Decision(Action.WAIT, Reason.FAILED_CREATE, message, requeue_after=UNKNOWN_PAUSE)
        # One whose Job is gone has ended; what is left of it has nothing to wait for.
        return None if observation.child or observation.is_job_gone else wait
    if workload is None:
        why = "its Workload is gone"
    elif workload.may_continue:
        return None
    else:
        lost = workload.lost_message or "its Admitted condition is not True any more"
        why = f"Workload {workload.name}: {lost}"
    return _with_end(observation, limits, _taken_back(why))


def _taken_back(why: str) -> Decision:
    return Decision(Action.RELEASE, Reason.EVICTED, f"Kueue has taken its admission back: {why}")


def retry_failed(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Start a failed job again after the user has raised `spec.retry`."""
    spec = observation.job.spec
    if not observation.is_retry_requested or spec is None:
        return None
    message = f"spec.retry was raised to {spec.retry}: the job starts again"
    if observation.job.status.attempt and spec.checkpoint.is_lasting:
        message += " from its last checkpoint"
    return Decision(Action.RETRY, Reason.RETRYING, message)


def leave_finished(observation: Observation, limits: Limits) -> Decision | None:
    """Leave a finished job as it is, and delete it after its time to live."""
    if not observation.job.is_finished:
        return None
    requeue_after: float | None = None
    if (ttl := observation.job.time_to_live) is not None:
        seconds_left = ttl - observation.ended_seconds
        if seconds_left <= 0:
            return Decision(Action.DELETE)
        requeue_after = seconds_left
    if any(pod.is_live for pod in observation.pods):
        seconds_left = limits.survivor_grace_seconds - observation.since(ConditionType.SUCCEEDED)
        if seconds_left > 0:
            requeue_after = shortest_pause(requeue_after, seconds_left)
    return Decision(Action.WAIT, requeue_after=requeue_after)


def succeed_job(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Succeed once an Outcome says so, whatever else has happened to the gang."""
    outcome = observation.success_outcome if observation.job.is_active else None
    if outcome is None:
        return None
    message = outcome.message or f"finished after step {outcome.step}"
    return Decision(Action.SUCCEED, Reason.SUCCEEDED, message, ended=outcome)


def failed_for_good(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Fail the job after an end that the same input would cause again."""
    job = observation.job
    cause = observation.cause
    if not job.is_active or cause is None or not cause.reported:
        return None
    outcome = cause.outcome
    if outcome.result not in PERMANENT:
        return None
    has_other_answer = rollback_of(job, cause) or rung_after(observation, outcome)
    if rule_for(job, cause) or has_other_answer:
        return None
    message = outcome.message
    rollbacks = job.status.rollbacks
    if rollbacks and outcome.result in DIVERGED:
        message = f"diverged again after {len(rollbacks)} of {MAX_ROLLBACKS} rollbacks: {message}"
    return Decision(Action.FAIL, outcome.result, message, ended=outcome)


def invalid_spec(observation: Observation, limits: Limits) -> Decision | None:
    """Start nothing for a spec that the types reject, and leave a running attempt alone.

    Its end is left alone as well: the rules for it are in the spec, and during an upgrade an
    operator that can parse them is about to lead. A gang that waits for nodes or doesn't start is
    released in time, and the job fails after the longest time that its class allows. How long one
    that Kueue admitted waits for nodes or runs, Kueue decides.
    """
    if observation.job.spec is not None:
        return None
    problems = "; ".join(observation.job.problems)
    if not (observation.job.is_active and observation.child):
        return Decision(Action.REJECT, Reason.INVALID_SPEC, problems)
    number = observation.job.status.attempt
    answers = (deadline_exceeded(observation, limits), _release_of_unreadable(observation, limits))
    release = next((answer for answer in answers if isinstance(answer, Decision)), None)
    pauses = (answer.seconds for answer in answers if isinstance(answer, RequeueAfter))
    requeue_after = shortest_pause(*pauses)
    if observation.cause or observation.child.ended:
        message = (
            f"attempt {number} has ended; how it goes on stands in the spec, which can't be "
            f"read: {problems}"
        )
    elif release:
        return release
    elif observation.replicas and observation.engines is None:
        message = (
            f"the Job of attempt {number}'s engines can't be created, since the spec can't be "
            f"read: {problems}"
        )
    else:
        return Decision(Action.WAIT, requeue_after=requeue_after)
    return Decision(Action.WAIT, Reason.INVALID_SPEC, message, requeue_after=requeue_after)


def _release_of_unreadable(
    observation: Observation, limits: Limits
) -> Decision | RequeueAfter | None:
    """What ends a gang although its spec can't be read."""
    if observation.child is None or not observation.child.workload:
        release = never_bound(observation, limits)
        return release or never_started(observation, limits)
    workload = observation.workload
    # The name of its queue may be in the spec: what the Workload itself says is enough.
    if workload and workload.lost_message:
        return _taken_back(f"Workload {workload.name}: {workload.lost_message}")
    return never_started(observation, limits)


def suspend_job(observation: Observation, limits: Limits) -> Decision | None:
    """Suspend the attempt when `spec.suspend` is true. A suspension does not count as a failure.

    An attempt that has ended before is recorded as if the next one followed.
    """
    if not observation.job.is_suspended:
        return None
    message = "spec.suspend is true; set it to false to go on"
    suspension = Decision(Action.SUSPEND, Reason.SUSPENDED, message)
    return _with_end(observation, limits, suspension) if observation.job.is_active else suspension


def _with_end(observation: Observation, limits: Limits, decision: Decision) -> Decision:
    """The decision that stops the attempt, with how the attempt has ended before; the answer to
    that end where its cause is not known yet, or the job fails of it."""
    # The decision takes the place of the pause.
    without_pause = replace(limits, restart_pause_seconds=0.0)
    for check in (attempt_ended, job_gone, job_ended):
        end = check(observation, without_pause)
        if end and end.action is Action.ADMIT:
            action, reason, message = decision.action, decision.reason, decision.message
            return replace(end, action=action, reason=reason, message=message)
        if end:
            return end
    return decision


def deadline_exceeded(observation: Observation, limits: Limits) -> Decision | RequeueAfter | None:  # noqa: ARG001
    """Fail the job after `spec.activeDeadlineSeconds`; a suspension would reset the Job's own.

    One that waits fails, too, if the limit was lowered below what it has used: it would only wait
    to fail at once.
    """
    limit = observation.job.active_deadline
    if limit is None:
        return None
    seconds_left = limit - observation.elapsed_seconds
    if seconds_left > 0:
        return RequeueAfter(seconds_left) if observation.job.is_active else None
    message = (
        f"ran for {observation.elapsed_seconds:.0f} s; spec.activeDeadlineSeconds allows {limit} s"
    )
    return Decision(Action.FAIL, Reason.DEADLINE_EXCEEDED, message)


def preflight_failed(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Fail a job whose preflight has found a lasting mistake, before it holds a GPU."""
    preflight = observation.preflight
    if preflight is None or not preflight.is_needed:
        return None
    check = preflight.check
    if check.reason is not Reason.PREFLIGHT_FAILED or check.status.report is None:
        return None
    return Decision(Action.FAIL, Result.BAD_INPUT, problems_message(check.status.report))


def not_admitted(observation: Observation, limits: Limits) -> Decision | None:
    """Ask for an attempt if none is active; after a release, only when the pause is over."""
    if observation.job.is_active:
        return None
    job = observation.job
    released_for = observation.first_seen.released_for(job, observation.now, observation.at)
    if seconds_left := pausing(job, released_for, limits):
        return Decision(Action.WAIT, requeue_after=seconds_left)
    return Decision(Action.ADMIT)


def attempt_ended(observation: Observation, limits: Limits) -> Decision | None:
    """Answer the cause of a failure, after a moment if the failed pod may be only a symptom."""
    cause = observation.cause
    if cause is None:
        return None
    is_hang = cause.outcome.result is Result.HANG
    longest = limits.hang_settle_seconds if is_hang else limits.settle_seconds
    if not observation.is_cause_final and observation.over_for < longest:
        return Decision(Action.WAIT, requeue_after=longest - observation.over_for)
    outcome = _attributed_outcome(cause, observation)
    counted = not (cause.disrupted or cause.outcome.result is Result.PREEMPTED)
    matching_rule = rule_for(observation.job, cause)
    if matching_rule:
        path, rule = matching_rule
        if rule.action == "Fail":
            message = f"{path} says Fail for this end: {outcome.message}"
            return Decision(Action.FAIL, outcome.result, message, ended=outcome)
        counted = rule.action == "Restart"
    if not matching_rule and (rollback := rollback_of(observation.job, cause)):
        # it has a limit of its own, which is stricter
        decision = restart_or_fail(observation, limits, outcome, counted=False)
        return replace(decision, rollback=rollback)
    if not matching_rule and has_failed_for_good(observation, outcome):
        return Decision(Action.FAIL, outcome.result, outcome.message, ended=outcome)
    if not matching_rule and rung_after(observation, outcome):
        # it happens once, so it needs no limit
        counted = False
    decision = restart_or_fail(
        observation, limits, outcome, counted=counted, node=_suspected_node(cause)
    )
    return _with_lesson(observation, outcome, decision, has_rule=bool(matching_rule))


def _with_lesson(
    observation: Observation, outcome: Outcome, decision: Decision, *, has_rule: bool
) -> Decision:
    """The decision with what the end teaches; the job's end where the next attempt would run short
    again. `has_rule`: the user has said what follows such an end."""
    if outcome.result is Result.OUT_OF_MEMORY:
        return record_shortage(observation, outcome, decision)
    if outcome.result is Result.OUT_OF_DISK and not has_rule:
        return fail_on_second_disk_shortage(observation, outcome, decision)
    return record_engine_failure(observation, outcome, decision)


def _attributed_outcome(cause: PodTermination, observation: Observation) -> Outcome:
    """The cause's outcome; of a hang, with the rank that the others waited for and where that one
    stood.

    Rank 0 waits in vain for engines in pods of their own that don't start; they say why. An engine
    whose weights differ in two attempts in a row has failed, as one that hangs in both.
    """
    ends, result = observation.job.status.ends, cause.outcome.result
    is_repeated = bool(ends) and ends[-1].reason == result
    if result is Result.RENDEZVOUS_TIMEOUT:
        return outcome_of_engines(observation) or cause.outcome
    if result is Result.ENGINE_WEIGHTS_DIFFER and is_repeated:
        failed = cause.outcome.model_copy(update={"result": Result.ENGINE_FAILED})
        return truncate_to_fit(failed, f"in two attempts in a row, {cause.outcome.message}")
    if result is not Result.HANG:
        return cause.outcome
    reported_outcomes = [end.outcome for end in observation.terminations if end.reported]
    hang = attribute_hang(cause.outcome, reported_outcomes)
    if len(reported_outcomes) < observation.job.nodes:
        return hang
    return blame_engine_of_gang(hang, reported_outcomes, is_repeated=is_repeated)


def _suspected_node(cause: PodTermination) -> str:
    """The node that may be to blame: no report, and not the program's memory either."""
    if cause.reported or cause.outcome.result is Result.OUT_OF_MEMORY:
        return ""
    return cause.node


def job_gone(observation: Observation, limits: Limits) -> Decision | None:
    """Restart after somebody has deleted the attempt's Job. This is no failure of the training, so
    it doesn't count.

    Its name is not used again: pods of it may still write, and checkpoints are fenced by the
    attempt.
    """
    if not observation.is_job_gone:
        return None
    message = f"the Job of attempt {observation.job.status.attempt} was deleted"
    outcome = Outcome(result=Result.PREEMPTED, message=message)
    return restart_or_fail(observation, limits, outcome, counted=False)


def job_ended(observation: Observation, limits: Limits) -> Decision | None:
    """Restart after a Job has ended while no pod shows why: its pods were deleted, or left no
    outcome.

    A pod fails before its Job does, so while pods of it still seem to run, they are only seen late:
    after an outage the watch of Jobs may be back before that of pods.
    """
    if observation.child is None or not observation.child.ended:
        return None
    if observation.pods and observation.over_for < limits.late_pods_seconds:
        return Decision(Action.WAIT, requeue_after=limits.late_pods_seconds - observation.over_for)
    message = (
        f"Job {observation.child.name} ended ({observation.child.ended}) and no pod is left "
        "that says why"
    )
    outcome = Outcome(result=Result.PREEMPTED, message=message)
    return restart_or_fail(observation, limits, outcome, counted=False)


def suspended_unseen(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Make up for a suspension that was not observed: the spec has been changed as only that of a
    stopped job can be, and the job has been resumed since.

    The attempt would go on by the spec of before, and nothing would say so.
    """
    job, child = observation.job, observation.child
    if job.spec is None:
        return None
    # One change of the spec suspends the job, and another resumes it. What the operator saw is not
    # compared: a version of it with other fields and defaults makes another hash.
    is_unseen = job.generation >= job.observed_generation + 2
    # Without a Job nothing was made from the spec of the plan yet.
    if not is_unseen or (child and not has_changed(child.spec_version, job.spec)):
        return None
    message = (
        "the job was suspended, changed and resumed before the operator looked: attempt "
        f"{job.status.attempt} ends, and the next one follows the new spec"
    )
    return Decision(Action.SUSPEND, Reason.SUSPENDED, message, requeue_after=0.0)


CHECKS: tuple[Check, ...] = (
    retry_failed,
    leave_finished,
    succeed_job,
    invalid_spec,
    failed_for_good,
    suspend_job,
    deadline_exceeded,
    source_unresolved,
    release_evicted,
    preflight_failed,
    not_admitted,
    attempt_ended,
    job_gone,
    job_ended,
    suspended_unseen,
    not_started,
    pods_missing,
    never_bound,
    engines_not_started,
    never_started,
    hub_unreachable,
    hangs,
    silent,
    engines_gone,
    keep_running,
)
"""The policy, in order."""


def decide(observation: Observation, limits: Limits) -> Decision:
    """The first check's answer; `requeue_after` is the earliest deadline up to it."""
    requeue_after: float | None = None
    for check in CHECKS:
        answer = check(observation, limits)
        if isinstance(answer, RequeueAfter):
            requeue_after = shortest_pause(requeue_after, answer.seconds)
        elif answer:
            return replace(
                answer, requeue_after=shortest_pause(requeue_after, answer.requeue_after)
            )
    raise AssertionError("the last check has an answer")
