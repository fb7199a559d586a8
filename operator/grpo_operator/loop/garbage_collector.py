"""Deletes what is left of attempts that are not to run, and GRPOJobs whose time to live is over.

What can't be deleted is reported by an event: the status of a job that has ended stays as it is.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

from grpo_kube.cache import Cache, R, version_of
from grpo_kube.client import Client
from grpo_kube.objects.errors import Conflict, Denied, NotFound, Unavailable
from grpo_kube.objects.resources import LIVE_PODS, PODS, Object, ObjectKey, Selection
from grpo_kube.objects.times import Observed

from ..decide.cleanup import CleanUp, clean_up
from ..decide.decisions import Limits
from ..decide.observation import Observation
from ..records.names import GRPOJOBS, attempt_selector, engine_selector, orphan_selector
from ..records.records import GRPOJobRecord, JobRecord
from ..report.events import undeletable_event
from .caches import Caches

log = logging.getLogger(__name__)

REPORT_SECONDS = 10.0
"""Seconds for which a deletion fails until an event says so: pods need a moment to end."""
REPEAT_SECONDS = 1800.0
"""Seconds until it is said again: the API server keeps an event for an hour."""


class GarbageCollector:
    """Carries out decide/cleanup.py."""

    def __init__(
        self,
        cluster: Client,
        caches: Caches,
        limits: Limits,
        record: Callable[[ObjectKey, Object], None],
    ) -> None:
        """`record` sends an event on a GRPOJob."""
        self._cluster = cluster
        self._caches = caches
        self._limits = limits
        self._record = record
        self._report_at: dict[ObjectKey, Observed] = {}
        """When to report that something of a job can't be deleted, if it still can't."""

    async def collect(self, observation: Observation) -> str:
        """Delete Jobs and pods of attempts that are not to run. Return why some can't be deleted;
        empty if all can.

        What can't be deleted holds nothing else up: a Job without live pods holds no GPU.

        Raises:
            Conflict: a Job changed meanwhile; the cache has been brought up to date.
        """
        job = observation.job
        if observation.last_attempt > job.status.attempt:
            await self._confirm_status(job)
        garbage = clean_up(observation, self._limits)
        problems: list[str] = []
        for child in _jobs_to_delete(observation, garbage):
            with _recorded_in(problems, job):
                await self._delete(self._caches.jobs, child)
        for selector in _selectors_of_pods(observation, garbage):
            with _recorded_in(problems, job):
                pods = Selection(PODS, job.key.namespace, selector, LIVE_PODS)
                await self._cluster.delete_all(pods)
        problem = "; ".join(problems)
        self._report(observation, problem)
        return problem

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone."""
        self._report_at.pop(key, None)

    def _report(self, observation: Observation, problem: str) -> None:
        """Send an event if pods that must not run stay because of the problem."""
        job, at = observation.job, observation.at
        if not (problem and _has_pods_to_end(observation)):
            self.forget(job.key)
            return
        report_at = self._report_at.setdefault(job.key, Observed(at.at + REPORT_SECONDS))
        if at >= report_at:
            self._report_at[job.key] = Observed(at.at + REPEAT_SECONDS)
            self._record(job.key, undeletable_event(job, problem, observation.now))

    async def delete_job(self, job: GRPOJobRecord) -> None:
        """Delete a GRPOJob, and with it all that it owns.

        Raises:
            Conflict: it changed meanwhile; the cache has been brought up to date.
            ClusterError: the API server refused or did not answer.
        """
        await self._delete(self._caches.grpojobs, job)

    async def _confirm_status(self, job: GRPOJobRecord) -> None:
        """Read a job that has a Job of a later attempt than its status knows: another operator may
        have started that attempt.

        Raises:
            Conflict: the job has changed; the cache has been brought up to date.
        """
        item = await self._cluster.get(GRPOJOBS, *job.key)
        self._caches.grpojobs.put(item)
        if version_of(item)[1] != job.version:
            raise Conflict(f"GRPOJob {job.key} has changed")

    async def _delete(self, cache: Cache[R], record: R) -> None:
        """Delete an object only as it was observed: what it has become may have to stay."""
        try:
            await self._cluster.delete(cache.resource, *record.key, record)
        except Conflict:
            with contextlib.suppress(NotFound):
                cache.put(await self._cluster.get(cache.resource, *record.key))
            raise


def _has_pods_to_end(observation: Observation) -> bool:
    """True if a pod lives that must not run."""
    pods = observation.earlier_pods
    if not observation.job.is_active:
        pods += observation.pods + observation.engine_pods
    return any(pod.is_live for pod in pods)


def _jobs_to_delete(observation: Observation, garbage: CleanUp) -> Iterator[JobRecord]:
    for child in (*observation.earlier_jobs, observation.child, observation.engines):
        if child and child.name in garbage.delete_jobs:
            yield child
    preflight = observation.preflight
    if preflight and preflight.child and preflight.is_over:
        yield preflight.child


def _selectors_of_pods(observation: Observation, garbage: CleanUp) -> Iterator[str]:
    uid = observation.job.uid
    for attempt in garbage.stop_attempts:
        yield attempt_selector(uid, attempt)
    for attempt in garbage.stop_engines:
        yield engine_selector(uid, attempt)
    if garbage.stop_orphans:
        jobs = (observation.child, observation.engines)
        kept_jobs = [job.uid for job in jobs if job]
        yield orphan_selector(uid, observation.job.status.attempt, kept_jobs)


@contextlib.contextmanager
def _recorded_in(problems: list[str], job: GRPOJobRecord) -> Iterator[None]:
    """Add why the API server does not delete something to the problems, and go on."""
    try:
        yield
    except (Denied, NotFound, Unavailable) as error:
        log.warning("%s: what must not run can't be deleted: %s", job.key, error)
        problems.append(str(error))
