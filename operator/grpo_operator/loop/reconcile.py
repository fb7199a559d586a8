"""The body of the control loop: observe one GRPOJob, decide, commit, start, publish its status,
clean up.

This module carries decisions out on the cluster, in the order of "One job's way through" in
docs/internals/architecture.md. It is level-triggered: it may be called at any time, any number of
times.

An observation costs no request while a gang runs well. Requests are made in three cases only. A Job
has ended without a known pod, so its pods are listed. The Job of the attempt seems to be gone, or
no answer to its creation came, so the Job is read. A gang does not start, so its events are listed.
"""

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.client import Client
from grpo_kube.objects.errors import Denied, NotFound, Unavailable
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import ProcessClock, shortest_pause

from ..admission.queue import AdmissionQueue
from ..decide.decisions import Action, Decision, Limits
from ..decide.first_seen import FirstSeenTracker
from ..decide.next_action import decide
from ..decide.observation import Observation, Pull, Silence, observe
from ..decide.preflight import is_checked
from ..records.job_class import JobClasses, with_class
from ..records.packed_job import JobContent
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from ..tracing.attempt_trace import AttemptTraces
from .attempt_starter import AttemptStarter
from .caches import Caches, PodStartEvents, fetch_missing_job, fetch_missing_pods
from .garbage_collector import GarbageCollector
from .preflights import Preflights
from .shared_objects import STAYS_PAUSE
from .status_writer import StatusWriter
from .workload_sync import DENIED_PAUSE, Workloads, sync_dispatched

log = logging.getLogger(__name__)

_ROLES = 2
"""Jobs of an attempt: that of its gang, and that of its engines."""
_RECONCILED_AT_ONCE = (Action.SUCCEED, Action.FAIL, Action.RELEASE, Action.RETRY, Action.RESOLVE)
"""What follows these must not wait for the event of our own write, which may be lost."""


class Rank0(Protocol):
    """Answers and silences of the ranks 0 of running gangs."""

    def pull(self, job: GRPOJobRecord) -> Pull | None:
        """The last answer of rank 0 of a job's current attempt."""

    def silence(self, job: GRPOJobRecord) -> Silence | None:
        """Return since when and why it does not answer; None while it does."""


@dataclass(eq=False)
class Observer:
    """Observes one GRPOJob at a time, with all that belongs to it."""

    cluster: Client
    caches: Caches
    clock: ProcessClock
    _: KW_ONLY
    workloads: Workloads
    rank0: Rank0
    """Gives the last answer of each job's rank 0."""
    pod_start_events: PodStartEvents
    preflights: Preflights
    classes: Callable[[], JobClasses] = JobClasses
    """Gives the GRPOJobClasses."""
    traces: AttemptTraces | None = None
    """Receives the observation of each reconcile."""
    first_seen_tracker: FirstSeenTracker = field(default_factory=FirstSeenTracker)
    """When this process first saw each state of the jobs' children."""

    def job(self, key: ObjectKey) -> GRPOJobRecord | None:
        """Return the GRPOJob itself, as it is in the cache."""
        return self.caches.grpojobs.get(key)

    async def observe(self, key: ObjectKey) -> Observation | None:
        """Return what a reconcile decides on; None for a job that is gone, being deleted, or
        another controller's.

        Raises:
            ClusterError: the API server did not answer.
        """
        observation = self.read_caches(key)
        if observation is None or observation.job.deleting:
            return None
        if self.traces:
            self.traces.record_observation(observation)
        if await fetch_missing_job(self.cluster, self.caches, observation):
            observation = self.read_caches(key) or observation
        if await fetch_missing_pods(self.cluster, self.caches, observation):
            observation = self.read_caches(key) or observation
        warning = await self.pod_start_events.newest_warning(observation)
        return with_warning(observation, warning) if warning else observation

    def read_caches(self, key: ObjectKey) -> Observation | None:
        """An observation without any request; None for a job that is gone or not ours."""
        job = self.job(key)
        if job is None or not job.is_ours:
            return None
        if not (job.is_active or job.is_finished):
            job = with_class(job, self.classes())
        observation = observe(
            job,
            self.caches.jobs.owned_by(key),
            self.caches.pods.owned_by(key),
            now=self.clock.wall(),
            at=self.clock.monotonic(),
            first_seen_tracker=self.first_seen_tracker,
        )
        pull, silence = self._rank0_answers(job) if job.is_active else (None, None)
        source: GRPOJobRecord | None = None
        if job.resume_job and not job.is_active:
            source = self.job(ObjectKey(job.key.namespace, job.resume_job))
        return replace(
            self.workloads.look(observation),
            deleted_pods=self.caches.deleted_pods.of_job(key, job.uid),
            preflight=self.preflights.look(job, observation.now, observation.at),
            pull=pull,
            silence=silence,
            source=source,
        )

    def read_dispatched(self, job: GRPOJobRecord) -> Observation | None:
        """Return a job that Kueue sends to another cluster, with its Workload; None if nothing is
        to be asked of Kueue.

        Its status is copied from the other cluster, so the observation has an empty one.
        """
        if job.is_finished or job.deleting or not job.queue_name:
            return None
        here = replace(job, typed=JobContent(job.spec, (), GRPOJobStatus(), job.spec))
        here = with_class(here, self.classes())
        observation = Observation(job=here, now=self.clock.wall(), at=self.clock.monotonic())
        return self.workloads.look(observation)

    def _rank0_answers(self, job: GRPOJobRecord) -> tuple[Pull | None, Silence | None]:
        """What rank 0 of the current attempt last reported, and since when it does not answer."""
        pull = self.rank0.pull(job)
        if pull and pull.progress.attempt != job.status.attempt:
            pull = None
        return pull, self.rank0.silence(job)

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone, or another controller's."""
        self.first_seen_tracker.forget(key)
        self.pod_start_events.forget(key)
        self.preflights.forget(key)
        self.caches.unanswered_creations.pop(key, None)
        # A job that can't be read is set aside and may come back: its trace is not over.
        if self.traces and key not in self.caches.grpojobs.quarantined_records:
            self.traces.end_job(key, self.clock.wall())


def with_warning(observation: Observation, warning: str) -> Observation:
    """Return the observation with what is said of a Job or pod that does not start."""
    preflight = observation.preflight
    if preflight:
        preflight = replace(preflight, warning=warning)
    return replace(observation, start_warning=warning, preflight=preflight)


@dataclass(kw_only=True, eq=False)
class Reconciler:
    """Brings one GRPOJob at a time nearer to what its spec asks for."""

    observer: Observer
    queue: AdmissionQueue
    status: StatusWriter
    starter: AttemptStarter
    workloads: Workloads
    garbage: GarbageCollector
    limits: Limits

    async def __call__(self, key: ObjectKey) -> float | None:
        """Reconcile one GRPOJob. Return the seconds until time alone may change something; None if
        it can't.

        Raises:
            Conflict: the GRPOJob changed meanwhile; the cache has been brought up to date.
            ClusterError: the API server refused or did not answer; nothing is lost by trying again.
        """
        try:
            return await self._reconcile(key)
        finally:
            self.queue.record_job(key, self.observer.job(key))

    async def _reconcile(self, key: ObjectKey) -> float | None:
        job = self.observer.job(key)
        if job and job.is_dispatched:
            dispatched = self.observer.read_dispatched(job)
            if dispatched is None:
                return None
            return await sync_dispatched(dispatched, self.queue, self.workloads)
        self.queue.record_job(key, job)

        observation = await self.observer.observe(key)
        if observation is None:
            requeue_after = await self._end_deleted(key)
            self.status.forget(key)
            self.observer.forget(key)
            return requeue_after
        decision = decide(observation, self.limits)
        if decision.action is Action.DELETE:
            log.info("%s: its time to live after the end is over", key)
            self.status.confirm(observation)
            await self.garbage.delete_job(observation.job)
            return None

        if decision.action is Action.ADMIT:
            answer = await self._admit(observation, decision)
            if answer is None:
                # The queue's next cycle gives the answer, and has the job reconciled again.
                return None
            observation, decision = answer
        if decision.action is Action.COMMIT:
            await self._commit(observation, decision)
            observation, decision = self._decide_again(observation)
        if decision.action is Action.START:
            observation, decision = await self._start(observation, decision)
        if decision.action is Action.ADMIT:
            # The new Job is gone again. The next reconcile asks for another attempt, on an
            # observation of its own.
            return 0.0

        if observation.job.is_active:
            decision = await self._keep_shared_objects(observation, decision)
        decision = await self.workloads.step(observation, decision)
        seconds_to_write = await self.status.publish(observation, decision)
        seconds_to_delete = await self._collect_garbage(key)
        if decision.action in _RECONCILED_AT_ONCE:
            return 0.0
        return shortest_pause(
            decision.requeue_after,
            seconds_to_write,
            seconds_to_delete,
            _until_next_check(observation, decision),
        )

    async def _end_deleted(self, key: ObjectKey) -> float | None:
        """End the gang of a job that is being deleted, and give back its quota. Return the seconds
        until a denied write is tried again.

        Somebody's finalizer may keep the object, and with it what it owns, for long.
        """
        observation = self.observer.read_caches(key)
        if observation is None or not observation.job.deleting or observation.job.orphans_pods:
            self.garbage.forget(key)
            return None
        problem = await self.garbage.collect(observation)
        decision = await self.workloads.step(observation, Decision(Action.WAIT))
        return shortest_pause(decision.requeue_after, DENIED_PAUSE if problem else None)

    async def _admit(
        self, observation: Observation, decision: Decision
    ) -> tuple[Observation, Decision] | None:
        """Ask the queue for an attempt. Return the observation and its answer; None until a cycle
        has looked at the job."""
        if not observation.job.is_active:
            # A gang that was stopped must not run on beside the next one.
            problem = await self.garbage.collect(observation)
            if problem and observation.gang_left:
                self.queue.release_denied(observation.job)
                return observation, _after_undeleted_gang(decision, problem)
        answer = await self.queue.answer(observation, decision)
        if answer is None:
            return None
        if answer.action in (Action.QUEUE, Action.REJECT):
            refusal = await self.observer.preflights.start(observation, answer.plan)
            observation = with_warning(observation, refusal) if refusal else observation
        return observation, answer

    async def _commit(self, observation: Observation, decision: Decision) -> None:
        """Write the attempt and its plan to the status: the reservation and the counter."""
        try:
            await self.status.commit(observation, decision)
        except Denied:
            self.queue.release_denied(observation.job)
            raise

    def _decide_again(self, before: Observation) -> tuple[Observation, Decision]:
        """Observe what a write of this reconcile has changed, and decide on that.

        Nothing follows from the write itself: while its answer was on the way, the watch may have
        shown that the user has suspended the job, or that the new Job is gone. A job that was
        deleted meanwhile needs nothing.
        """
        observation = self.observer.read_caches(before.job.key)
        if observation is None:
            return before, Decision(Action.WAIT)
        return observation, decide(observation, self.limits)

    async def _start(
        self, observation: Observation, decision: Decision
    ) -> tuple[Observation, Decision]:
        """Create the Jobs that the attempt lacks. Return the observation and decision after that.

        Engines follow their gang in the same reconcile where they need not wait for its nodes.
        """
        for _ in range(_ROLES):
            obstacle = await self.starter.start(observation)
            if obstacle and decision.reason:
                # A gang that runs without its engines has worse trouble.
                action, requeue_after = obstacle.action, obstacle.requeue_after
                return observation, replace(decision, action=action, requeue_after=requeue_after)
            if obstacle:
                return observation, obstacle
            observation, decision = self._decide_again(observation)
            if decision.action is not Action.START:
                break
        return observation, decision

    async def _keep_shared_objects(self, observation: Observation, decision: Decision) -> Decision:
        """Repair what the attempt's pods share; the decision names an object whose name is
        taken."""
        try:
            conflict = await self.starter.repair_shared_objects(observation)
        except (Denied, NotFound, Unavailable) as error:
            # What is decided on a gang that runs or has ended must not wait for its Services.
            log.warning("%s: what its pods share can't be repaired: %s", observation.job.key, error)
            requeue_after = shortest_pause(decision.requeue_after, STAYS_PAUSE)
            return replace(decision, requeue_after=requeue_after)
        if conflict is None or decision.action is not Action.WAIT or decision.reason:
            return decision
        requeue_after = shortest_pause(decision.requeue_after, conflict.requeue_after)
        return replace(
            decision,
            reason=Reason.NAME_TAKEN,
            message=conflict.message,
            requeue_after=requeue_after,
        )

    async def _collect_garbage(self, key: ObjectKey) -> float | None:
        """Delete what is left of attempts that are not to run, as the caches show it now. Return
        the seconds until what can't be deleted is tried again."""
        observation = self.observer.read_caches(key)
        problem = await self.garbage.collect(observation) if observation else ""
        return DENIED_PAUSE if problem else None


def _after_undeleted_gang(decision: Decision, problem: str) -> Decision:
    """Have the next attempt wait for a gang that can't be ended."""
    message = f"the gang that was stopped can't be ended, and the next one waits for it: {problem}"
    return replace(
        decision,
        action=Action.QUEUE,
        reason=Reason.FAILED_CREATE,
        message=message,
        requeue_after=DENIED_PAUSE,
    )


def _until_next_check(observation: Observation, decision: Decision) -> float | None:
    """Seconds until a preflight is checked again; 0 once it has passed: admission follows.

    That of a gang that was released begins after its pause.
    """
    preflight = observation.preflight
    is_due = decision.action not in (Action.COMMIT, Action.WAIT)
    if preflight is None or not preflight.is_needed or not is_due:
        return None
    check = preflight.check
    if check.has_passed and not is_checked(observation.job):
        return 0.0
    return check.requeue_after
