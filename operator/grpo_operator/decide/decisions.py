"""Defines Decision, the result of a check, and Limits, the operator's time limits."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import Outcome
from grpo_api.status.status import AppliedJobClass, ResumeSource, Rollback

from .observation import Observation


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
    RETRY = "Retry"
    RESOLVE = "Resolve"
    DELETE = "Delete"


LEAVES_NO_ATTEMPT = (
    Action.REJECT,
    Action.QUEUE,
    Action.SUSPEND,
    Action.RELEASE,
    Action.SUCCEED,
    Action.FAIL,
)
"""Actions after which no attempt is active."""
ENDS_ATTEMPT = (*LEAVES_NO_ATTEMPT, Action.COMMIT)
"""Actions that end an active attempt: COMMIT puts the next one in its place."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The action and why, with the end that it answers and the plan that it commits."""

    action: Action
    reason: str = ""
    message: str = ""
    _: KW_ONLY
    ended: Outcome | None = None
    """The end of the current attempt that this answers."""
    counted: bool = False
    """True if that end counts against spec.restarts.limit."""
    rollback: Rollback | None = None
    """What further attempts leave out, for the current one diverged on it."""
    learned: Learned | None = None
    """What the job has learned from an attempt without memory or with a failed engine."""
    node: str = ""
    """The node on which the attempt ended without an outcome; empty if that is not why."""
    avoided_nodes: tuple[str, ...] | None = None
    """The nodes that further attempts are kept away from; None: those of before."""
    plan: ExecutionPlan | None = None
    """For COMMIT, QUEUE and RESOLVE: how the next attempt runs or would run."""
    job_class: AppliedJobClass | None = None
    """For COMMIT: the class that the plan was made with."""
    resume_from: ResumeSource | None = None
    """For RESOLVE: the checkpoints to begin with; `plan` made them."""
    revisions: dict[str, str] | None = None
    """For RESOLVE: commits of what both jobs name alike."""
    passed_over: int = 0
    """For QUEUE: younger jobs of its priority that have started first."""
    requeue_after: float | None = None
    """Seconds after which time alone may change the decision."""


@dataclass(frozen=True, slots=True)
class RequeueAfter:
    """A check has no answer yet, but will have one when time has passed."""

    seconds: float
    """Above 0: a deadline that is over has its answer, and is never waited for again."""


Check = Callable[[Observation, "Limits"], Decision | RequeueAfter | None]
"""Returns a Decision, the time after which it has one, or None: the next check answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times that the operator was installed with, in seconds."""

    scheduling_timeout_seconds: float = 300.0
    """A gang that isn't bound whole by then is released and queued again."""
    release_pause_seconds: float = 30.0
    """Pause after a gang's first release; it doubles up to `longest_release_pause_seconds`."""
    longest_release_pause_seconds: float = 600.0
    pods_missing_seconds: float = 5.0
    """Time after which a Job whose pods don't appear is asked why."""
    start_warning_seconds: float = 60.0
    """Time after which a gang that has nodes but doesn't run is asked why."""
    settle_seconds: float = 2.5
    """Longest time from an end that may only be a symptom until its cause must be known (a kubelet
    reports an end 1 to 2 s late)."""
    hang_settle_seconds: float = 15.0
    """The same after a hang: all ranks run into the limit, and one whose watchdog can't is ended 11
    s after the others of its pod (process/supervisor.py)."""
    late_pods_seconds: float = 60.0
    """Longest time from the end of a Job until its pods, which still seem to run, must be known (a
    watch that was cut comes back after 45 s at the latest)."""
    restart_pause_seconds: float = 10.0
    """Pause before the second restart in a row; the first has none, further ones double it."""
    longest_restart_pause_seconds: float = 300.0
    healthy_run_seconds: float = 600.0
    """A gang that has run for so long restarts without a pause again."""
    survivor_grace_seconds: float = 30.0
    """Time that peers of a rank 0 that is done have to end by themselves."""
    rank0_silence_seconds: float = 120.0
    """Time without an answer of rank 0 after which its progress counts as unknown; before its first
    answer spec.restarts.startTimeoutSeconds counts."""
    hub_silence_seconds: float = 180.0
    """Time without an answer of the hub after which a gang that waits for it is released."""
