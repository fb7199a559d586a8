"""Builds the Observation of a GRPOJob from the caches, and asks the API server for what no cache
has.

An observation costs no request while a gang runs well. Requests are made only for the pods of a Job
that has ended without one, and for the events of a gang that does not start.
"""

from dataclasses import replace
from typing import Protocol

from grpo_kube.client import Cluster
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import ProcessClock

from ..decide.observation import FirstSeen, Observation, Pull, Silence, observe
from ..records.packed_job import content_without_status
from ..records.records import GRPOJobRecord
from ..tracing.attempt_trace import AttemptTraces
from .caches import Caches, fetch_missing_pods
from .pod_start_events import PodStartEvents
from .workload_sync import Workloads


class Rank0(Protocol):
    """Answers and silences of the ranks 0 of running gangs."""

    def pull(self, key: ObjectKey) -> Pull | None:
        """The last answer of a job's rank 0."""
        ...

    def silence(self, key: ObjectKey) -> Silence | None:
        """Return since when and why it does not answer; None while it does."""
        ...


class Observer:
    """Observes one GRPOJob at a time, with all that belongs to it."""

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        clock: ProcessClock,
        *,
        workloads: Workloads,
        rank0: Rank0,
        pod_start_events: PodStartEvents,
        traces: AttemptTraces | None = None,
    ) -> None:
        """`rank0` gives the last answer of each job's rank 0; `traces` receives the observation of
        each reconcile."""
        self._cluster = cluster
        self._caches = caches
        self._clock = clock
        self._workloads = workloads
        self._rank0 = rank0
        self._pod_start_events = pod_start_events
        self._traces = traces
        self.first_seen = FirstSeen()
        """When this process first saw each state of the jobs' children."""

    def job(self, key: ObjectKey) -> GRPOJobRecord | None:
        """Return the GRPOJob itself, as it is in the cache."""
        return self._caches.grpojobs.get(key)

    async def observe(self, key: ObjectKey) -> Observation | None:
        """Return what a reconcile decides on; None for a job that is gone, being deleted, or
        another controller's.

        Raises:
            ClusterError: the API server did not answer.
        """
        observation = self.read_caches(key)
        if observation is None or observation.job.deleting:
            return None
        if self._traces:
            self._traces.record_observation(observation)
        if await fetch_missing_pods(self._cluster, self._caches, observation):
            observation = self.read_caches(key) or observation
        warning = await self._pod_start_events.newest_warning(observation)
        return replace(observation, start_warning=warning) if warning else observation

    def read_caches(self, key: ObjectKey) -> Observation | None:
        """Return an observation without any request; None for a job that is gone, or another
        controller's."""
        job = self.job(key)
        if job is None or not job.is_ours:
            return None
        observation = observe(
            job,
            self._caches.jobs.owned_by(key),
            self._caches.pods.owned_by(key),
            now=self._clock.wall(),
            at=self._clock.monotonic(),
            first_seen=self.first_seen,
        )
        observation = self._workloads.look(observation)
        observation = replace(
            observation, deleted_pods=self._caches.deleted_pods.of_job(key, job.uid)
        )
        return self._with_progress(observation) if job.is_active else self._with_source(observation)

    def read_dispatched(self, job: GRPOJobRecord) -> Observation | None:
        """Return a job that Kueue sends to another cluster, with its Workload; None if nothing is
        to be asked of Kueue.

        Its status is copied from the other cluster, so the observation has an empty one.
        """
        if job.is_finished or job.deleting or not job.queue_name:
            return None
        here = replace(job, typed=content_without_status(job.spec))
        observation = Observation(job=here, now=self._clock.wall(), at=self._clock.monotonic())
        return self._workloads.look(observation)

    def _with_progress(self, observation: Observation) -> Observation:
        """Add what rank 0 of the current attempt last reported."""
        job = observation.job
        pull, silence = self._rank0.pull(job.key), self._rank0.silence(job.key)
        if pull and pull.progress.attempt != job.status.attempt:
            pull = None
        return replace(observation, pull=pull, silence=silence)

    def _with_source(self, observation: Observation) -> Observation:
        """Add the job of `spec.resumeFrom.grpoJob`."""
        job = observation.job
        if not job.resume_job:
            return observation
        return replace(observation, source=self.job(ObjectKey(job.key.namespace, job.resume_job)))

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone, or another controller's."""
        self.first_seen.forget(key)
        self._pod_start_events.forget(key)
        # A job that can't be read is set aside and may come back: its trace is not over.
        if self._traces and key not in self._caches.grpojobs.quarantined_records:
            self._traces.end_job(key, self._clock.wall())
