"""Records when this operator first saw each state of a job's children.

Kubelets and the API server write their own times into objects, and their clocks may be minutes off. So the order of
events and the waits follow from this operator's clock alone. The records live in memory only: a new process sees all
states for the first time at the same moment, and then knows no order.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .names import ObjectKey
from .records import JobRecord, PodRecord
from .times import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """First sights of one job's current attempt."""

    attempt: int = 0
    child_uid: str = ""
    """uid of the attempt's Job, also when it is gone again."""
    child: Observed | None = None
    """First sight of the attempt's Job, if it is there."""
    ended: Mapping[str, Observed] = field(default_factory=dict)
    """First sight of the end of each pod that has ended, by its uid."""
    deleted: Mapping[str, Observed] = field(default_factory=dict)
    """First sight of the deletion of each pod that is being deleted, by its uid."""
    over: Observed | None = None
    """First sight of a sign that the attempt is over: one of these, or its Job has ended or is gone."""

    def end_of(self, pod: PodRecord, at: Observed) -> Observed:
        """When a pod's end was first seen; now, if it is seen for the first time."""
        return self.ended.get(pod.uid, at)

    def deletion_of(self, pod: PodRecord, at: Observed) -> Observed:
        """When a pod's deletion was first seen; now, if it is seen for the first time."""
        return self.deleted.get(pod.uid, at)


class Sightings:
    """The sightings of all jobs with an attempt."""

    def __init__(self) -> None:
        """Start without sightings."""
        self._jobs: dict[ObjectKey, Sighting] = {}

    def created(self, key: ObjectKey, attempt: int, uid: str, at: Observed) -> None:
        """Record that the attempt's Job was created: if it is not there later, it was deleted."""
        self._jobs[key] = Sighting(attempt=attempt, child_uid=uid, child=at)

    def of(
        self,
        key: ObjectKey,
        attempt: int,
        child: JobRecord | None,
        pods: Collection[PodRecord],
        at: Observed,
        *,
        expected: bool,
    ) -> Sighting:
        """A job's sightings after a look at its current attempt's Job and pods at this moment.

        `expected`: the Job was started, so that it is gone if it isn't there.
        """
        known = self._jobs.get(key, Sighting())
        if known.attempt != attempt:
            known = Sighting(attempt=attempt)
        ended = {pod.uid: known.ended.get(pod.uid, at) for pod in pods if pod.termination}
        deleted = {pod.uid: known.deleted.get(pod.uid, at) for pod in pods if pod.deleting}
        if child is None:
            child_uid, child_seen_at = known.child_uid, None
            job_is_over = expected or bool(known.child_uid)
        else:
            child_uid = child.uid
            child_seen_at = known.child if child.uid == known.child_uid else at
            job_is_over = bool(child.ended)
        over: Observed | None = None
        if ended or deleted or job_is_over:
            over = known.over or at
        found = Sighting(
            attempt=attempt, child_uid=child_uid, child=child_seen_at, ended=ended, deleted=deleted, over=over
        )
        self._jobs[key] = found
        return found

    def forget(self, key: ObjectKey) -> Sighting:
        """Drop the sightings of a job that is gone or has no attempt; return an empty Sighting."""
        self._jobs.pop(key, None)
        return Sighting()
