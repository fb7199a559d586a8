"""Holds the caches of a reconcile, remembers deleted pods, and fetches what the watch has not
delivered yet.

A deleted pod may be gone within milliseconds after its container ended. Its job may not be
reconciled yet then, or the result of that may not be in the status. So the last state of deleted
pods is kept, which shows how long each held its GPUs. It is in memory only and makes the account of
GPU time exact. Without it a pod is timed by the end of its Job.

After an outage the watch of Jobs may be back before the watch of pods. Then a Job has ended whose
pods are not known. Without pods no cause is known, and a failure that counts would pass for a
disruption. So the pods are listed before the end is judged.
"""

from operator import attrgetter

from grpo_kube.cache import Cache
from grpo_kube.client import Cluster
from grpo_kube.objects.errors import NotFound
from grpo_kube.objects.resources import JOBS, NETWORK_POLICIES, PODS, SERVICES, ObjectKey, Selection
from grpo_kube.quarantine import Quarantine

from ..decide.observation import Observation
from ..records.names import GRPOJOBS, WORKLOADS, attempt_selector, child_job
from ..records.parsing import (
    grpojob_record,
    job_record,
    pod_record,
    policy_record,
    reserving_record,
    service_record,
)
from ..records.records import JobRecord, PodRecord
from ..records.workloads import reserving_workload, workload_record

REMEMBERED = 1024
"""How many pods are remembered: those of the two largest gangs."""


class DeletedPods:
    """The last of the pods that ended and then were deleted, by their GRPOJob."""

    def __init__(self) -> None:
        """Start without pods."""
        self._by_uid: dict[str, PodRecord] = {}
        """Those that were deleted last come last."""
        self._by_job: dict[ObjectKey, dict[str, PodRecord]] = {}

    def remember(self, pod: PodRecord) -> None:
        """Remember a deleted pod, if its end was reported."""
        # Without its end a pod can't be timed any better than by the end of its Job. One without a
        # uid is of no attempt.
        if pod.end is None or not pod.grpojob_uid:
            return
        # To its watch, a pod is deleted and made again when its label is taken off and put on.
        self._forget(pod.uid)
        self._by_uid[pod.uid] = pod
        self._by_job.setdefault(pod.job_key, {})[pod.uid] = pod
        if len(self._by_uid) > REMEMBERED:
            self._forget(next(iter(self._by_uid)))

    def of_job(self, job_key: ObjectKey, job_uid: str) -> tuple[PodRecord, ...]:
        """Return the deleted pods of a GRPOJob."""
        return tuple(
            pod for pod in self._by_job.get(job_key, {}).values() if pod.grpojob_uid == job_uid
        )

    def _forget(self, uid: str) -> None:
        pod = self._by_uid.pop(uid, None)
        if pod is None:
            return
        siblings = self._by_job[pod.job_key]
        del siblings[uid]
        if not siblings:
            del self._by_job[pod.job_key]


_JOB_KEY = attrgetter("job_key")
"""The GRPOJob to which an object belongs."""


class Caches:
    """The caches of all mirrored kinds."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.quarantine = Quarantine()
        self.grpojobs = Cache(GRPOJOBS, grpojob_record, self.quarantine, reserving_record)
        self.jobs = Cache(JOBS, job_record, self.quarantine, index=_JOB_KEY)
        self.deleted_pods = DeletedPods()
        self.pods = Cache(PODS, pod_record, self.quarantine, index=_JOB_KEY)
        self.pods.on_deleted = self.deleted_pods.remember
        self.services = Cache(SERVICES, service_record, self.quarantine, index=_JOB_KEY)
        self.network_policies = Cache(
            NETWORK_POLICIES, policy_record, self.quarantine, index=_JOB_KEY
        )
        self.workloads = Cache(
            WORKLOADS, workload_record, self.quarantine, reserving_workload, index=_JOB_KEY
        )
        self.unanswered_creations: dict[ObjectKey, str] = {}
        """Name of the Job to whose creation no answer came, by its GRPOJob."""

    def is_quiet(self, key: ObjectKey) -> bool:
        """True if the job needs no prompt reconcile: its gang starts or runs, or has ended."""
        job = self.grpojobs.get(key)
        if job is None:
            return False
        if job.is_finished:
            return job.generation == job.observed_generation
        if not job.is_active or not self.jobs.owned_by(key):
            return False
        current = (pod for pod in self.pods.owned_by(key) if pod.attempt == job.status.attempt)
        return all(pod.is_live or pod.engine for pod in current)


async def fetch_missing_pods(cluster: Cluster, caches: Caches, observation: Observation) -> bool:
    """List the current attempt's pods into the cache if its Job has ended and no pod is known.

    Return True if pods were listed.

    Raises:
        ClusterError: the API server did not answer, so the cause of the Job's end is not known.
    """
    job = observation.job
    if (
        not job.is_active
        or observation.child is None
        or not observation.child.ended
        or observation.pods
    ):
        return False
    # Labels are hints that anybody can set: of what is listed, observe counts only the pods of the
    # attempt's own Job.
    selector = attempt_selector(job.uid, job.status.attempt)
    await fetch_pods(cluster, caches, job.key.namespace, selector)
    return True


async def fetch_pods(
    cluster: Cluster, caches: Caches, namespace: str, selector: str
) -> list[PodRecord]:
    """List the pods of a label selector into the cache, and return those that can be read.

    Raises:
        ClusterError: the API server did not answer.
    """
    pods: list[PodRecord | None] = []
    async for items, _ in cluster.pages(Selection(PODS, namespace, selector)):
        pods += map(caches.pods.put, items)
    return [pod for pod in pods if pod]


async def fetch_missing_job(
    cluster: Cluster, caches: Caches, observation: Observation
) -> JobRecord | None:
    """Read a Job of the last attempt into the cache that may be there although no watch shows it.
    Return it if it was read.

    The answer to its creation may be lost. Then the watch of pods may be back before that of Jobs.
    A Job that has lost its labels is out of the watch, too. Once the attempt is not to run any
    more, its Job must be known before the next one starts.

    Raises:
        ClusterError: the API server did not answer, so it is not known whether the Job is there.
    """
    job = observation.job
    name = ""
    if not job.is_active:
        name = caches.unanswered_creations.get(job.key, "")
    elif observation.is_job_gone:
        name = child_job(job.name, job.status.attempt)
    if not name:
        return None
    try:
        record = caches.jobs.put(await cluster.get(JOBS, job.key.namespace, name))
    except NotFound:
        record = None
    caches.unanswered_creations.pop(job.key, None)
    return record
