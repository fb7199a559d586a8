"""Judges the preflight of a GRPOJob: passed, failed, under way, or what keeps it.

A mistake that no time repairs fails the job before it holds a GPU. What may pass by itself is
checked again after a pause. Obstacles are of two kinds. One that the gang's pods would meet, too,
such as a missing Secret, keeps the job waiting. One of the preflight alone, such as a quota without
room for a pod more, keeps a job with spec.preflight Auto for five minutes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from grpo_api.report.preflight import PreflightProblem, PreflightReport
from grpo_api.status.status import Condition, ConditionType, PreflightStatus
from grpo_kube.objects.json_reader import truncate
from grpo_kube.objects.times import doubled_pause, seconds, timestamp

from ..records.reasons import Reason
from ..records.records import GRPOJobRecord, JobRecord, PodRecord
from ..records.terminations import PodTermination

BLOCKED_SECONDS = 300.0
"""How long an obstacle of the preflight alone keeps a job with spec.preflight Auto."""
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Seconds between two preflights; the pause doubles with each."""
FIRST_QUESTION = 5.0
"""Seconds after which a preflight that does not run is asked why."""
LONGEST_REFUSAL = 60.0
"""Longest time until a refused Job is tried again: a policy that refuses one refuses hundreds."""
SILENT_SCHEDULER = 60.0
"""Seconds without a node or a reason after which the pod's scheduler is asked about."""
LATE_PODS = 60.0
"""Longest time from the end of the Job until its pod's end must be known, and it is deleted."""
MOST_EVICTIONS = 3
MAX_CAUSE = 512
ROOM = 240
"""Characters of a message's problems; what becomes of the job follows."""
_SHARED = re.compile(r"service ?account|priority ?class|persistentvolumeclaim", re.IGNORECASE)
"""In a refusal of the API server or the scheduler: the gang's pods would be refused, too."""
_ADVICE = re.compile(r"[;.]? [Rr]aise spec\..*", re.DOTALL)
"""What an end advises for the job's own pods. A preflight's has amounts of its own."""
_WAITS = (
    ("spec.checkpoint", Reason.WAITING_FOR_STORE),
    ("spec.resumeFrom", Reason.WAITING_FOR_STORE),
    ("spec.rewards", Reason.WAITING_FOR_REWARDS),
)
"""What a job waits for, by the path of the problem; for all others it is the hub."""


def should_check(job: GRPOJobRecord, enabled: bool) -> bool:
    """True if a job may not start an attempt before its preflight has passed.

    `enabled`: the operator was installed with preflights for jobs with spec.preflight Auto.
    """
    # A finished job's spec is packed.
    if job.is_finished or job.is_active or not job.is_ours:
        return False
    spec = job.spec
    if spec is None or spec.placement.accelerator != "GPU":
        return False
    # Another program than the trainer may be in an image without the checks.
    is_wanted = spec.preflight == "Required" or (
        spec.preflight == "Auto" and enabled and not spec.command
    )
    if not is_wanted:
        return False
    # A job whose first attempt was started by an earlier operator is no longer checked.
    return job.status.attempt == 0 or job.status.preflight is not None


def checked_condition(job: GRPOJobRecord) -> Condition | None:
    """The condition Checked; None where it speaks of an earlier version of the spec."""
    condition = job.condition(ConditionType.CHECKED)
    is_current = condition is not None and condition.observed_generation == job.generation
    return condition if is_current else None


def is_checked(job: GRPOJobRecord) -> bool:
    """True if the status says that this version of the spec may start."""
    condition = checked_condition(job)
    return condition is not None and condition.status == "True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of a preflight."""

    reason: Reason
    message: str
    status: PreflightStatus
    """The new status.preflight."""
    should_start: bool = False
    """True if its Job is to be created now."""
    requeue_after: float | None = None
    """Seconds after which time alone may change this."""

    @property
    def has_passed(self) -> bool:
        """True if the job may start."""
        return self.reason in (Reason.PASSED, Reason.NOT_CHECKED)


class _Obstacle(NamedTuple):
    message: str
    is_shared: bool
    """True if the gang's pods would meet it, too."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The preflight of one GRPOJob at one moment."""

    job: GRPOJobRecord
    is_needed: bool
    digest: str = ""
    """See pods.preflight_job.preflight_digest; empty where no preflight is needed."""
    child: JobRecord | None = None
    """Its Job, whatever it was made for."""
    pods: tuple[PodRecord, ...] = ()
    """The pods of that Job."""
    now: float
    """Unix seconds of the operator's own clock."""
    waited: float = 0.0
    """Seconds since the operator first saw the Job."""
    ended_for: float = 0.0
    """Seconds since it first saw a sign of the Job's end."""
    tried_for: float = 0.0
    """Seconds since the last one that has ended, as the status says."""
    blocked_for: float = 0.0
    """Seconds for which the status has said that this preflight can't run."""
    warning: str = ""
    """Why the API server refuses the Job, or what an event says of the Job or its pod."""

    @property
    def is_over(self) -> bool:
        """True if its Job is of no use any more."""
        if self.child is None or self.child.deleting:
            return False
        # A user's finalizer may keep a deleted job for hours.
        is_unwanted = self.job.is_suspended or self.job.deleting
        if not self.is_needed or is_unwanted or self.child.digest != self.digest:
            return True
        status = self.job.status.preflight
        return status is not None and (status.given_up or status.job_uid == self.child.uid)

    @property
    def asks_about(self) -> str:
        """Return the uid of the Job or pod whose events may explain why the preflight does not run;
        empty while it is too early."""
        child = self._open_child
        if child is None or self.waited < FIRST_QUESTION:
            return ""
        if not self.pods:
            return child.uid
        pod = self._waiting_pod
        return pod.uid if pod and pod.node and pod.phase == "Pending" else ""

    @cached_property
    def check(self) -> Check:
        """Return the result of the preflight."""
        status = self._status
        if status.given_up:
            return Check(reason=Reason.NOT_CHECKED, message=status.cause or "", status=status)
        obstacle = self._obstacle
        if obstacle is None and status.cause and not self._is_under_way:
            obstacle = _Obstacle(status.cause, is_shared=False)
        if obstacle:
            return self._check_of_obstacle(status, obstacle)
        if status.report is None:
            return self._unfinished_check(
                status, Reason.CHECKING, "a pod without GPUs checks the job"
            )
        return self._check_of_report(status, status.report)

    @property
    def _is_auto(self) -> bool:
        return self.job.spec is not None and self.job.spec.preflight == "Auto"

    @property
    def _open_child(self) -> JobRecord | None:
        """The Job that checks this version of the spec, until its end is counted."""
        child = self.child
        if child is None or child.deleting or child.digest != self.digest:
            return None
        preflight_status = self.job.status.preflight
        is_counted = preflight_status is not None and preflight_status.job_uid == child.uid
        return None if is_counted else child

    @property
    def _is_under_way(self) -> bool:
        """True if the Job is there, and its end has not been seen."""
        child = self._open_child
        return child is not None and child.uid != self._status.job_uid

    @property
    def _waiting_pod(self) -> PodRecord | None:
        return next((pod for pod in self.pods if pod.termination is None), None)

    def _has_ended(self, child: JobRecord) -> bool:
        """True if the check has ended, and how is known. A pod's end may be seen after its Job's,
        and a container that a webhook injected keeps the Job from its end."""
        if any(pod.others_run and end and not end.disrupted for pod, end in self._pods_and_ends):
            return True
        return bool(child.ended) and (bool(self._ends) or self.ended_for >= LATE_PODS)

    @property
    def _pods_and_ends(self) -> list[tuple[PodRecord, PodTermination | None]]:
        return [(pod, pod.termination) for pod in self.pods]

    @cached_property
    def _ends(self) -> list[PodTermination]:
        return [end for _, end in self._pods_and_ends if end]

    @cached_property
    def _status(self) -> PreflightStatus:
        """What is known of this version of the spec, with the end of the Job if it is new."""
        preflight_status = self.job.status.preflight
        if preflight_status is None or preflight_status.digest != self.digest:
            preflight_status = PreflightStatus(digest=self.digest)
        child = self._open_child
        if child is None or preflight_status.given_up:
            return preflight_status
        report = next((pod.report for pod in self.pods if pod.report), None)
        if report is None and not self._has_ended(child):
            return preflight_status
        now = timestamp(self.now)
        update: dict[str, object] = {
            "tries": preflight_status.tries + 1,
            "job_uid": child.uid,
            "time": now,
            "report": report,
            "cause": None,
            "blocked_since": None,
        }
        if report is None:
            own_ends = [end for end in self._ends if not end.disrupted]
            last = _ADVICE.sub("", own_ends[-1].outcome.message) if own_ends else child.ended
            update["cause"] = truncate(f"the preflight ended without a report: {last}", MAX_CAUSE)
            update["blocked_since"] = preflight_status.blocked_since or now
            # It has run, and would end so again.
            update["given_up"] = bool(own_ends) and self._is_auto
        return preflight_status.model_copy(update=update)

    @cached_property
    def _obstacle(self) -> _Obstacle | None:
        """What keeps the preflight from running."""
        if self._open_child and not self._is_under_way:
            return None
        if self.child and self._is_last_job_kept:
            message = f"its last Job {self.child.name} can't be deleted; delete it yourself"
            return _Obstacle(message, is_shared=False)
        if self._open_child is None or not self.pods:
            return self._refusal
        evictions = [end for end in self._ends if end.disrupted]
        if len(evictions) >= MOST_EVICTIONS:
            message = f"its pod was evicted {len(evictions)} times: {evictions[-1].outcome.message}"
            return _Obstacle(message, is_shared=False)
        pod = self._waiting_pod
        return self._obstacle_of_pod(pod) if pod else None

    def _obstacle_of_pod(self, pod: PodRecord) -> _Obstacle | None:
        """What keeps a pod that has not ended from starting."""
        if pod.unschedulable:
            return _Obstacle(pod.unschedulable, is_shared=bool(_SHARED.search(pod.unschedulable)))
        if pod.is_stuck:
            return _Obstacle(f"pod {pod.name} waits: {pod.waiting}", is_shared=True)
        if pod.phase == "Pending" and self.warning and not pod.init_container:
            return _Obstacle(f"pod {pod.name} waits: {self.warning}", is_shared=True)
        # One that follows another may be new.
        is_first = not self._ends
        if is_first and not pod.node and self.waited >= SILENT_SCHEDULER:
            return _Obstacle(silent_scheduler_message(pod, self.job), is_shared=True)
        return None

    @property
    def _is_last_job_kept(self) -> bool:
        """True if a Job that is of no use any more keeps the name of the next one for long."""
        report = self._status.report
        has_passed = report is not None and not report.problems
        return not (self._open_child or has_passed) and self.ended_for >= LATE_PODS

    @property
    def _refusal(self) -> _Obstacle | None:
        """Why the Job or its pod is not created."""
        child = self._open_child
        warning = self.warning
        if child and child.suspended:
            warning = suspended_message(child)
        if not warning:
            return None
        what = "its pod was not created" if child else "its Job was not created"
        is_shared = bool(_SHARED.search(warning))
        return _Obstacle(f"{what}: {warning}", is_shared=is_shared)

    def _check_of_obstacle(self, status: PreflightStatus, obstacle: _Obstacle) -> Check:
        """The preflight can't run."""
        what = f"the preflight can't run: {obstacle.message}"
        if obstacle.is_shared:
            status = status.model_copy(update={"blocked_since": None})
            message = f"{what}; the job's own pods would wait for the same"
            return self._unfinished_check(status, Reason.PREFLIGHT_BLOCKED, message)
        # A time in the future was written by a clock that has been set back, or by another's.
        since = min(self.now, seconds(status.blocked_since) or self.now)
        status = status.model_copy(update={"blocked_since": timestamp(since)})
        if not self._is_auto:
            message = f"{what}; spec.preflight is Required, so the job waits"
            return self._unfinished_check(status, Reason.PREFLIGHT_BLOCKED, message)
        seconds_left = BLOCKED_SECONDS - self.blocked_for
        if seconds_left <= 0:
            update = {"given_up": True, "cause": truncate(what, MAX_CAUSE)}
            status = status.model_copy(update=update)
            return Check(reason=Reason.NOT_CHECKED, message=status.cause or "", status=status)
        message = f"{what}; after {BLOCKED_SECONDS / 60:.0f} minutes the job starts unchecked"
        return self._unfinished_check(status, Reason.PREFLIGHT_BLOCKED, message, seconds_left)

    def _check_of_report(self, status: PreflightStatus, report: PreflightReport) -> Check:
        """The answer to a report."""
        skipped = _join_messages((check.path, check.message) for check in report.skipped)
        if not report.problems:
            message = "no mistakes were found"
            if skipped:
                message += f"; not checked: {skipped}"
            if report.prompts and report.prompts.template_warning:
                message += f". The prompts: {report.prompts.template_warning}"
            return Check(reason=Reason.PASSED, message=message, status=status)
        message = problems_message(report)
        if any(not problem.transient for problem in report.problems):
            return Check(reason=Reason.PREFLIGHT_FAILED, message=message, status=status)
        reason = _waiting_reason(report.problems[0])
        return self._unfinished_check(
            status, reason, f"{message}; it is checked again until it passes"
        )

    def _unfinished_check(
        self, status: PreflightStatus, reason: Reason, message: str, most: float = LONGEST_PAUSE
    ) -> Check:
        """A check that goes on: by the Job that is there, or another after the pause."""
        if self._is_under_way:
            until_asked = max(self.waited, FIRST_QUESTION - self.waited)
            return Check(
                reason=reason, message=message, status=status, requeue_after=min(most, until_asked)
            )
        stored = self.job.status.preflight
        has_just_ended = stored is None or stored.job_uid != status.job_uid
        pause = doubled_pause(FIRST_PAUSE, LONGEST_PAUSE, status.tries) if status.tries else 0.0
        seconds_left = pause - (0.0 if has_just_ended else self.tried_for)
        is_free = self.child is None
        should_start = is_free and seconds_left <= 0
        # After a refusal, and while the last Job is being deleted.
        until_tried = min(max(FIRST_QUESTION, self.blocked_for), LONGEST_REFUSAL)
        requeue_after = seconds_left if seconds_left > 0 else until_tried
        return Check(
            reason=reason,
            message=message,
            status=status,
            should_start=should_start,
            requeue_after=min(most, requeue_after),
        )


def suspended_message(child: JobRecord) -> str:
    """Why a Job that the operator made has no pods."""
    return f"Job {child.name} is suspended, and not by this operator"


def silent_scheduler_message(pod: PodRecord, job: GRPOJobRecord) -> str:
    """What to look at for a pod without a node that no scheduler gives a reason for."""
    named = job.spec.pod_template.spec.scheduler_name if job.spec else None
    scheduler = named or "default-scheduler"
    return f"scheduler {scheduler} has not reported on pod {pod.name}: check that it runs"


def _waiting_reason(problem: PreflightProblem) -> Reason:
    for prefix, reason in _WAITS:
        if problem.path.startswith(prefix):
            return reason
    return Reason.WAITING_FOR_HUB


def problems_message(report: PreflightReport) -> str:
    """The problems of a report, mistakes first, and how many a message has no room for."""
    problems = sorted(report.problems, key=lambda problem: problem.transient)
    message = ""
    for shown in range(len(problems), 0, -1):
        hidden = len(problems) - shown + report.omitted_problems
        message = _join_messages((problem.path, problem.message) for problem in problems[:shown])
        if hidden:
            message += f"; status.preflight has {hidden} more"
        if len(message) <= ROOM:
            break
    return message


def _join_messages(sentences: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{path}: {message}" for path, message in sentences)
