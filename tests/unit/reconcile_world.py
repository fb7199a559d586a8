"""A reconciler for unit tests, whose API server keeps objects in memory and records each
request."""

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.errors import AlreadyExists, Conflict, NotFound
from grpo_kube.objects.resources import Object, ObjectKey, Resource, Selection
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Limits
from grpo_operator.decide.observation import Pull, Silence
from grpo_operator.loop.attempt_starter import AttemptStarter
from grpo_operator.loop.caches import Caches, PodStartEvents
from grpo_operator.loop.garbage_collector import GarbageCollector
from grpo_operator.loop.preflights import Preflights
from grpo_operator.loop.reconcile import Observer, Reconciler
from grpo_operator.loop.shared_objects import SharedObjects
from grpo_operator.loop.status_writer import StatusWriter
from grpo_operator.loop.workload_sync import Workloads
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.names import GRPOJOBS
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import KEY, LIMITS, NOW, PODS, job_object
from tests.unit.queue_world import queue


class Rank0:
    """The rank 0 of one job, which has not answered yet."""

    def __init__(self) -> None:
        """Start without an answer."""
        self.answer: Pull | None = None
        """Its last answer."""
        self.silent: Silence | None = None
        """Since when and why it does not answer."""

    def pull(self, _: GRPOJobRecord) -> Pull | None:
        """Return the last answer."""
        return self.answer

    def silence(self, _: GRPOJobRecord) -> Silence | None:
        """Return why it does not answer."""
        return self.silent


def make_observer(
    api: Any,
    caches: Caches,
    workloads: Workloads,
    limits: Limits = LIMITS,
    *,
    rank0: Rank0 | None = None,
    pods: PodDefaults = PODS,
    shared: SharedObjects | None = None,
    now: Callable[[], float] = lambda: NOW,
) -> Observer:
    """An observer, at NOW without a clock; without `rank0` no rank 0 answers."""
    clock = ProcessClock(now, lambda: Observed(now()))
    events = PodStartEvents(api, limits)
    shared = shared or SharedObjects(api, caches, now, None)
    return Observer(
        api,
        caches,
        clock,
        workloads=workloads,
        rank0=rank0 or Rank0(),
        pod_start_events=events,
        preflights=Preflights(api, caches, shared, pods),
    )


class Cluster:
    """An API server with one GRPOJob, and an operator whose caches show each change at once."""

    pods = PODS
    """What pods of jobs have by default."""

    def __init__(
        self, spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None
    ) -> None:
        """`spec` is merged into that of a job on CPUs, with two pods."""
        self.now = NOW
        self.requests: list[str] = []
        """Method, kind and name of each request so far."""
        self.before_answer: Callable[[], None] = _do_nothing
        """Called once, when the next write has been taken and its answer is on the way."""
        self.watch_is_late = False
        """True while the operator learns of changes only by the answers to its own requests."""
        self.storage_classes: dict[str, tuple[str, str]] = {}
        self.rank0 = Rank0()
        self.published: list[GRPOJobStatus] = []
        """Statuses that were written, as events and metrics learn of them."""
        self.events: list[Object] = []
        """Events that no status write makes."""
        self.caches = Caches()
        self._objects: dict[str, Object] = {}
        self._version = 10
        self._reconciler = self._make_reconciler()
        self.store(GRPOJOBS, job_object(spec, status))

    def _make_reconciler(self) -> Reconciler:
        api: Any = self
        pods = self.pods
        workloads = Workloads(api, self.caches, Snapshot, lambda _: "", pods=pods, clock=self.clock)
        shared = SharedObjects(
            api, self.caches, self.clock, None, storage_classes=lambda: self.storage_classes
        )
        observer = make_observer(
            api, self.caches, workloads, rank0=self.rank0, pods=pods, shared=shared, now=self.clock
        )
        starter = AttemptStarter(
            api,
            self.caches,
            shared,
            workloads,
            first_seen_tracker=observer.first_seen_tracker,
            pods=pods,
        )
        return Reconciler(
            observer=observer,
            queue=self.make_queue(),
            status=StatusWriter(api, self.caches.grpojobs, 5.0, self.publish),
            starter=starter,
            workloads=workloads,
            garbage=GarbageCollector(api, self.caches, LIMITS, self.record),
            limits=LIMITS,
        )

    def make_queue(self) -> Any:
        """Return what admits jobs."""
        return queue([], Snapshot())

    def clock(self) -> float:
        """Seconds of both clocks."""
        return self.now

    def record(self, _: ObjectKey, event: Object) -> None:
        """Take an event that no status write makes."""
        self.events.append(event)

    def publish(self, _job: GRPOJobRecord, status: GRPOJobStatus, _: float) -> None:
        """Take a status that was written."""
        self.published.append(status)

    async def reconcile(self) -> float | None:
        """Reconcile the job once. Return what the reconciler returns."""
        return await self._reconciler(KEY)

    @property
    def job(self) -> Object:
        """The GRPOJob as it is stored."""
        return self._objects[GRPOJOBS.path(*KEY)]

    def suspend(self) -> None:
        """Set `spec.suspend`."""
        self.store(GRPOJOBS, {**self.job, "spec": {**self.job["spec"], "suspend": True}})

    def store(self, resource: Resource, item: Object) -> Object:
        """Store an object as a new version."""
        self._version += 1
        version = str(self._version)
        metadata = {"uid": f"uid-{version}", **item["metadata"], "resourceVersion": version}
        stored = {"status": {}, **item, "metadata": metadata}
        self._objects[resource.path(metadata["namespace"], metadata["name"])] = stored
        if not self.watch_is_late:
            self._watch(resource, stored)
        return stored

    def _watch(self, resource: Resource, stored: Object) -> None:
        for cache in (self.caches.grpojobs, self.caches.jobs, self.caches.pods):
            if cache.resource is resource:
                cache.put(stored)

    def remove_job(self) -> None:
        """Delete the GRPOJob."""
        uid = self._objects.pop(GRPOJOBS.path(*KEY))["metadata"]["uid"]
        if not self.watch_is_late:
            self.caches.grpojobs.discard(KEY, uid)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        self.requests.append(f"GET {resource.plural} {name}")
        return self._known(resource, namespace, name)

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        self.requests.append(f"POST {resource.plural} {name}")
        if resource.path(namespace, name) in self._objects:
            raise AlreadyExists(f"{name} exists", 409)
        return self.store(resource, body)

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, subresource: str
    ) -> Object:
        self.requests.append(f"PATCH {resource.plural}/{subresource} {name}")
        known = self._known(resource, namespace, name)
        if patch["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified", 409)
        answer = self.store(resource, apply_merge_patch(known, patch))
        before_answer, self.before_answer = self.before_answer, _do_nothing
        before_answer()
        return answer

    async def delete(self, resource: Resource, namespace: str, name: str, _: Any) -> None:
        self.requests.append(f"DELETE {resource.plural} {name}")
        del self._objects[resource.path(namespace, name)]

    async def delete_all(self, selection: Selection) -> None:
        self.requests.append(f"DELETE {selection}")

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        self.requests.append(f"LIST {selection}")
        folder = selection.resource.path(selection.namespace)
        items = [item for path, item in self._objects.items() if path.startswith(f"{folder}/")]
        selector = selection.labels
        yield (
            [item for item in items if selects(selector, item["metadata"].get("labels", {}))],
            self._version,
        )

    def _known(self, resource: Resource, namespace: str, name: str) -> Object:
        try:
            return self._objects[resource.path(namespace, name)]
        except KeyError:
            raise NotFound(f"{name} is not there", 404) from None


def apply_merge_patch(item: Object, patch: Object) -> Object:
    """Return the object as the API server patches it (RFC 7396)."""
    patched = dict(item)
    for field, value in patch.items():
        if value is None:
            patched.pop(field, None)
        elif isinstance(value, dict):
            patched[field] = apply_merge_patch(patched.get(field) or {}, value)
        else:
            patched[field] = value
    return patched


def selects(selector: str, labels: dict[str, str]) -> bool:
    """True if a label selector selects an object with these labels."""
    for part in filter(None, re.split(r",(?![^(]*\))", selector)):
        name, negated, value = re.fullmatch(r"([^=! ]+)(!?)=?(.*)", part).groups()  # type: ignore[union-attr]
        if value.startswith(" notin"):
            if labels.get(name, "") in re.findall(r"[^(), ]+", value[6:]):
                return False
        elif value:
            if (labels.get(name) == value) == bool(negated):
                return False
        elif name not in labels:
            return False
    return True


def _do_nothing() -> None:
    """Nobody does anything meanwhile."""
