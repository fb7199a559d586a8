"""Writes the Workloads by which GRPOJobs ask Kueue for their pods, and follows jobs that Kueue
sends to other clusters.

kueue/workload_steps.py decides the writes, and they are done one at a time. Each carries the
resourceVersion that the decision saw, so a write never overwrites a quota reservation that was made
meanwhile.

For a job that Kueue sends to another cluster (MultiKueue), this operator only asks Kueue, and the
other cluster's operator runs the job. The whole status is copied from there, so this operator adds
nothing to it and reports problems in its log. The plan goes along with the Workload.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, replace

from grpo_api.status.status import ConditionType
from grpo_kube.client import Client
from grpo_kube.objects.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    NotFound,
    Unavailable,
)
from grpo_kube.objects.json_reader import JsonObject
from grpo_kube.objects.resources import Object, ObjectKey
from grpo_kube.objects.times import shortest_pause

from ..admission.queue import AdmissionQueue
from ..admission.snapshot import Snapshot
from ..decide.decisions import Action, Decision
from ..decide.observation import Observation
from ..kueue.pod_sets import Contradiction, place_job
from ..kueue.workload_manifest import (
    Priority,
    adoption_patch,
    finished_status,
    pause_patch,
    queue_patch,
    readiness_status,
    status_without_admission,
    workload,
)
from ..kueue.workload_steps import (
    GIVES_BACK,
    POD_PRIORITY,
    WORKLOAD_PRIORITY,
    Step,
    Write,
    next_step,
    wanted_class,
)
from ..pods.pod_spec import PodDefaults
from ..pods.pod_volumes import Manifest
from ..records.names import (
    LABEL_COMPONENT,
    LABEL_UID,
    LABEL_WORKLOAD_PRIORITY,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITIES,
    WORKLOADS,
    workload_name,
)
from ..records.reasons import Reason
from ..records.records import ENDED_PHASES, GRPOJobRecord
from ..records.workloads import Assignment, PodSetUpdate, WorkloadRecord
from .caches import Caches, fetch_pods

log = logging.getLogger(__name__)

DENIED_PAUSE = 15.0
"""Seconds until what was refused is tried again: somebody must change something."""
NEXT_STEP_PAUSE = 1.0
"""Seconds from a write to a Workload until its job is reconciled again."""


class Refused(Exception):
    """A Workload can't be created as things are; `reason` is shown in a condition."""

    def __init__(self, reason: Reason, message: str) -> None:
        """Keeps the reason."""
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False)
class Workloads:
    """Reads Workloads from the cache and makes the next write to one."""

    cluster: Client
    caches: Caches
    snapshot: Callable[[], Snapshot]
    """Gives the PriorityClasses."""
    problem: Callable[[str], str]
    """Says why a namespace's Workloads can't be seen now, empty when they can."""
    _: KW_ONLY
    pods: PodDefaults
    """What pods of jobs have by default."""
    clock: Callable[[], float]
    """Gives unix seconds."""

    def look(self, observation: Observation) -> Observation:
        """Return the observation with the job's Workload."""
        job = observation.job
        key = _key(job)
        workload = self.caches.workloads.get(key)
        problem = self.problem(key.namespace) if job.queue_name else ""
        if self.caches.quarantine.is_quarantined(WORKLOADS.plural, key):
            problem = problem or f"Workload {key.name} can't be read; the operator's log says why"
        if workload and workload.grpojob_uid != job.uid:
            workload = None
        return replace(observation, workload=workload, kueue_problem=problem)

    async def step(self, observation: Observation, decision: Decision) -> Decision:
        """Takes the next step; returns the decision, with what keeps a Workload from being made.

        Raises:
            Conflict: the Workload changed meanwhile; the cache has been brought up to date.
        """
        due = next_step(observation, decision, self.pods, self._default_priority)
        if due is None:
            return decision
        try:
            if await self._holds_quota_for_pods(due, observation):
                return decision
            await self._execute_step(due, observation)
        except (Refused, Denied, NotFound, Unavailable) as error:
            # A webhook of Kueue that is down makes every write fail, for hours perhaps.
            log.warning("%s: %s of its Workload: %s", observation.job.key, due.write, error)
            requeue_after = min(decision.requeue_after or DENIED_PAUSE, DENIED_PAUSE)
            decision = replace(decision, requeue_after=requeue_after)
            # What is decided on a gang that runs or has ended must not wait for its Workload.
            if decision.action is not Action.QUEUE:
                return decision
            reason = error.reason if isinstance(error, Refused) else Reason.WAITING_FOR_KUEUE
            message = f"its Workload can't be brought about: {error}"
            return replace(decision, reason=reason, message=message)
        # Another write may be due, and the event of this one is no news after its answer.
        next_look = shortest_pause(decision.requeue_after, NEXT_STEP_PAUSE)
        return replace(decision, requeue_after=next_look)

    async def _holds_quota_for_pods(self, due: Step, observation: Observation) -> bool:
        """True if the write would give quota back while pods still end.

        The watch of pods may be later than that of Jobs, so only the API server knows.
        """
        job, workload_record = observation.job, observation.workload
        if due.write not in GIVES_BACK or job.is_active or workload_record is None:
            return False
        if not workload_record.has_reservation:
            return False
        selector = f"{LABEL_UID}={job.uid}"
        pods = await fetch_pods(self.cluster, self.caches, job.key.namespace, selector)
        return any(pod.phase not in ENDED_PHASES for pod in pods)

    async def _execute_step(self, due: Step, observation: Observation) -> None:
        job, workload_record = observation.job, observation.workload
        log.info("%s: %s Workload %s", job.key, due.write, _key(job).name)
        if due.write is Write.CREATE and due.plan:
            await self._create(job, workload(job, due.plan, await self._priority(job), self.pods))
        elif due.write is Write.ADOPT:
            await self._adopt(job)
        elif workload_record is None:
            return
        elif due.write is Write.DELETE:
            await self._write_and_cache(
                workload_record,
                lambda: self.cluster.delete(WORKLOADS, *workload_record.key, workload_record),
            )
        elif due.write is Write.AMEND:
            await self._patch(workload_record, queue_patch(job, await self._priority(job)))
        elif due.write in (Write.PAUSE, Write.RESUME):
            await self._patch(workload_record, pause_patch(due.write is Write.PAUSE))
        else:
            await self._write_status(due.write, observation, workload_record)

    async def _create(self, job: GRPOJobRecord, body: Manifest) -> None:
        key = _key(job)
        try:
            answer = await self.cluster.create(WORKLOADS, key.namespace, body)
        except AlreadyExists:
            answer = await self.cluster.get(WORKLOADS, *key)
            workload = self.caches.workloads.parse_item(answer)
            if workload is None or workload.grpojob_uid != job.uid:
                raise Refused(
                    Reason.NAME_TAKEN, f"Workload {key.name} exists and is not this GRPOJob's"
                ) from None
        self.caches.workloads.put(answer)

    async def _adopt(self, job: GRPOJobRecord) -> None:
        """Adopt the Workload that MultiKueue has made here, which has no controller yet."""
        key = _key(job)
        answer = await self.cluster.get(WORKLOADS, *key)
        workload = self.caches.workloads.parse_item(answer)
        # MultiKueue's Workload has no controller yet; one that has another is not for this job.
        if workload is None or workload.grpojob_uid not in ("", job.uid):
            raise Refused(
                Reason.NAME_TAKEN, f"Workload {key.name} is another object's, or can't be read"
            )
        await self._patch(workload, adoption_patch(job))

    async def _write_status(
        self, write: Write, observation: Observation, workload_record: WorkloadRecord
    ) -> None:
        """One write of the status; what others have in it stays."""
        # The cache keeps records only, and the write needs all conditions, those of others too.
        item = await self.cluster.get(WORKLOADS, *workload_record.key)
        self.caches.workloads.put(item)
        if JsonObject(item).part("metadata").digits("resourceVersion") != workload_record.version:
            raise Conflict(f"Workload {workload_record.key} has changed")
        now, job = self.clock(), observation.job
        if write is Write.CLEAR:
            status = status_without_admission(item, now)
        elif write in (Write.READY, Write.RECOVER):
            status = readiness_status(item, write is Write.READY, now)
        else:
            final = next((job.condition(end) for end in _ENDS if job.is_true(end)), None)
            succeeded = job.is_true(ConditionType.SUCCEEDED)
            status = finished_status(item, succeeded, final.message if final else "", now)
        await self._patch(workload_record, {"status": status}, "status")

    async def _patch(
        self, workload_record: WorkloadRecord, patch: Object, subresource: str = ""
    ) -> None:
        metadata = {**patch.get("metadata", {}), "resourceVersion": str(workload_record.version)}
        body = {**patch, "metadata": metadata}
        await self._write_and_cache(
            workload_record,
            lambda: self.cluster.patch(WORKLOADS, *workload_record.key, body, subresource),
        )

    async def _write_and_cache(
        self, workload_record: WorkloadRecord, write: Callable[[], Awaitable[Object | None]]
    ) -> None:
        try:
            answer = await write()
        # The next step must be decided on what Kueue has written meanwhile, so the caller starts
        # again.
        except Conflict:
            self.caches.workloads.put(await self.cluster.get(WORKLOADS, *workload_record.key))
            raise
        if answer:
            self.caches.workloads.put(answer)

    def _default_priority(self) -> str | None:
        """Name of the default PriorityClass, empty without one; None if they can't be seen."""
        try:
            snapshot = self.snapshot()
        except ClusterError:
            return None
        return snapshot.default_priority if snapshot.priorities else None

    async def _priority(self, job: GRPOJobRecord) -> Priority:
        """The value of the class that says the job's priority, and its name."""
        kind, name = wanted_class(job)
        if kind == WORKLOAD_PRIORITY:
            try:
                item = await self.cluster.get(WORKLOAD_PRIORITIES, "", name)
            except NotFound:
                message = (
                    f"there is no {kind} {name}, which its label {LABEL_WORKLOAD_PRIORITY} names"
                )
                raise Refused(Reason.PRIORITY_CLASS_NOT_FOUND, message) from None
            return Priority(JsonObject(item).integer("value"), kind, name)
        snapshot = self.snapshot()
        name = name or snapshot.default_priority
        if name and snapshot.priorities and name not in snapshot.priorities:
            message = (
                f"there is no PriorityClass {name}, which spec.placement.priorityClassName names"
            )
            raise Refused(Reason.PRIORITY_CLASS_NOT_FOUND, message)
        return Priority(snapshot.priorities.get(name, 0), POD_PRIORITY, name)

    async def place_job(self, observation: Observation, job: Manifest) -> Manifest:
        """The Job of a role where Kueue wants it.

        Raises:
            Contradiction: Kueue's words contradict each other.
            ClusterError: a ResourceFlavor can't be had.
        """
        if observation.workload is None:
            raise Contradiction("there is no Workload")
        role = job["spec"]["template"]["metadata"]["labels"][LABEL_COMPONENT]
        names = observation.workload.assignments.get(role, Assignment()).flavors
        items = [await self.cluster.get(RESOURCE_FLAVORS, "", name) for name in names]
        return place_job(
            job,
            observation.workload,
            [_flavor(name, item) for name, item in zip(names, items, strict=True)],
        )


def unseen_message(not_served: str, *, forbidden: bool) -> str:
    """Why Workloads can't be seen, by the answer to a LIST of them; empty when they can."""
    if not not_served:
        return ""
    if forbidden:
        return (
            "the operator may not see Kueue's Workloads here; the chart's rules grant it: "
            f"{not_served}"
        )
    return (
        "the cluster has no Kueue that serves Workloads of kueue.x-k8s.io/v1beta2: install it, or "
        f"remove the job's queue name ({not_served})"
    )


_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)


def _key(job: GRPOJobRecord) -> ObjectKey:
    return ObjectKey(job.key.namespace, job.kueue.prebuilt or workload_name(job.name, job.uid))


def _flavor(name: str, item: Object) -> PodSetUpdate:
    spec = JsonObject(item).part("spec")
    tolerations = tuple(dict(toleration.items()) for toleration in spec.parts("tolerations"))
    return PodSetUpdate(
        node_selector=spec.string_map("nodeLabels"),
        tolerations=tolerations,
        source=f"ResourceFlavor {name}",
    )


async def sync_dispatched(
    observation: Observation, queue: AdmissionQueue, workloads: Workloads
) -> float | None:
    """Take the next step of the Workload of a job that Kueue sends to another cluster.

    Return the seconds until time alone may change something; None if it can't.

    Raises:
        ClusterError: the API server refused or did not answer; nothing is lost by trying again.
    """
    job = observation.job
    if job.is_suspended:
        decision = Decision(Action.SUSPEND, Reason.SUSPENDED)
    else:
        decision = await queue.answer(observation, Decision(Action.ADMIT)) or Decision(Action.WAIT)
    decision = await workloads.step(observation, decision)
    if decision.action in (Action.QUEUE, Action.REJECT):
        log.info("%s: %s %s", job.key, decision.reason, decision.message)
    return decision.requeue_after
