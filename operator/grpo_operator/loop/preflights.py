"""Looks at the preflights of GRPOJobs and creates their Jobs."""

import logging

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.client import Client
from grpo_kube.objects.errors import AlreadyExists, Denied, NotFound, Unavailable
from grpo_kube.objects.resources import JOBS, ObjectKey
from grpo_kube.objects.times import Observed

from ..decide.first_seen import FirstSeenTracker, StoredTime, stored_age
from ..decide.observation import Observation
from ..decide.preflight import Preflight, is_checked, should_check
from ..pods.pod_spec import PodDefaults
from ..pods.preflight_job import preflight_digest, preflight_job, unread_claim_message
from ..records.names import preflight_name
from ..records.records import GRPOJobRecord, JobRecord, PodRecord
from .caches import Caches
from .shared_objects import SharedObjects

log = logging.getLogger(__name__)


class Preflights:
    """The preflights of all jobs."""

    def __init__(
        self, cluster: Client, caches: Caches, shared_objects: SharedObjects, pods: PodDefaults
    ) -> None:
        """`pods` is what their pods have by default, and whether jobs have preflights."""
        self._cluster = cluster
        self._caches = caches
        self._shared = shared_objects
        self._pods = pods
        self._first_seen_tracker = FirstSeenTracker()

    def look(self, job: GRPOJobRecord, now: float, at: Observed) -> Preflight | None:
        """The preflight as the caches show it; None for a job that has and needs no preflight."""
        key = job.key
        child = self._job_of_preflight(job)
        image = ""
        if should_check(job, self._pods.preflight) and job.spec:
            image = job.spec.image or self._pods.image
        is_needed = bool(image)
        if child is None and not is_needed:
            self.forget(key)
            return None
        pods: list[PodRecord] = []
        if child:
            owned = self._caches.pods.owned_by(key)
            pods = [pod for pod in owned if pod.controller_uid == child.uid]
        digest = _digest(job, image)
        blocked, tried = _stored_times(job, digest)
        ages = _stored_ages(job, digest, now)
        # A finalizer may keep a deleted Job for long.
        is_deleted = child is not None and child.deleting
        first_seen = self._first_seen_tracker.update(
            key, 0, None if is_deleted else child, pods, at, expected=is_deleted, ages=ages
        )
        oldest_first = sorted(pods, key=lambda pod: pod.version)
        child_since = first_seen.child or at
        over_since = first_seen.over or at
        blocked_at = first_seen.stored.get(blocked, at)
        tried_at = first_seen.stored.get(tried, at)
        return Preflight(
            job=job,
            is_needed=is_needed,
            digest=digest,
            child=child,
            pods=tuple(oldest_first),
            now=now,
            waited=at - child_since,
            ended_for=at - over_since,
            tried_for=at - tried_at,
            blocked_for=at - blocked_at,
        )

    def _job_of_preflight(self, job: GRPOJobRecord) -> JobRecord | None:
        name = preflight_name(job.name)
        children = (child for child in self._caches.jobs.owned_by(job.key) if child.name == name)
        return next((child for child in children if child.grpojob_uid == job.uid), None)

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that has no preflight, or is gone."""
        self._first_seen_tracker.forget(key)

    async def start(self, observation: Observation, plan: ExecutionPlan | None) -> str:
        """Create the Job of a preflight that is to begin, by this plan of the job. Return why the
        API server refuses it, else an empty text.

        Raises:
            ClusterError: the API server did not answer.
        """
        job, preflight = observation.job, observation.preflight
        if preflight is None or job.spec is None or not preflight.is_needed:
            return ""
        if job.class_problem:
            return ""
        if not preflight.check.should_start:
            return ""
        namespace = job.key.namespace
        body = preflight_job(job, job.spec, plan, self._pods)
        name = body["metadata"]["name"]
        try:
            unbound, problem = await self._shared.unbound_claims(job, body)
            message = problem[1] if problem else unread_claim_message(body, unbound)
            if message:
                return message
            body = preflight_job(job, job.spec, plan, self._pods, unbound)
            await self._shared.ensure_policy(namespace)
            answer = await self._cluster.create(JOBS, namespace, body)
        except AlreadyExists:
            answer = await self._cluster.get(JOBS, namespace, name)
        except (Denied, NotFound, Unavailable) as error:
            log.warning("%s: its preflight can't be created: %s", job.key, error)
            return str(error)
        child = self._caches.jobs.parse_item(answer)
        if child is None or child.grpojob_uid != job.uid:
            return f"Job {name} exists and is not this GRPOJob's"
        self._caches.jobs.put(answer)
        return ""


def _digest(job: GRPOJobRecord, image: str) -> str:
    """See Preflight.digest; `image` is empty where no preflight is needed."""
    before = job.status.preflight
    if job.spec is None or not image:
        return ""
    # What has passed is not checked again because the class is away for a moment.
    if before and job.class_problem and is_checked(job):
        return before.digest
    return preflight_digest(job.spec, image)


def _stored_times(job: GRPOJobRecord, digest: str) -> tuple[StoredTime, StoredTime]:
    """Name since when this preflight can't run, and when the last one has ended."""
    status = job.status.preflight
    last = status.job_uid if status else None
    return ("Blocked", digest), ("Tried", last or "")


def _stored_ages(job: GRPOJobRecord, digest: str, now: float) -> dict[StoredTime, float]:
    """The ages of these times by the wall clock, as far as the status records them."""
    status = job.status.preflight
    if status is None:
        return {}
    blocked, tried = _stored_times(job, digest)
    ages: dict[StoredTime, float] = {}
    if status.digest == digest and status.blocked_since:
        ages[blocked] = stored_age(status.blocked_since, now)
    if status.time:
        ages[tried] = stored_age(status.time, now)
    return ages
