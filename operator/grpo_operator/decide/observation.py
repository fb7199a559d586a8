"""Builds Observation: one GRPOJob and all objects that belong to it, at one moment.

Policies decide on facts such as "the gang runs" or "this termination is the cause", and not on API
objects. Records and the time go in, an Observation comes out.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from grpo_api.report.report import STEP_STAGES, Outcome, Progress, Result
from grpo_api.report.root_cause import CausePriority
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.status.status import ConditionType
from grpo_kube.objects.times import Observed

from ..pods.roles import replicas
from ..records.names import is_engines_job, preflight_name
from ..records.records import ENDED_PHASES, GRPOJobRecord, JobRecord, PodRecord
from ..records.terminations import PodTermination
from ..records.workloads import WorkloadRecord
from .first_seen import (
    COMPLETION,
    FirstSeenTimes,
    FirstSeenTracker,
    init_key,
    stored_age,
    stored_ages,
)
from .preflight import Preflight

NO_PODS: tuple[PodRecord, ...] = ()
_STARTED_PHASES = ("Running", *ENDED_PHASES)
_BEGUN = (*STEP_STAGES, "Saving", "Exporting", "Finished")
"""Stages after the first sign of all engines; Finished is an older image's."""


@dataclass(frozen=True, slots=True)
class Pull:
    """The last successful pull of a running attempt's /progress."""

    progress: Progress
    at: Observed
    """When it was pulled."""
    advanced_at: Observed
    """When a pull first showed this step, this stage and this number of events."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Rank 0 of a running attempt does not answer."""

    since: Observed
    """When it answered last, or was asked first."""
    problem: str
    """What the last pull failed with."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The world as one GRPOJob sees it."""

    job: GRPOJobRecord
    now: float
    """Unix seconds of the operator's own clock, for what is stored."""
    at: Observed
    """The same moment, for what is measured."""
    clock_step: float = 0.0
    """See FirstSeenTracker.clock_step."""
    child: JobRecord | None = None
    """The Job of the current attempt, if this GRPOJob's own and the one that was started."""
    pods: tuple[PodRecord, ...] = NO_PODS
    """Training pods of the current attempt, by index, then name."""
    engines: JobRecord | None = None
    """The Job of the current attempt's engines, if it is this GRPOJob's own."""
    engine_pods: tuple[PodRecord, ...] = NO_PODS
    """Its pods, by index, then name: also those that failed and were made again."""
    first_seen: FirstSeenTimes = field(default_factory=FirstSeenTimes)
    """When the operator first saw these."""
    earlier_jobs: tuple[JobRecord, ...] = ()
    """This GRPOJob's Jobs of earlier attempts, oldest first; and of later ones, where the status
    was set back."""
    earlier_pods: tuple[PodRecord, ...] = NO_PODS
    """Pods that carry the labels of those attempts; and the current one's, where it is not to run
    and its Job doesn't control them."""
    deleted_pods: tuple[PodRecord, ...] = NO_PODS
    """Pods of any attempt that ended and were deleted since, as they were last seen."""
    orphaned: bool = False
    """True if a Job of the current gang was made: pods, engines, or its deletion show it."""
    orphans: tuple[PodRecord, ...] = NO_PODS
    """Live pods of the current attempt that a Job made and no Job has any more."""
    pull: Pull | None = None
    """Last answer of the current attempt's rank 0."""
    silence: Silence | None = None
    """Since when and why rank 0 does not answer; None while it does."""
    source: GRPOJobRecord | None = None
    """The GRPOJob that spec.resumeFrom names, if it is there."""
    gang_left: bool = False
    """True if a pod of any attempt has not ended, or a Job may still make one."""
    pods_left: bool = False
    """True if a pod of any attempt has not ended."""
    workload: WorkloadRecord | None = None
    """Kueue's Workload of this GRPOJob, if it is there and this GRPOJob's own."""
    kueue_problem: str = ""
    """Why the Workload can't be looked up; empty if it can, or if the job has no Workload."""
    start_warning: str = ""
    """What an event says of the Job or pod that does not start, such as `FailedMount: …`."""
    preflight: Preflight | None = None
    """The preflight; None where none runs and none is needed."""

    @property
    def is_retry_requested(self) -> bool:
        """True if the job has failed, and the user has raised spec.retry since."""
        job = self.job
        if not job.is_finished or job.spec is None or not job.is_true(ConditionType.FAILED):
            return False
        return job.spec.retry > job.status.retry

    @property
    def last_attempt(self) -> int:
        """Number of the last attempt that was started, which a status that was set back lacks."""
        return max([self.job.status.attempt, *(job.attempt for job in self.earlier_jobs)])

    @property
    def queue_name(self) -> str | None:
        """Kueue's LocalQueue; None for an attempt that the operator admitted before the job had
        one."""
        if self.child and not self.child.workload:
            return None
        return self.job.queue_name

    @property
    def replicas(self) -> int:
        """How many engines in pods of their own the plan has."""
        return replicas(self.job.status.plan)

    @property
    def has_gang_run(self) -> bool:
        """True if the whole gang has run, so that a missing pod has ended, and engines are created
        again.

        Also true if it trains without engines that did not come in guard.rendezvousTimeoutSeconds.
        """
        if self.job.is_true(ConditionType.RUNNING):
            return True
        has_begun = self.pull is not None and self.pull.progress.stage in _BEGUN
        return has_begun and bool(self.replicas)

    @property
    def has_answered(self) -> bool:
        """True if rank 0 of the current attempt has ever answered, also a former operator."""
        progress = self.job.status.progress
        was_told = progress is not None and progress.attempt == self.job.status.attempt
        return self.pull is not None or was_told

    @property
    def is_job_gone(self) -> bool:
        """True if the Job of the attempt's gang was made, and is deleted or being deleted."""
        was_made = self.job.status.job_uid or self.first_seen.child_uid or self.orphaned
        return self.child is None and bool(was_made)

    @cached_property
    def initializing_pod(self) -> PodRecord | None:
        """The first pod of the gang whose init container runs."""
        pods = (*self.pods, *self.engine_pods)
        return next((pod for pod in pods if pod.init_container and pod.is_live), None)

    def initializing_seconds(self, pod: PodRecord) -> float:
        """For how long this operator has seen the pod's init container run."""
        return self.at - self.first_seen.initializing.get(init_key(pod), self.at)

    @cached_property
    def is_training_bound(self) -> bool:
        """True if every training pod has a node."""
        return self._has_all_pods and all(pod.node for pod in self.pods)

    @property
    def _has_all_pods(self) -> bool:
        return len(self.pods) >= self.job.nodes

    @cached_property
    def is_gang_bound(self) -> bool:
        """True if every pod of the gang has a node, before it runs its engines among them."""
        if not self.is_training_bound:
            return False
        return self.has_gang_run or len(self.engines_bound) >= self.replicas

    @cached_property
    def engines_bound(self) -> frozenset[int]:
        """Indices of the engines that have a node, or had one."""
        return frozenset(pod.index for pod in self.engine_pods if pod.node)

    @cached_property
    def has_training_started(self) -> bool:
        """True if every training pod runs or has run."""
        return self._has_all_pods and all(pod.phase in _STARTED_PHASES for pod in self.pods)

    @cached_property
    def has_gang_started(self) -> bool:
        """True if every pod of the gang runs or has run, before that its engines among them."""
        if not self.has_training_started:
            return False
        return self.has_gang_run or len(self.engines_up) >= self.replicas

    @cached_property
    def engines_up(self) -> frozenset[int]:
        """Indices of the engines that run."""
        return frozenset(pod.index for pod in self.engine_pods if self._is_up(pod))

    def _is_up(self, engine: PodRecord) -> bool:
        """True if an engine's pod runs, and it is one of those that the plan has."""
        if engine.phase != "Running" or not engine.is_live or engine.termination:
            return False
        return not engine.node_lost and engine.index < self.replicas

    @cached_property
    def terminations(self) -> tuple[PodTermination, ...]:
        """How the current attempt's pods ended, deletions and lost nodes among them."""
        return tuple(self._ends.values())

    @cached_property
    def _ends(self) -> dict[str, PodTermination]:
        """The terminations by uid of the pod."""
        any_ended = any(pod.termination for pod in self.pods)
        ends: dict[str, PodTermination] = {}
        for pod in self.pods:
            end = _termination(pod, self._deleted_first(pod), any_ended)
            if end:
                ends[pod.uid] = end
        return ends

    def _deleted_first(self, pod: PodRecord) -> bool:
        """True if the pod's deletion was seen before any pod failed by itself.

        After a failure it is the Job controller that deletes the others. A deletion and a failure
        that were first seen at the same moment may have come in either order: then the failure is
        the cause.
        """
        if not pod.deleting:
            return False
        failed_at = self._first_failure
        return failed_at is None or self.first_seen.deletion_of(pod, self.at) < failed_at

    @cached_property
    def _first_failure(self) -> Observed | None:
        """When the first pod was seen that had failed by itself; None if none has."""
        failures = filter(self._failed_by_itself, self.pods)
        return min((self.first_seen.end_of(pod, self.at) for pod in failures), default=None)

    def _failed_by_itself(self, pod: PodRecord) -> bool:
        """True if a pod failed, and not because it was deleted, which ends a program too."""
        end = pod.termination
        if end is None or not end.is_own_failure:
            return False
        if not pod.deleting:
            return True
        ended_at = self.first_seen.end_of(pod, self.at)
        deleted_at = self.first_seen.deletion_of(pod, self.at)
        return ended_at < deleted_at or (end.reported and ended_at == deleted_at)

    @cached_property
    def success_outcome(self) -> Outcome | None:
        """Rank 0's outcome that training has succeeded, or that of all ranks together."""
        outcomes: list[Outcome] = []
        rank0_is_done = False
        for pod in self.pods:
            end = pod.termination
            if end and end.has_succeeded:
                outcomes.append(end.outcome)
                rank0_is_done |= pod.index == 0
        if not rank0_is_done and len(outcomes) < self.job.nodes:
            return None
        return min(outcomes, key=lambda outcome: outcome.rank)

    @cached_property
    def cause(self) -> PodTermination | None:
        """The end to blame for the end of the attempt; None while nothing has ended badly.

        The first pod of a gang to fail is often only a symptom: when one rank dies, its peers lose
        their connections, and the Job controller deletes the survivors. So the lowest tier is
        blamed, then what was seen first.
        """
        failed: list[tuple[CausePriority, Observed, int, str]] = []
        for uid, end in self._ends.items():
            if not end.has_succeeded:
                end_seen_at = self.first_seen.ended.get(uid, self.at)
                failed.append((end.tier, end_seen_at, end.outcome.rank, uid))
        if not failed:
            return None
        _, _, _, blamed = min(failed)
        return self._ends[blamed]

    @property
    def over_for(self) -> float:
        """Seconds since the first sign that the current attempt is over; infinite without one."""
        over_since = self.first_seen.over
        return self.at - over_since if over_since else float("inf")

    @cached_property
    def is_cause_final(self) -> bool:
        """True once no later event can change the cause of the failure."""
        if self.cause is None:
            return False
        return self.cause.is_certain_cause or len(self.terminations) >= self.job.nodes

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that count for spec.activeDeadlineSeconds."""
        return float(self.job.status.active_seconds) + self.admitted_seconds

    @property
    def admitted_seconds(self) -> float:
        """Seconds since the attempt was admitted; 0 without one.

        A step of the wall clock counts only if this process has not seen the attempt before it.
        """
        if self.job.status.attempt_start_time is None:
            return 0.0
        return self.first_seen.admitted_for(self.job, self.now, self.at)

    @property
    def running_seconds(self) -> float:
        """How long the whole gang of the current attempt has run."""
        if not self.job.is_true(ConditionType.RUNNING):
            return 0.0
        return self.since(ConditionType.RUNNING)

    def since(self, kind: ConditionType) -> float:
        """Seconds since the condition last changed; 0 if never written. As `admitted_seconds`."""
        condition = self.job.condition(kind)
        if condition is None:
            return 0.0
        change = condition.type, condition.status
        age = stored_age(condition.last_transition_time, self.now)
        return self.first_seen.since(change, self.at, age)

    @property
    def ended_seconds(self) -> float:
        """Seconds since the job succeeded or failed. As `admitted_seconds`."""
        age = stored_age(self.job.status.completion_time, self.now)
        return self.first_seen.since(COMPLETION, self.at, age)


def _termination(pod: PodRecord, deleted_first: bool, any_ended: bool) -> PodTermination | None:
    """A pod's end, or its deletion or lost node as one.

    A lost node explains its peers' ends, but ends nothing by itself: the node may come back.
    """
    end = pod.termination
    if end:
        may_follow_deletion = not end.disrupted and end.tier >= CausePriority.HANG
        if deleted_first and may_follow_deletion:
            return replace(end, disrupted=True, node="")
        return end
    why = pod.disruption
    if deleted_first:
        message = f"pod {pod.name} was deleted while it ran" + (f": {why}" if why else "")
        node = ""
    elif pod.node_lost and any_ended:
        node = pod.node
        message = pod.lost_node_message
    else:
        return None
    outcome = truncate_to_fit(Outcome(result=Result.PREEMPTED), message)
    reasons = (why.partition(":")[0],) if why else ()
    return PodTermination(
        outcome=outcome, reported=False, disrupted=True, node=node, reasons=reasons
    )


def observe(
    job: GRPOJobRecord,
    children: Collection[JobRecord],
    pods: Collection[PodRecord],
    *,
    now: float,
    at: Observed,
    first_seen_tracker: FirstSeenTracker,
) -> Observation:
    """Sort a GRPOJob's children into the current attempt and earlier ones, without strangers'.

    Labels are hints that anybody can set. A Job is this GRPOJob's if that is its controller; a pod
    of the current attempt counts only if its controller is the attempt's Job. Pods of attempts that
    are not to run only have to end, so that for them the labels do: somebody may have orphaned
    them, and the next attempt waits for what they hold.
    """
    attempt = job.status.attempt
    own_jobs = [child for child in children if _is_of_attempt(child, job)]
    own_jobs.sort(key=attrgetter("attempt"))
    current = [child for child in own_jobs if child.attempt == attempt]
    gang_jobs = [child for child in current if not is_engines_job(child.name)]
    child = _current_child(gang_jobs, job.status.job_uid)
    engines = _current_engines(current)
    controllers = {job.status.job_uid, *map(attrgetter("uid"), gang_jobs)}
    own_pods = [
        pod for pod in pods if pod.grpojob_uid == job.uid or pod.controller_uid in controllers
    ]
    own_pods.sort(key=attrgetter("index", "name"))
    of_roles = _by_role(own_pods, attempt, controllers, engines)
    # The gang's Job is made first, so each other Job of the attempt means that there was one.
    orphaned = bool(current) or of_roles.has_orphans
    ages = stored_ages(job, now)
    if job.is_active:
        expected = bool(job.status.job_uid) or orphaned
        first_seen = first_seen_tracker.update(
            job.key,
            attempt,
            child,
            of_roles.trainers,
            at,
            expected=expected,
            engine_pods=of_roles.engines,
            ages=ages,
        )
    else:
        first_seen = first_seen_tracker.update_inactive(job.key, of_roles.trainers, at, ages=ages)
    pods_left = any(pod.phase not in ENDED_PHASES for pod in own_pods)
    to_end = () if job.is_active else of_roles.stray
    return Observation(
        job=job,
        now=now,
        at=at,
        clock_step=first_seen_tracker.clock_step(now, at),
        child=child,
        pods=of_roles.trainers,
        engines=engines,
        engine_pods=of_roles.engines,
        first_seen=first_seen,
        orphaned=orphaned,
        orphans=of_roles.orphans,
        gang_left=pods_left or any(own_job.may_make_pods for own_job in own_jobs),
        pods_left=pods_left,
        earlier_jobs=_earlier_jobs(own_jobs, attempt),
        earlier_pods=tuple(pod for pod in own_pods if pod.attempt != attempt or pod in to_end),
    )


class _PodsByRole(NamedTuple):
    """Pods of the current attempt: of its gang's Job, of its engines' Job, and of neither."""

    trainers: tuple[PodRecord, ...]
    engines: tuple[PodRecord, ...]
    stray: tuple[PodRecord, ...]

    @property
    def has_orphans(self) -> bool:
        """True if a Job that is gone made some of them, even if they lost it as owner."""
        return any(pod.controller_uid or pod.made_by_job for pod in self.stray)

    @property
    def orphans(self) -> tuple[PodRecord, ...]:
        """Live ones that a Job made and no Job has any more."""
        return tuple(pod for pod in self.stray if pod.is_orphan and pod.is_live)


def _by_role(
    own_pods: Collection[PodRecord],
    attempt: int,
    controllers: Collection[str | None],
    engines: JobRecord | None,
) -> _PodsByRole:
    """Sort an attempt's pods by the Job that controls them; `controllers` are gangs' Jobs."""
    trainers: list[PodRecord] = []
    of_engines: list[PodRecord] = []
    stray: list[PodRecord] = []
    for pod in own_pods:
        if pod.attempt != attempt:
            continue
        if pod.controller_uid in controllers:
            trainers.append(pod)
        elif engines and pod.controller_uid == engines.uid:
            of_engines.append(pod)
        else:
            stray.append(pod)
    return _PodsByRole(tuple(trainers), tuple(of_engines), tuple(stray))


def _is_of_attempt(child: JobRecord, job: GRPOJobRecord) -> bool:
    return child.grpojob_uid == job.uid and child.name != preflight_name(job.name)


def _current_child(gang_jobs: Collection[JobRecord], expected: str | None) -> JobRecord | None:
    """The Job of the current attempt's gang: the one that was started, once known."""
    live = (child for child in gang_jobs if not child.deleting)
    return next((child for child in live if expected in (None, child.uid)), None)


def _current_engines(current: Collection[JobRecord]) -> JobRecord | None:
    """Return the Job of the current attempt's engines, if it is there and not being deleted."""
    engines = (child for child in current if is_engines_job(child.name))
    return next((child for child in engines if not child.deleting), None)


def _earlier_jobs(own_jobs: Collection[JobRecord], attempt: int) -> tuple[JobRecord, ...]:
    return tuple(child for child in own_jobs if child.attempt != attempt and not child.deleting)
