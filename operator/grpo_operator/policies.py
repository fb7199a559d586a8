"""What to do about a GRPOJob: ordered checks, the first that has an answer decides.

Every answer to a failure can be read here, with its reason and its sentence for the user. Observation in, Decision out;
the order of CHECKS is the policy.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from grpo_api.causes import PERMANENT
from grpo_api.plan import ExecutionPlan
from grpo_api.report import Outcome, Result
from grpo_api.status import ConditionType

from .observe import Observation
from .reasons import Reason
from .records import GRPOJobRecord
from .times import seconds


class Action(StrEnum):
    """What the reconciler does next."""

    WAIT = "Wait"
    REJECT = "Reject"
    ADMIT = "Admit"
    COMMIT = "Commit"
    QUEUE = "Queue"
    START = "Start"
    SUSPEND = "Suspend"
    RELEASE = "Release"
    SUCCEED = "Succeed"
    FAIL = "Fail"
    DELETE = "Delete"


@dataclass(frozen=True, slots=True)
class Decision:
    """The action, why, and for whom it may concern: the end that it answers and the plan that it commits."""

    action: Action
    reason: str = ""
    message: str = ""
    _: KW_ONLY
    ended: Outcome | None = None
    """The end of the current attempt that this answers."""
    counted: bool = False
    """Whether that end counts against spec.restarts.limit."""
    plan: ExecutionPlan | None = None
    """For COMMIT and QUEUE: how the next attempt runs or would run."""
    look_again: float | None = None
    """Seconds after which time alone may change the decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times that the operator was installed with, in seconds."""

    scheduling: float = 300.0
    """A gang that isn't bound whole by then is released and queued again."""
    release_pause: float = 30.0
    """Pause of a released gang, so that two that hold half each don't collide again."""
    settle: float = 2.5
    """Longest time from an end that may only be a symptom until its cause must be known (a kubelet tells of an end 1 to
    2 s late)."""
    hot_attempt: float = 10.0
    """Shortest time between attempts, once a few of them have ended uncounted."""
    survivors: float = 30.0
    """Time that peers of a rank 0 that is done have to end by themselves."""


HOT_ATTEMPTS = 3
"""Attempts that may follow each other at once."""

Check = Callable[[Observation, Limits], Decision | None]


def finished(seen: Observation, limits: Limits) -> Decision | None:
    """A finished job stays as it is, until its time to live has passed."""
    if not seen.job.finished:
        return None
    ttl = seen.job.time_to_live
    if ttl is None:
        return Decision(Action.WAIT, look_again=_survivors_look(seen, limits))
    left = ttl - (seen.now - (seconds(seen.job.status.completion_time) or seen.now))
    return Decision(Action.WAIT, look_again=left) if left > 0 else Decision(Action.DELETE)


def _survivors_look(seen: Observation, limits: Limits) -> float | None:
    return limits.survivors if any(pod.live for pod in seen.pods) else None


def succeeded(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Done is done, whatever else happened: only an outcome says so."""
    if not seen.job.active or seen.succeeded is None:
        return None
    message = seen.succeeded.message or f"finished after step {seen.succeeded.step}"
    return Decision(Action.SUCCEED, Reason.SUCCEEDED, message, ended=seen.succeeded)


def failed_for_good(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """What the same input would give again is not tried again."""
    cause = seen.cause
    if not seen.job.active or cause is None or not cause.reported or cause.outcome.result not in PERMANENT:
        return None
    return Decision(Action.FAIL, cause.outcome.result, cause.outcome.message, ended=cause.outcome)


def invalid_spec(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """A spec that the types reject starts nothing; an attempt that runs already is left alone."""
    if seen.job.spec is not None or (seen.job.active and seen.child):
        return None
    return Decision(Action.REJECT, Reason.INVALID_SPEC, "; ".join(seen.job.problems))


def suspended(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """The user's pause is no failure."""
    if not seen.job.suspended:
        return None
    return Decision(Action.SUSPEND, Reason.SUSPENDED, "spec.suspend is true; set it to false to go on")


def deadline_exceeded(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """The operator's own clock: a suspended Job resets its start time, so the Job's deadline is no use."""
    limit = seen.job.active_deadline
    if not seen.job.active or limit is None or seen.elapsed < limit:
        return None
    message = f"ran for {seen.elapsed:.0f} s; spec.activeDeadlineSeconds allows {limit} s"
    return Decision(Action.FAIL, Reason.DEADLINE_EXCEEDED, message)


def not_admitted(seen: Observation, limits: Limits) -> Decision | None:
    """Without an attempt: ask for one; after a release, only when the pause is over."""
    if seen.job.active:
        return None
    if left := pausing(seen.job, seen.now, limits):
        return Decision(Action.WAIT, look_again=left)
    return Decision(Action.ADMIT)


def pausing(job: GRPOJobRecord, now: float, limits: Limits) -> float:
    """Seconds that a released gang still stays out of the queue; 0 when it is in."""
    admitted = job.condition(ConditionType.ADMITTED)
    if admitted is None or admitted.reason != Reason.SCHEDULING_TIMEOUT:
        return 0.0
    released = seconds(admitted.last_transition_time) or now
    return max(0.0, released + limits.release_pause - now)


def waiting_for_kueue(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """While Kueue keeps or takes back its admission, pods end without blame."""
    if seen.child is None or not seen.child.suspended or not seen.job.queue_name:
        return None
    return Decision(Action.WAIT, Reason.WAITING_FOR_KUEUE, f"Kueue has not admitted Job {seen.child.name} yet")


def attempt_ended(seen: Observation, limits: Limits) -> Decision | None:
    """A failed pod: wait a moment if it may be only the symptom, then answer its cause."""
    cause = seen.cause
    if cause is None:
        return None
    waited = seen.now - max((end.finished_at or 0.0 for end in seen.terminations), default=0.0)
    # Kueue takes a job back by suspending its Job, whose pods' deletion may be seen first
    settled = seen.settled and not (cause.disrupted and seen.job.queue_name)
    if not settled and waited < limits.settle:
        return Decision(Action.WAIT, look_again=limits.settle - waited)
    counted = not (cause.disrupted or cause.outcome.result is Result.PREEMPTED)
    return _again(seen, limits, cause.outcome, counted)


def job_gone(seen: Observation, limits: Limits) -> Decision | None:
    """A Job that was started and is gone: somebody deleted it. No failure of the training, so it doesn't count.

    Its name is not used again: pods of it may still write, and checkpoints are fenced by the attempt.
    """
    if seen.child is not None or not (seen.job.status.job_uid or seen.orphaned):
        return None
    message = f"the Job of attempt {seen.job.status.attempt} was deleted"
    return _again(seen, limits, Outcome(result=Result.PREEMPTED, message=message), counted=False)


def job_ended(seen: Observation, limits: Limits) -> Decision | None:
    """A Job that has ended while no pod tells why: its pods were deleted, or left no outcome."""
    if seen.child is None or not seen.child.ended:
        return None
    message = f"Job {seen.child.name} ended ({seen.child.ended}) and no pod is left that says why"
    return _again(seen, limits, Outcome(result=Result.PREEMPTED, message=message), counted=False)


def not_started(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """An attempt that was committed and has no Job yet."""
    return Decision(Action.START) if seen.child is None else None


def never_bound(seen: Observation, limits: Limits) -> Decision | None:
    """Half a gang is no gang: one that can't be bound whole in time gives everything back."""
    if seen.bound or seen.job.is_true(ConditionType.RUNNING) or seen.job.queue_name:
        return None
    begun = seconds(seen.job.status.attempt_start_time)
    left = limits.scheduling - (seen.now - (begun if begun is not None else seen.now))
    if left > 0:
        return None
    waiting = next((pod.unschedulable for pod in seen.pods if pod.unschedulable), "no node took them in time")
    bound = sum(bool(pod.node) for pod in seen.pods)
    message = f"{bound} of {seen.job.nodes} pods were bound within {limits.scheduling:.0f} s: {waiting}"
    return Decision(Action.RELEASE, Reason.SCHEDULING_TIMEOUT, message)


def hangs(seen: Observation, limits: Limits) -> Decision | None:
    """Second line behind the trainer's own watchdog: rank 0 answers, but its last step is long ago.

    A pull that fails is no evidence of a hang, so only a fresh answer counts.
    """
    allowed, pull = seen.job.hang_allowance, seen.pull
    if allowed is None or pull is None or pull.progress.last_step_time is None or seen.now - pull.at > 60:
        return None
    age = seen.now - pull.progress.last_step_time
    if age < allowed:
        return None
    message = f"no step finished for {age:.0f} s after step {pull.progress.step}; the operator allows {allowed:.0f} s"
    return _again(seen, limits, Outcome(result=Result.HANG, step=pull.progress.step, message=message), counted=True)


def _again(seen: Observation, limits: Limits, outcome: Outcome, counted: bool) -> Decision:
    """The next attempt, or the end when the limit of counted restarts is reached."""
    status, limit = seen.job.status, seen.job.restart_limit
    if counted and status.restarts >= limit:
        message = f"{outcome.result} after {status.restarts} of {limit} restarts: {outcome.message}"
        return Decision(Action.FAIL, Reason.RESTART_LIMIT, message, ended=outcome, counted=True)
    began = seconds(status.attempt_start_time)
    if status.attempt > HOT_ATTEMPTS and began is not None and (left := began + limits.hot_attempt - seen.now) > 0:
        return Decision(Action.WAIT, look_again=left)
    return Decision(Action.ADMIT, outcome.result, outcome.message, ended=outcome, counted=counted)


def goes_on(seen: Observation, limits: Limits) -> Decision:
    """Nothing to do but to tell how far it is."""
    return Decision(Action.WAIT, look_again=_next_timer(seen, limits))


def _next_timer(seen: Observation, limits: Limits) -> float | None:
    job, times = seen.job, []
    if job.active_deadline:
        times.append(job.active_deadline - seen.elapsed)
    begun = seconds(job.status.attempt_start_time)
    if not seen.bound and begun is not None:
        times.append(begun + limits.scheduling - seen.now)
    if job.hang_allowance and seen.pull and seen.pull.progress.last_step_time:
        times.append(seen.pull.progress.last_step_time + job.hang_allowance - seen.now)
    return max(0.1, min(times)) if times else None


CHECKS: tuple[Check, ...] = (
    finished,
    succeeded,
    failed_for_good,
    invalid_spec,
    suspended,
    deadline_exceeded,
    not_admitted,
    waiting_for_kueue,
    attempt_ended,
    job_gone,
    job_ended,
    not_started,
    never_bound,
    hangs,
    goes_on,
)
"""The policy, in order."""


def decide(seen: Observation, limits: Limits) -> Decision:
    """The first check's answer."""
    return next(decision for check in CHECKS if (decision := check(seen, limits)))
