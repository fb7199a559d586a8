"""Whose GPUs are promised: the GRPOJobs that can be read, and those set aside whose gang goes on all the same."""

from collections.abc import Callable, Iterator

from ..names import ObjectKey, runs_engines
from ..records import GRPOJobRecord, JobRecord
from ..starting import admitted_for
from .cache import Caches


class Gangs:
    """All GRPOJobs that the admission queue must count.

    One that can't be read any more is set aside, and its gang goes on: as long as the Job of its attempt lives, pods of
    it may come that no node has yet, so what was promised to it is nobody else's. One whose Job is yet to be created
    may be read again and start, but no later than any other (starting.not_started).
    """

    def __init__(self, caches: Caches, clock: Callable[[], float], scheduling: float) -> None:
        """Read from these caches; `clock` gives unix seconds, `scheduling` is `Limits.scheduling`."""
        self._caches = caches
        self._clock = clock
        self._scheduling = scheduling

    def __iter__(self) -> Iterator[GRPOJobRecord]:
        """Each of them."""
        yield from self._caches.grpojobs
        yield from filter(self._lives, self._caches.grpojobs.aside.values())

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        """Return the GRPOJob of this namespace and name, if it counts."""
        if job := self._caches.grpojobs.get(key):
            return job
        aside = self._caches.grpojobs.aside.get(key)
        return aside if aside and self._lives(aside) else None

    @property
    def look_again(self) -> float | None:
        """Seconds until time alone takes a job out of these; None while it doesn't."""
        waiting = (self._starts_within(job) for job in self._caches.grpojobs.aside.values() if not self._begun(job))
        return min((left for left in waiting if left > 0), default=None)

    def _lives(self, job: GRPOJobRecord) -> bool:
        """True if the Job of the attempt is there and has not ended, or may still be created."""
        # An unreadable job may become readable in time to be started, for as long as starting.not_started allows it.
        begun = self._begun(job)
        if not begun:
            return self._starts_within(job) > 0
        return job.active and any(not child.ended for child in begun)

    def _begun(self, job: GRPOJobRecord) -> list[JobRecord]:
        """The Job of the attempt, if there is one; not that of its engines, which lives on after it for a moment."""
        own = (job.uid, job.status.attempt)
        found = (child for child in self._caches.jobs.of(job.key) if not runs_engines(child.name))
        return [child for child in found if (child.grpojob_uid, child.attempt) == own]

    def _starts_within(self, job: GRPOJobRecord) -> float:
        """Seconds for which the attempt may still be started; 0 for one that has been, or isn't committed."""
        if not job.active or job.status.job_uid:
            return 0.0
        return self._scheduling - admitted_for(job, self._clock())
