"""Holds the caches of a reconcile, remembers deleted pods, and fetches what the watch has not
delivered yet.

A deleted pod may be gone within milliseconds after its container ended. Its job may not be
reconciled yet then, or the result of that may not be in the status. So the last state of deleted
pods is kept, which shows how long each held its GPUs. It is in memory only and makes the account of
GPU time exact. Without it a pod is timed by the end of its Job.

After an outage the watch of Jobs may be back before the watch of pods, which may be dead without a
sign for minutes. Then a Job has ended whose pods are not known, or seem to run. So no cause is
known, and a failure that counts would pass for a disruption. So the pods are listed before the end
is judged.

A pod's status does not say that a container waits for a volume, a Secret or its sandbox. A Job's
status does not say that the API server refuses its pods. The kubelet and the Job controller write
events about these. They are requested only then. Without the right to list events the cause stays
unknown.
"""

import logging
from dataclasses import dataclass
from operator import attrgetter

from grpo_kube.cache import Cache, Quarantine
from grpo_kube.client import Client, list_and_parse
from grpo_kube.objects.errors import ClusterError, NotFound
from grpo_kube.objects.resources import (
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    ObjectKey,
    Selection,
)
from grpo_kube.objects.times import Observed

from ..decide.decisions import Limits
from ..decide.observation import Observation
from ..decide.start_checks import asks_about, current_warning, start_event
from ..records.names import GRPOJOBS, LABEL_CONTROLLER, WORKLOADS, child_job
from ..records.parsing import (
    grpojob_record,
    job_record,
    pod_record,
    policy_record,
    reserving_record,
    service_record,
)
from ..records.records import JobRecord, PodRecord
from ..records.workloads import workload_record

log = logging.getLogger(__name__)

REMEMBERED = 1024
"""How many pods are remembered: those of the two largest gangs."""
FRESH_SECONDS = 30.0
"""For how long a warning about an attempt that does not start is taken for the newest."""


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
        self.workloads = Cache(WORKLOADS, workload_record, self.quarantine, index=_JOB_KEY)
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


async def fetch_missing_pods(cluster: Client, caches: Caches, observation: Observation) -> bool:
    """List the current attempt's pods into the cache if its Job has ended, and the ends of some are
    not known.

    Return True if pods were listed.

    Raises:
        ClusterError: the API server did not answer, so the cause of the Job's end is not known.
    """
    job = observation.job
    if (
        not job.is_active
        or observation.child is None
        or not observation.child.ended
        or len(observation.terminations) >= job.nodes
    ):
        return False
    # By the Job controller's own label: a pod that has lost ours is out of the watch.
    selector = f"{LABEL_CONTROLLER}={observation.child.uid}"
    await fetch_pods(cluster, caches, job.key.namespace, selector)
    return True


async def fetch_pods(
    cluster: Client, caches: Caches, namespace: str, selector: str
) -> list[PodRecord]:
    """List the pods of a label selector into the cache, and return those that can be read.

    Raises:
        ClusterError: the API server did not answer.
    """
    selection = Selection(PODS, namespace, selector)
    pods, _ = await list_and_parse(cluster, selection, caches.pods.put)
    return pods


async def fetch_missing_job(
    cluster: Client, caches: Caches, observation: Observation
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


@dataclass(frozen=True, slots=True)
class _NewestWarning:
    uid: str
    at: Observed
    message: str


class PodStartEvents:
    """The newest warning about an attempt that does not start, remembered for a moment."""

    def __init__(self, cluster: Client, limits: Limits) -> None:
        """`limits` say how long an attempt may take to start before events are read."""
        self._cluster = cluster
        self._limits = limits
        self._newest: dict[ObjectKey, _NewestWarning] = {}

    async def newest_warning(self, observation: Observation) -> str:
        """`reason: message` of the warning about the Job or pod that keeps the attempt from
        starting.

        Empty while the attempt gets going, and where there is no warning.
        """
        key, now = observation.job.key, observation.at
        uid = asks_about(observation, self._limits)
        if not uid:
            self.forget(key)
            return ""
        # A gang that does not start is reconciled often, and each question is a LIST of events.
        warning = self._newest.get(key)
        if warning is None or warning.uid != uid or now - warning.at > FRESH_SECONDS:
            warning = self._newest[key] = _NewestWarning(
                uid, now, await self._fetch_warning(key, uid)
            )
        return warning.message

    def forget(self, key: ObjectKey) -> None:
        """Drop the remembered event of a GRPOJob that runs or is gone."""
        self._newest.pop(key, None)

    async def _fetch_warning(self, key: ObjectKey, uid: str) -> str:
        selection = Selection(EVENTS, key.namespace, fields=f"involvedObject.uid={uid}")
        try:
            events, _ = await list_and_parse(self._cluster, selection, start_event)
        except ClusterError as error:
            log.info("%s: events about %s can't be listed: %s", key, uid, error)
            return ""
        return current_warning(events)
