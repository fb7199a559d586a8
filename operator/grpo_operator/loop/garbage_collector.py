"""Deletes what is left of attempts that are not to run, and GRPOJobs whose time to live is over."""

import contextlib

from grpo_kube.cache import Cache, R, version_of
from grpo_kube.client import Cluster
from grpo_kube.objects.errors import Conflict, NotFound
from grpo_kube.objects.resources import LIVE_PODS, PODS, Selection

from ..decide.cleanup import clean_up
from ..decide.decisions import Limits
from ..decide.observation import Observation
from ..records.names import GRPOJOBS, attempt_selector, engine_selector, orphan_selector
from ..records.records import GRPOJobRecord
from .caches import Caches


class GarbageCollector:
    """Carries out decide/cleanup.py."""

    def __init__(self, cluster: Cluster, caches: Caches, limits: Limits) -> None:
        """Take what a deletion works with."""
        self._cluster = cluster
        self._caches = caches
        self._limits = limits

    async def collect(self, observation: Observation) -> None:
        """Delete Jobs and pods of attempts that are not to run.

        Raises:
            Conflict: a Job changed meanwhile; the cache has been brought up to date.
            ClusterError: the API server refused or did not answer.
        """
        if observation.last_attempt > observation.job.status.attempt:
            await self._confirm_status(observation.job)
        garbage = clean_up(observation, self._limits)
        for child in (*observation.earlier_jobs, observation.child, observation.engines):
            if child and child.name in garbage.delete_jobs:
                await self._delete(self._caches.jobs, child)
        preflight = observation.preflight
        if preflight and preflight.child and preflight.is_over:
            await self._delete(self._caches.jobs, preflight.child)
        uid, namespace = observation.job.uid, observation.job.key.namespace
        selectors = [attempt_selector(uid, attempt) for attempt in garbage.stop_attempts]
        selectors += [engine_selector(uid, attempt) for attempt in garbage.stop_engines]
        if garbage.stop_orphans:
            jobs = (observation.child, observation.engines)
            kept_jobs = [job.uid for job in jobs if job]
            attempt = observation.job.status.attempt
            selectors.append(orphan_selector(uid, attempt, kept_jobs))
        for selector in selectors:
            await self._cluster.delete_all(Selection(PODS, namespace, selector, LIVE_PODS))

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
