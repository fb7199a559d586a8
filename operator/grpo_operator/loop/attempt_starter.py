"""Creates what an attempt lacks: its Services and NetworkPolicy, its claim, the Job of its gang and
of its engines.

Jobs are created by POST alone. If a Job of the same name is not this attempt's, it is reported and
never changed.
"""

import contextlib
import logging
from dataclasses import KW_ONLY, dataclass

from grpo_kube.cache import version_of
from grpo_kube.client import Client
from grpo_kube.objects.errors import AlreadyExists, ClusterError, Denied, NotFound, Unavailable
from grpo_kube.objects.resources import JOBS, Object

from ..decide.decisions import Action, Decision
from ..decide.first_seen import FirstSeenTracker
from ..decide.observation import Observation
from ..kueue.pod_sets import Contradiction
from ..pods.manifests import attempt_of, engines_job, images_need, indexed_job
from ..pods.pod_spec import PodDefaults
from ..pods.pod_volumes import Manifest
from ..records.names import ENGINE_SERVICE
from ..records.reasons import Reason
from .caches import Caches
from .shared_objects import GOES_PAUSE, NameConflict, SharedObjects
from .workload_sync import DENIED_PAUSE, Workloads

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AttemptStarter:
    """Creates the Jobs of attempts."""

    cluster: Client
    caches: Caches
    shared_objects: SharedObjects
    workloads: Workloads
    """Gives Kueue's assignment of pods to nodes."""
    _: KW_ONLY
    first_seen_tracker: FirstSeenTracker
    pods: PodDefaults
    """Defaults of all jobs' pods."""

    async def repair_shared_objects(self, observation: Observation) -> NameConflict | None:
        """Repair the objects that the pods of a running attempt share. Return why a Service can't
        be had, else None.

        A denied NetworkPolicy ends no gang; SharedObjects logs it.

        Raises:
            ClusterError: the API server refused or did not answer.
        """
        with contextlib.suppress(Denied, NotFound):
            await self.shared_objects.ensure_policy(observation.job.key.namespace)
        return await self._services(observation)

    async def _services(self, observation: Observation) -> NameConflict | None:
        # Without the Services the pods' DNS names don't resolve, so the ranks and engines can't
        # find each other.
        namespace = observation.job.key.namespace
        conflict = await self.shared_objects.ensure_service(namespace)
        if conflict or not observation.replicas:
            return conflict
        return await self.shared_objects.ensure_service(namespace, ENGINE_SERVICE)

    async def start(self, observation: Observation) -> Decision | None:
        """POSTs the Job that the attempt lacks, that of its gang first; None once it is there, else
        what to do.

        Raises:
            ClusterError: an object has changed meanwhile, or another operator leads.
        """
        job, status = observation.job, observation.job.status
        if job.spec is None or status.plan is None or not _may_start_pods(observation):
            return Decision(Action.WAIT)
        attempt = attempt_of(job, job.spec, status.plan, status.attempt)
        # The gang's Job first: engines without a gang would only hold GPUs.
        engines = engines_job(attempt, self.pods) if observation.child else None
        body = engines or indexed_job(attempt, self.pods)
        try:
            conflict = await self._services(observation)
            conflict = conflict or await self.shared_objects.create_claim(job)
            if conflict:
                return _waits_for_name(*conflict)
            _, unbindable = await self.shared_objects.unbound_claims(job, body)
            if unbindable:
                return _without_pods(observation, *unbindable)
            await self.shared_objects.ensure_policy(
                job.key.namespace
            )  # before there are pods that strangers could reach
            if observation.queue_name:
                body = await self.workloads.place_job(observation, body)
            answer = await self._create(observation, body)
        except Contradiction as error:
            return _without_pods(observation, Reason.FAILED_CREATE, str(error))
        except (Denied, NotFound, Unavailable) as error:
            return _after_failure(observation, error, images_need(job.spec))
        name = body["metadata"]["name"]
        if answer is None:
            message = (
                f"Job {name} exists and is not this GRPOJob's, or is being deleted; waiting until "
                "it is gone"
            )
            return _waits_for_name(message, GOES_PAUSE)
        log.info("%s: Job %s started", job.key, name, extra={"attempt": status.attempt})
        self.caches.jobs.put(answer)
        self.caches.unanswered_creations.pop(job.key, None)
        # From now on a Job that is not there was deleted: the event of its creation may come later,
        # or never.
        if observation.child is None:
            self.first_seen_tracker.record_created(
                job.key, status.attempt, version_of(answer)[0], observation.at
            )
        return None

    async def _create(self, observation: Observation, body: Manifest) -> Object | None:
        """The Job as the API server has it, made now or before; None if its name is taken."""
        job, name = observation.job, body["metadata"]["name"]
        try:
            return await self.cluster.create(JOBS, job.key.namespace, body)
        except Unavailable:
            # The Job may have been created all the same: see fetch_missing_job.
            self.caches.unanswered_creations[job.key] = name
            raise
        except AlreadyExists:
            try:
                answer = await self.cluster.get(JOBS, job.key.namespace, name)
            except NotFound:  # it has gone meanwhile
                return None
        existing_job = self.caches.jobs.parse_item(answer)
        if existing_job is None or existing_job.deleting:
            return None
        is_ours = (existing_job.grpojob_uid, existing_job.attempt) == (job.uid, job.status.attempt)
        return answer if is_ours else None


def _may_start_pods(observation: Observation) -> bool:
    """True if Kueue, where it has a say, lets pods start now."""
    if not observation.queue_name:
        return True
    return observation.workload is not None and observation.workload.may_start


def _waits_for_name(message: str, requeue_after: float) -> Decision:
    """Wait for a name that another object has; start_checks.not_started limits how long."""
    return Decision(Action.WAIT, Reason.NAME_TAKEN, message, requeue_after=requeue_after)


def _after_failure(observation: Observation, error: ClusterError, hint: str) -> Decision:
    """The decision after the API server created no Job."""
    number = observation.job.status.attempt
    log.warning("%s: attempt %d can't be created: %s", observation.job.key, number, error)
    if isinstance(error, Unavailable) and not observation.has_gang_run:
        # It may be back in a moment: the gang keeps its place as long as start_checks.not_started
        # allows.
        message = f"the API server does not create what attempt {number} needs: {error}"
        pause = min(max(observation.admitted_seconds, 1.0), DENIED_PAUSE)
        return Decision(Action.WAIT, Reason.FAILED_CREATE, message, requeue_after=pause)
    message = f"the API server denies what attempt {number} needs: {error}{hint}"
    return _without_pods(observation, Reason.FAILED_CREATE, message)


def _without_pods(observation: Observation, reason: Reason, message: str) -> Decision:
    """Wait, or release a gang that holds GPUs or Kueue's quota, so that others can use them."""
    if observation.job.may_hold_place and not observation.has_gang_run:
        return Decision(Action.RELEASE, Reason.PODS_NOT_CREATED, message)
    return Decision(Action.WAIT, reason, message, requeue_after=DENIED_PAUSE)
