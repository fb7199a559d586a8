"""The body of the control loop: observe one GRPOJob, decide, commit, start, publish its status, clean up.

This module carries decisions out on the cluster, in the order of "One job's way through" in docs/architecture.md. It is
level-triggered: it may be called at any time, any number of times.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.cache import Cache, R
from grpo_kube.client import Cluster
from grpo_kube.objects.errors import Conflict, Denied, NotFound
from grpo_kube.objects.resources import LIVE_PODS, PODS, Object, ObjectKey, Selection, merge_patch
from grpo_kube.objects.times import Observed

from ..admission.queue import AdmissionQueue
from ..decide.cleanup import clean_up
from ..decide.decisions import Action, Decision, Limits
from ..decide.observation import FirstSeen, Observation, Pull, Silence, observe
from ..decide.policies import decide
from ..decide.start_checks import asks_about
from ..pods.pod_spec import PodDefaults
from ..pods.pod_volumes import Manifest
from ..records.names import GRPOJOBS, attempt_selector, engine_selector
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from ..report.status import REPORTED, URGENT, StatusThrottle, build, to_json
from ..tracing.attempt_trace import AttemptTraces
from .attempt_starter import AttemptStarter
from .caches import Caches, fetch_missing_pods
from .pod_start_events import PodStartEvents
from .shared_objects import NameConflict, SharedObjects
from .tokens import Tokens
from .workload_sync import MultiKueueDispatcher, Workloads

log = logging.getLogger(__name__)

PATIENCE = 2
"""How many status intervals news of a gang that is still starting waits for company."""


class Rank0(Protocol):
    """Answers and silences of the ranks 0 of running gangs."""

    def pull(self, key: ObjectKey) -> Pull | None:
        """The last answer of a job's rank 0."""
        ...

    def silence(self, key: ObjectKey) -> Silence | None:
        """Return since when and why it does not answer; None while it does."""
        ...


_LEADS_ON = (Action.SUCCEED, Action.FAIL, Action.RELEASE, Action.RETRY, Action.RESOLVE)
"""What is due after these must not wait for the event of our own write, which comes before kopf's watch or is lost."""


class Reconciler:
    """Brings one GRPOJob at a time nearer to what its spec asks for."""

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        queue: AdmissionQueue,
        wrote: Callable[[GRPOJobRecord, GRPOJobStatus, float], None],
        *,
        limits: Limits,
        clock: Callable[[], float],
        monotonic: Callable[[], Observed],
        pods: PodDefaults,
        tokens: Tokens,
        watchers: Sequence[Manifest] | None = None,
        status_interval: float = 5.0,
        rank0: Rank0,
        workloads: Workloads,
        traces: AttemptTraces | None = None,
    ) -> None:
        """Take the parts that a reconcile works with.

        Args:
            pods: defaults of all jobs' pods.
            watchers: peers that NetworkPolicies admit to the pods; None: no NetworkPolicy is made.
            tokens: make the tokens that open what pods report.
            rank0: gives the last answer of each job's rank 0.
            clock: gives unix seconds.
            traces: receives each observation.
            wrote: called after each status write with the job before it, the new status and the unix time in seconds.
        """
        self._cluster = cluster
        self._caches = caches
        self._queue = queue
        self._on_status_written = wrote
        self._limits = limits
        self._status_interval = status_interval
        self._rank0 = rank0
        self._traces = traces
        self._clock = clock
        self._monotonic = monotonic
        self._first_seen = FirstSeen()
        self._start_events = PodStartEvents(cluster, monotonic)
        shared = SharedObjects(cluster, caches, lambda: monotonic().at, watchers)
        self._workloads = workloads
        self._multikueue = MultiKueueDispatcher(queue, workloads, clock, monotonic)
        self._attempt_starter = AttemptStarter(
            cluster, caches, shared, workloads, sightings=self._first_seen, pods=pods, tokens=tokens
        )
        self._throttle = StatusThrottle(longest=PATIENCE * status_interval)

    async def __call__(self, key: ObjectKey) -> float | None:
        """One look and one step. Returns the seconds until time alone may change something.

        Raises:
            Conflict: the GRPOJob changed meanwhile; the cache has been brought up to date.
            ClusterError: the API server refused or did not answer; nothing is lost by trying again.
        """
        try:
            return await self._step(key)
        finally:
            self._queue.record_job(key, self._caches.grpojobs.get(key))

    async def _step(self, key: ObjectKey) -> float | None:
        job = self._caches.grpojobs.get(key)
        if job and job.dispatched:
            return await self._multikueue(job)
        seen = self._observe(key)
        self._queue.record_job(key, job)
        if seen is None or seen.job.deleting:
            self._forget(key)
            return None
        if self._traces:
            self._traces.looked(seen)
        seen = await self._observe_missing(seen)
        decision = decide(seen, self._limits)
        if decision.action is Action.DELETE:
            log.info("%s: its time to live after the end is over", key)
            await self._delete(self._caches.grpojobs, seen.job)
            return None
        if decision.action is Action.ADMIT:
            answer = await self._admit(seen, decision)
            if answer is None:
                await self._clean_up(key)
                return None
            seen, decision = answer
        if decision.action is Action.START:
            seen, decision = await self._start(seen)
            if decision.action is Action.ADMIT:
                return 0.0  # its Job is gone again; what follows begins with a look of its own
        if seen.job.active and (taken := await self._attempt_starter.repair_shared_objects(seen)):
            decision = _told(decision, taken)
        decision = await self._workloads.step(seen, decision)
        left = await self._publish(seen, decision)
        await self._clean_up(key)
        if decision.action in _LEADS_ON:
            return 0.0
        return min((pause for pause in (decision.look_again, left) if pause is not None), default=None)

    def _observe(self, key: ObjectKey) -> Observation | None:
        job = self._caches.grpojobs.get(key)
        if job is None or not job.ours:
            return None
        children, pods, at = self._caches.jobs.owned_by(key), self._caches.pods.owned_by(key), self._monotonic()
        seen = observe(job, children, pods, now=self._clock(), at=at, sightings=self._first_seen)
        seen = replace(self._workloads.look(seen), deleted_pods=self._caches.deleted_pods.of_job(key, job.uid))
        if not job.active:
            source = self._caches.grpojobs.get(ObjectKey(key.namespace, job.resume_job)) if job.resume_job else None
            return replace(seen, source=source) if source else seen
        pull, silence = self._rank0.pull(key), self._rank0.silence(key)
        if pull and pull.progress.attempt != job.status.attempt:
            pull = None
        return replace(seen, pull=pull, silence=silence)

    async def _observe_missing(self, seen: Observation) -> Observation:
        """With what events say of an attempt that doesn't get going, and pods that an ended Job must have had."""
        if await fetch_missing_pods(self._cluster, self._caches, seen):
            seen = self._observe(seen.job.key) or seen
        key, uid = seen.job.key, asks_about(seen, self._limits) if seen.job.active else ""
        if not uid:
            self._start_events.forget(key)
            return seen
        return replace(seen, start_warning=await self._start_events.newest_warning(key, uid))

    def _forget(self, key: ObjectKey) -> None:
        """The job is gone, or belongs to another controller."""
        self._throttle.forget(key)
        self._first_seen.forget(key)
        self._start_events.forget(key)
        if self._traces and key not in self._caches.grpojobs.quarantined_records:
            self._traces.gone(key, self._clock())

    def _decide_again(self, seen: Observation) -> tuple[Observation, Decision]:
        """Looks and decides anew after a write of ours; a job deleted meanwhile needs nothing."""
        fresh = self._observe(seen.job.key)
        return (fresh, decide(fresh, self._limits)) if fresh else (seen, Decision(Action.WAIT))

    async def _admit(self, seen: Observation, asked: Decision) -> tuple[Observation, Decision] | None:
        """Asks the admission queue and commits the attempt: that write is the reservation and the attempt counter.

        None: the queue's next pass will answer, and the job is looked at again then.
        """
        answer = await self._queue.answer(seen, asked)
        if answer is None or answer.action is not Action.COMMIT:
            return (seen, answer) if answer else None
        try:
            new = build(seen, answer)
            await self._write(seen, answer, new, merge_patch(seen.job.raw_status, to_json(new)))
        except Denied:
            self._queue.release_denied(seen.job)
            raise
        return self._decide_again(seen)

    async def _start(self, seen: Observation) -> tuple[Observation, Decision]:
        """Starts what the attempt lacks, and what that lets begin: engines may follow their gang at once."""
        decision = Decision(Action.START)
        for _ in range(1 + bool(seen.replicas)):
            if decision.action is not Action.START:
                break
            stopped = await self._attempt_starter.start(seen)
            seen, decision = (seen, stopped) if stopped else self._decide_again(seen)
        return seen, decision

    async def _publish(self, seen: Observation, decision: Decision) -> float | None:
        """Writes the status if it differs; returns the seconds to wait when the difference is not urgent."""
        new = build(seen, decision)
        patch = merge_patch(seen.job.raw_status, to_json(new))
        if self._throttle.is_known(seen.job.key, patch):
            return None
        # until the gang runs there is little to tell, and in a burst each write delays the pods of other jobs
        starting = seen.job.active and not seen.started
        pause = self._status_interval * (PATIENCE if starting else 1)
        left = self._throttle.seconds_left(seen.job.key, seen.at, pause)
        if left > 0 and not URGENT & patch.keys() and (starting or "conditions" not in patch):
            return left
        await self._write(seen, decision, new, patch)
        return None

    async def _write(self, seen: Observation, decision: Decision, new: GRPOJobStatus, patch: Object) -> None:
        """The one status write, of the patch that leads to the new status; the event follows it."""
        job = seen.job
        log.debug("%s: %s writes %s", job.key, decision.action, ", ".join(patch))
        try:
            answer = await self._patch(job, patch)
        except NotFound:
            self._caches.grpojobs.discard(job.key, job.uid)
            return
        except Conflict:
            self._caches.grpojobs.put(await self._cluster.get(GRPOJOBS, *job.key))
            raise
        self._caches.grpojobs.put(answer)
        self._throttle.record_write(job.key, seen.at, merge_patch(answer.get("status") or {}, to_json(new)))
        if new.phase != job.status.phase:
            log.info("%s: %s: %s %s", job.key, new.phase, decision.reason, decision.message)
        self._on_status_written(job, new, seen.now)

    async def _patch(self, job: GRPOJobRecord, patch: Object) -> Object:
        """Patches the status; without what pods reported where the API server denies it with that.

        A decision must not wait for a number that somebody's program made up.
        """
        metadata = {"resourceVersion": str(job.version)}
        try:
            return await self._cluster.patch(GRPOJOBS, *job.key, {"metadata": metadata, "status": patch}, "status")
        except Denied as error:
            decided = {field: value for field, value in patch.items() if field not in REPORTED}
            if len(decided) == len(patch):
                raise
            log.warning("%s: the status is written without what its pods reported: %s", job.key, error)
            return await self._cluster.patch(GRPOJOBS, *job.key, {"metadata": metadata, "status": decided}, "status")

    async def _delete(self, cache: Cache[R], seen: R) -> None:
        """Deletes what was looked at, and nothing that has become of it since.

        Raises:
            Conflict: it changed meanwhile; the cache has been brought up to date.
        """
        try:
            await self._cluster.delete(cache.resource, *seen.key, seen)
        except Conflict:
            with contextlib.suppress(NotFound):
                cache.put(await self._cluster.get(cache.resource, *seen.key))
            raise

    async def _clean_up(self, key: ObjectKey) -> None:
        """Ends what is left of attempts that are not to run."""
        seen = self._observe(key)
        if seen is None:
            return
        left = clean_up(seen, self._limits)
        for child in (*seen.earlier_jobs, seen.child, seen.engines):
            if child and child.name in left.delete_jobs:
                await self._delete(self._caches.jobs, child)
        uid = seen.job.uid
        stopped = [attempt_selector(uid, attempt) for attempt in left.stop_attempts]
        for own in stopped + [engine_selector(uid, attempt) for attempt in left.stop_engines]:
            await self._cluster.delete_all(Selection(PODS, key.namespace, own, LIVE_PODS))


def _told(decision: Decision, taken: NameConflict) -> Decision:
    """The decision to wait, with the name that is another's; a decision that says something itself stays."""
    if decision.action is not Action.WAIT or decision.reason:
        return decision
    pauses = (pause for pause in (decision.look_again, taken.look_again) if pause is not None)
    return replace(decision, reason=Reason.NAME_TAKEN, message=taken.message, look_again=min(pauses))
