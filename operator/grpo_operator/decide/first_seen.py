"""Records when this operator first saw each state of a job's children.

Kubelets and the API server write their own times into objects, and their clocks may be minutes off.
So the order of events and the waits follow from this operator's clock alone. These records are in
memory only: a new process sees all states for the first time at the same moment, and then knows no
order.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from grpo_api.status.status import ConditionType
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, seconds

from ..records.records import GRPOJobRecord, JobRecord, PodRecord

LEAST_STEP = 1.0
"""Seconds from which a difference of the two clocks counts as a step of the wall clock."""
StoredTime = tuple[str, str]
"""Key of a time that the status records: type and status of a condition, ADMISSION, COMPLETION, or
the release of an attempt."""
ADMISSION: StoredTime = ("admission", "")
"""Of the current attempt."""
COMPLETION: StoredTime = ("completion", "")
_RELEASE = "release"
_MEASURED = (ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.SUCCEEDED)
"""Conditions from which a time is measured."""


def init_key(pod: PodRecord) -> str:
    """Key of `FirstSeenTimes.initializing` for the init container that runs in a pod."""
    return f"{pod.uid}/{pod.init_container}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSeenTimes:
    """When each state of one job's current attempt was first seen."""

    attempt: int = 0
    child_uid: str = ""
    """uid of the attempt's Job, also when it is gone again."""
    child: Observed | None = None
    """First sight of the attempt's Job, if it is there."""
    ended: Mapping[str, Observed] = field(default_factory=dict)
    """First sight of the end of each pod that has ended, by its uid."""
    deleted: Mapping[str, Observed] = field(default_factory=dict)
    """First sight of the deletion of each pod that is being deleted, by its uid."""
    initializing: Mapping[str, Observed] = field(default_factory=dict)
    """First sight of each init container that runs, by uid of its pod and its name."""
    stored: Mapping[StoredTime, Observed] = field(default_factory=dict)
    """When each time that the status records was, by this process's clock: the first sight, less
    its age then by the wall clock."""
    over: Observed | None = None
    """First sight of a sign of the attempt's end: one of these, or its Job ended or is gone."""

    def end_of(self, pod: PodRecord, at: Observed) -> Observed:
        """When a pod's end was first seen; now, if it is seen for the first time."""
        return self.ended.get(pod.uid, at)

    def deletion_of(self, pod: PodRecord, at: Observed) -> Observed:
        """When a pod's deletion was first seen; now, if it is seen for the first time."""
        return self.deleted.get(pod.uid, at)

    def since(self, stored: StoredTime, at: Observed, age: float) -> float:
        """Seconds since a time that the status records; `age`, which is by the wall clock, if it
        has not been seen before. So a step of that clock counts only if it came before the first
        sight."""
        came_about = self.stored.get(stored)
        return at - came_about if came_about else age

    def released_for(self, job: GRPOJobRecord, now: float, at: Observed) -> float:
        """Seconds since the job's gang was released."""
        return self.since(_release_of(job), at, release_age(job, now))

    def admitted_for(self, job: GRPOJobRecord, now: float, at: Observed) -> float:
        """Seconds since the job's attempt was admitted."""
        return self.since(ADMISSION, at, stored_age(job.status.attempt_start_time, now))


class FirstSeenTracker:
    """The first-seen times of all jobs with an attempt."""

    def __init__(self) -> None:
        """Start without any job."""
        self._jobs: dict[ObjectKey, FirstSeenTimes] = {}
        self._wall_offset: float | None = None
        """Unix seconds at which the clock of this process was 0, as of its first look."""

    def clock_step(self, now: float, at: Observed) -> float:
        """Seconds by which the wall clock has been set forward since the first look; 0 for what
        two readings differ by anyway."""
        offset = now - at.at
        if self._wall_offset is None:
            self._wall_offset = offset
        step = offset - self._wall_offset
        return step if abs(step) >= LEAST_STEP else 0.0

    def record_created(self, key: ObjectKey, attempt: int, uid: str, at: Observed) -> None:
        """Record that the attempt's Job was created: if it is not there later, it was deleted."""
        before = self._jobs.get(key, FirstSeenTimes())
        if before.attempt != attempt:
            before = FirstSeenTimes()
        self._jobs[key] = FirstSeenTimes(
            attempt=attempt,
            stored=before.stored,
            child_uid=uid,
            child=at,
        )

    def update(
        self,
        key: ObjectKey,
        attempt: int,
        child: JobRecord | None,
        pods: Collection[PodRecord],
        at: Observed,
        *,
        expected: bool,
        engine_pods: Collection[PodRecord] = (),
        ages: Mapping[StoredTime, float],
    ) -> FirstSeenTimes:
        """A job's first-seen times after a look at its current attempt's Job and pods at this
        moment.

        `expected`: the Job was started, so that it is gone if it isn't there; `ages`: those of the
        times in the status, by the wall clock.
        """
        before = self._jobs.get(key, FirstSeenTimes())
        if before.attempt != attempt:
            before = FirstSeenTimes(attempt=attempt)
        ended_at = {pod.uid: before.end_of(pod, at) for pod in pods if pod.termination}
        deleted_at = {pod.uid: before.deletion_of(pod, at) for pod in pods if pod.deleting}
        initializing = {
            init_key(pod): before.initializing.get(init_key(pod), at)
            for pod in (*pods, *engine_pods)
            if pod.init_container
        }
        child_seen_at: Observed | None = None
        if child is None:
            child_uid = before.child_uid
            is_job_over = expected or bool(before.child_uid)
        else:
            child_uid = child.uid
            child_seen_at = before.child if child.uid == before.child_uid else at
            is_job_over = bool(child.ended)
        over_since: Observed | None = None
        if ended_at or deleted_at or is_job_over:
            over_since = before.over or at
        first_seen = FirstSeenTimes(
            attempt=attempt,
            child_uid=child_uid,
            child=child_seen_at,
            ended=ended_at,
            deleted=deleted_at,
            initializing=initializing,
            stored=_times_by_own_clock(before, ages, at),
            over=over_since,
        )
        self._jobs[key] = first_seen
        return first_seen

    def update_inactive(
        self,
        key: ObjectKey,
        pods: Collection[PodRecord],
        at: Observed,
        *,
        ages: Mapping[StoredTime, float],
    ) -> FirstSeenTimes:
        """The times of a job without an attempt, of its conditions only while it has pods; `ages`:
        see `update`."""
        before = self.forget(key)
        if not pods:
            lasting = (COMPLETION[0], _RELEASE)
            ages = {name: age for name, age in ages.items() if name[0] in lasting}
        if not ages:
            return FirstSeenTimes()
        first_seen = FirstSeenTimes(stored=_times_by_own_clock(before, ages, at))
        self._jobs[key] = first_seen
        return first_seen

    def times(self, key: ObjectKey) -> FirstSeenTimes:
        """A job's times as of the last look."""
        return self._jobs.get(key, FirstSeenTimes())

    def forget(self, key: ObjectKey) -> FirstSeenTimes:
        """Drop the first-seen times of a job that is gone; return them."""
        return self._jobs.pop(key, FirstSeenTimes())


def stored_ages(job: GRPOJobRecord, now: float) -> dict[StoredTime, float]:
    """The ages, by the wall clock, of the times in the status that waits are measured from."""
    ages: dict[StoredTime, float] = {}
    if job.is_active and job.status.attempt_start_time is not None:
        ages[ADMISSION] = stored_age(job.status.attempt_start_time, now)
    if job.is_finished and job.time_to_live is not None:
        ages[COMPLETION] = stored_age(job.status.completion_time, now)
    if job.is_released:
        ages[_release_of(job)] = release_age(job, now)
    for condition in filter(None, map(job.condition, _MEASURED)):
        ages[condition.type, condition.status] = stored_age(condition.last_transition_time, now)
    return ages


def release_age(job: GRPOJobRecord, now: float) -> float:
    """Seconds since the job's gang was released: see stored_age."""
    ends = job.status.ends
    return stored_age(ends[-1].end_time if ends else None, now)


def _release_of(job: GRPOJobRecord) -> StoredTime:
    return _RELEASE, str(job.status.attempt)


def stored_age(stored: str | None, now: float) -> float:
    """Seconds since a stored time, by the wall clock; 0 if it is absent or in the future."""
    return max(0.0, now - (seconds(stored) or now))


def _times_by_own_clock(
    before: FirstSeenTimes, ages: Mapping[StoredTime, float], at: Observed
) -> dict[StoredTime, Observed]:
    """When each of these came about, by the clock of this process."""
    return {name: before.stored.get(name, Observed(at.at - age)) for name, age in ages.items()}
