"""The body of the control loop: observe one GRPOJob, decide, commit, start, publish its status,
clean up.

This module carries decisions out on the cluster, in the order of "One job's way through" in
docs/architecture.md. It is level-triggered: it may be called at any time, any number of times.
"""

import logging
from dataclasses import replace

from grpo_kube.objects.errors import Denied
from grpo_kube.objects.resources import ObjectKey

from ..admission.queue import AdmissionQueue
from ..decide.decisions import Action, Decision, Limits
from ..decide.observation import Observation
from ..decide.policies import decide
from ..records.reasons import Reason
from .attempt_starter import AttemptStarter
from .garbage_collector import GarbageCollector
from .observer import Observer
from .status_writer import StatusWriter
from .workload_sync import Workloads, sync_dispatched

log = logging.getLogger(__name__)

_ROLES = 2
"""Jobs of an attempt: that of its gang, and that of its engines."""
_RECONCILED_AT_ONCE = (Action.SUCCEED, Action.FAIL, Action.RELEASE, Action.RETRY, Action.RESOLVE)
"""What follows these must not wait for the event of our own write, which comes before kopf's watch
or is lost."""


class Reconciler:
    """Brings one GRPOJob at a time nearer to what its spec asks for."""

    def __init__(
        self,
        *,
        observer: Observer,
        queue: AdmissionQueue,
        status: StatusWriter,
        starter: AttemptStarter,
        workloads: Workloads,
        garbage: GarbageCollector,
        limits: Limits,
    ) -> None:
        """Take the parts that a reconcile works with, one for each of its steps."""
        self._observer = observer
        self._queue = queue
        self._status = status
        self._starter = starter
        self._workloads = workloads
        self._garbage = garbage
        self._limits = limits

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
            self._queue.record_job(key, self._observer.job(key))

    async def _reconcile(self, key: ObjectKey) -> float | None:
        job = self._observer.job(key)
        if job and job.is_dispatched:
            dispatched = self._observer.read_dispatched(job)
            return (
                await sync_dispatched(dispatched, self._queue, self._workloads)
                if dispatched
                else None
            )
        self._queue.record_job(key, job)

        observation = await self._observer.observe(key)
        if observation is None:
            self._forget(key)
            return None
        decision = decide(observation, self._limits)
        if decision.action is Action.DELETE:
            log.info("%s: its time to live after the end is over", key)
            await self._garbage.delete_job(observation.job)
            return None

        if decision.action is Action.ADMIT:
            answer = await self._queue.answer(observation, decision)
            if answer is None:
                # The queue's next cycle gives the answer, and has the job reconciled again.
                await self._collect_garbage(key)
                return None
            decision = answer
        if decision.action is Action.COMMIT:
            await self._commit(observation, decision)
            observation, decision = self._decide_again(observation)
        if decision.action is Action.START:
            observation, decision = await self._start(observation)
            if decision.action is Action.ADMIT:
                # The new Job is gone again. The next reconcile asks for another attempt, on an
                # observation of its own.
                return 0.0

        if observation.job.is_active:
            decision = await self._keep_shared_objects(observation, decision)
        decision = await self._workloads.step(observation, decision)
        seconds_to_write = await self._status.publish(observation, decision)
        await self._collect_garbage(key)
        if decision.action in _RECONCILED_AT_ONCE:
            return 0.0
        return _earliest(decision.look_again, seconds_to_write)

    def _forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone, or another controller's."""
        self._status.forget(key)
        self._observer.forget(key)

    async def _commit(self, observation: Observation, decision: Decision) -> None:
        """Write the attempt and its plan to the status. This write is the reservation and the
        attempt counter."""
        try:
            await self._status.commit(observation, decision)
        except Denied:
            self._queue.release_denied(observation.job)
            raise

    def _decide_again(self, before: Observation) -> tuple[Observation, Decision]:
        """Observe what a write of this reconcile has changed, and decide on that.

        Nothing follows from the write itself: while its answer was on the way, the watch may have
        shown that the user has suspended the job, or that the new Job is gone. A job that was
        deleted meanwhile needs nothing.
        """
        observation = self._observer.read_caches(before.job.key)
        if observation is None:
            return before, Decision(Action.WAIT)
        return observation, decide(observation, self._limits)

    async def _start(self, observation: Observation) -> tuple[Observation, Decision]:
        """Create the Jobs that the attempt lacks. Return the observation and decision after that.

        Engines follow their gang in the same reconcile where they need not wait for its nodes.
        """
        decision = Decision(Action.START)
        for _ in range(_ROLES):
            obstacle = await self._starter.start(observation)
            if obstacle:
                return observation, obstacle
            observation, decision = self._decide_again(observation)
            if decision.action is not Action.START:
                break
        return observation, decision

    async def _keep_shared_objects(self, observation: Observation, decision: Decision) -> Decision:
        """Repair what the attempt's pods share. Return the decision, with the name that another
        object has taken."""
        taken = await self._starter.repair_shared_objects(observation)
        if taken is None or decision.action is not Action.WAIT or decision.reason:
            return decision
        look_again = _earliest(decision.look_again, taken.look_again)
        return replace(
            decision, reason=Reason.NAME_TAKEN, message=taken.message, look_again=look_again
        )

    async def _collect_garbage(self, key: ObjectKey) -> None:
        """Delete what is left of attempts that are not to run, as the caches show it after the
        writes above."""
        observation = self._observer.read_caches(key)
        if observation:
            await self._garbage.collect(observation)


def _earliest(*pauses: float | None) -> float | None:
    """Return the shortest of the pauses in seconds; None without any."""
    return min((pause for pause in pauses if pause is not None), default=None)
