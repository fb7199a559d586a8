"""Mirrors what admission must know of the cluster, knows which jobs hold GPUs, and makes snapshots
for admission.

Mirrored are nodes, bound pods, PriorityClasses, StorageClasses and GRPOJobClasses, and of
namespaces their pod security standard, their ResourceQuotas and the names of their ServiceAccounts.
Admission must see foreign pods, too, and the
operator must not keep every pod of the cluster. So of a pod only node, requests and holder are
kept, and only while it is bound and has not ended. While nothing changes, the only requests are the
watches' renewals and the periodic LISTs. An event that changes nothing relevant, such as a
kubelet's heartbeat, starts no work.

A kind that can't be listed does not count as empty. Only after a plain "forbidden" does admission
go on without it, and says so. After any other error before the first full LIST, and after a long
silence of a watch, no job is admitted.

GPUs count as reserved for every GRPOJob that can be read. They also do for a quarantined job whose
gang still runs or may still start.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

from grpo_kube.cache import Cache, Quarantine
from grpo_kube.client import Client
from grpo_kube.informer import Informer
from grpo_kube.objects.errors import Unavailable
from grpo_kube.objects.json_reader import JsonObject
from grpo_kube.objects.resources import (
    BOUND_PODS,
    NAMESPACES,
    NODES,
    PODS,
    PRIORITY_CLASSES,
    QUOTAS,
    SERVICE_ACCOUNTS,
    STORAGE_CLASSES,
    Object,
    ObjectKey,
    Selection,
    identity,
)
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_kube.pacing import Backoff

from ..admission.inventory import Amounts, NodeFacts, PodFacts, node_facts, pod_facts
from ..admission.snapshot import Snapshot, quota_facts
from ..admission.storage_classes import provisioners, storage_class
from ..decide.first_seen import stored_age
from ..records.job_class import JobClasses, enforced_level, job_class_facts, named_classes
from ..records.names import JOB_CLASSES, is_engines_job
from ..records.records import GRPOJobRecord, JobRecord
from .caches import Caches

F = TypeVar("F")
DEAF_SECONDS = 180.0
"""Seconds without a LIST, event or bookmark after which facts are not relied on."""


@dataclass(frozen=True, slots=True)
class ObjectState(Generic[F]):
    """What matters of one object, as a record of a Cache."""

    key: ObjectKey
    uid: str
    version: int
    value: F


class Lister(Generic[F]):
    """The facts of one selection of objects, kept by an informer."""

    def __init__(
        self,
        cluster: Client,
        selection: Selection,
        parse: Callable[[Object], F],
        changed: Callable[[], None],
        *,
        quarantine: Quarantine,
        resync: float,
        optional: bool = False,
    ) -> None:
        """`changed` hears of changed facts or rights; `resync`, `optional`: see Informer."""
        self.selection = selection
        self._on_change = changed
        self._cache: Cache[ObjectState[F]] = Cache(
            selection.resource, lambda item: _fact(item, parse), quarantine
        )
        # what is forbidden may stay so for ever: asked for as rarely as everything is listed again
        backoff = Backoff(last=resync)
        self.informer = Informer(
            cluster, selection, self._cache, self._take_changes,
            resync=resync, backoff=backoff, optional=optional,
        )  # fmt: skip
        self._was_not_served = ""

    def __iter__(self) -> Iterator[F]:
        """All facts that the operator may see."""
        if not self.is_forbidden:
            yield from (state.value for state in self._cache)

    @property
    def is_forbidden(self) -> bool:
        """True if the API server does not let the operator see these objects."""
        return self.informer.forbidden

    def unknown_reason(self, now: float) -> str:
        """Why facts can't be relied on; empty if they can or are forbidden. `now`: loop clock."""
        if self.is_forbidden or self.informer.is_missing_kind:
            return ""
        if self.informer.heard_at is None:
            return f"{self.selection} have not been listed"
        silent = now - self.informer.heard_at
        if silent <= DEAF_SECONDS:
            return ""
        return f"nothing was received about {self.selection} for {silent:.0f} s"

    def _take_changes(self, keys: Iterable[ObjectKey]) -> None:
        """Report that facts, or the right to see them, have changed."""
        # A kubelet's heartbeat changes the Node, but none of these facts: it has no key here.
        if list(keys) or self._was_not_served != self.informer.not_served:
            self._was_not_served = self.informer.not_served
            self._on_change()


def _fact(item: Object, parse: Callable[[Object], F]) -> ObjectState[F]:
    meta = JsonObject(item).part("metadata")
    return ObjectState(
        identity(item), meta.text("uid"), meta.digits("resourceVersion"), parse(item)
    )


class ClusterState:
    """Mirrors all kinds that admission needs, and makes snapshots of them."""

    def __init__(
        self,
        cluster: Client,
        changed: Callable[[], None],
        *,
        namespaces: tuple[str, ...] = (),
        parse_node: Callable[[Object], NodeFacts] = node_facts,
        resync: float,
    ) -> None:
        """`namespaces` are those whose pods may be seen when the whole cluster's may not;
        `parse_node` reads a node with what the operator was installed with.

        `changed` hears when the next snapshot will be another than the last.
        """
        self.quarantine = Quarantine()
        self._on_change = changed
        self._last: Snapshot | None = None
        self._last_classes: JobClasses | None = None
        self._has_changed = asyncio.Event()

        def lister(
            selection: Selection, parse: Callable[[Object], F], *, optional: bool = False
        ) -> Lister[F]:
            return Lister(
                cluster, selection, parse, self._handle_change,
                quarantine=self.quarantine, resync=resync, optional=optional,
            )  # fmt: skip

        self._nodes = lister(Selection(NODES), parse_node)
        self._pods = lister(Selection(PODS, fields=BOUND_PODS), pod_facts)
        self._priorities = lister(Selection(PRIORITY_CLASSES), _priority)
        self._storage_classes = lister(Selection(STORAGE_CLASSES), storage_class)
        # the definition may be older than the operator
        self._job_classes = lister(Selection(JOB_CLASSES), job_class_facts, optional=True)
        self._namespaces = lister(Selection(NAMESPACES), enforced_level)
        self._namespace_pods = [
            lister(Selection(PODS, name, fields=BOUND_PODS), pod_facts) for name in namespaces
        ]
        served = namespaces or (None,)
        self._quotas = [lister(Selection(QUOTAS, name), quota_facts) for name in served]
        self._accounts = [lister(Selection(SERVICE_ACCOUNTS, name), _account) for name in served]

    def _handle_change(self) -> None:
        self._last = self._last_classes = None
        self._has_changed.set()
        self._on_change()

    @property
    def _all_listers(self) -> tuple[Lister[Any], ...]:
        classes = (self._priorities, self._storage_classes, self._job_classes, self._namespaces)
        return self._nodes, self._pods, *classes, *self._quotas, *self._accounts

    def informers(self) -> dict[str, Informer[Any]]:
        """By name, those that are needed whatever the operator may see."""
        return {
            f"{lister.selection}, for admission": lister.informer for lister in self._all_listers
        }

    async def run(self) -> None:
        """Keeps everything up to date, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for lister in self._all_listers:
                tasks.create_task(lister.informer.follow(), name=f"facts-{lister.selection}")
            # Pods of single namespaces are watched only once those of the whole cluster turn out to
            # be forbidden.
            while not self._pods.is_forbidden:
                await self._has_changed.wait()
                self._has_changed.clear()
            for lister in self._namespace_pods:
                tasks.create_task(lister.informer.follow(), name=f"facts-{lister.selection}")

    def job_classes(self) -> JobClasses:
        """Return the classes as they were last seen; cheaper than a snapshot.

        Raises:
            Unavailable: they have not been listed yet.
        """
        for lister in (self._job_classes, self._namespaces):
            if not lister.informer.settled.is_set():
                raise Unavailable(f"{lister.selection} have not been listed")
        if self._last_classes is None:
            served = self._job_classes.informer
            problem = f"classes can't be seen: {served.not_served}" if served.not_served else ""
            self._last_classes = JobClasses(
                by_name=named_classes(self._job_classes),
                problem=problem,
                enforced_levels=dict(self._namespaces),
            )
        return self._last_classes

    def take(self) -> Snapshot:
        """Return the cluster as it is known now; the same object while nothing has changed.

        Raises:
            Unavailable: a kind has not been listed yet, or its watch has been silent for more than
                DEAF_SECONDS.
        """
        # Without the right to see the whole cluster's pods, those of the served namespaces are
        # better than none.
        pods = self._namespace_pods if self._pods.is_forbidden else [self._pods]
        now = asyncio.get_running_loop().time()
        for lister in (*self._all_listers, *pods):
            if why := lister.unknown_reason(now):
                raise Unavailable(why)
        if self._last is None:
            self._last = self._snapshot(pods)
        return self._last

    def _snapshot(self, pods: "list[Lister[PodFacts | None]]") -> Snapshot:
        gpu_pods, other_use = _split_pods(filter(None, chain.from_iterable(pods)))
        priorities = {name: value for name, value, _ in self._priorities}
        # Of several defaults Kubernetes takes the one with the lowest value.
        defaults = sorted(
            (value, name) for name, value, is_default in self._priorities if is_default
        )
        default = defaults[0][1] if defaults else ""
        if default:
            # a job that names no class has the default's value
            priorities[""] = priorities[default]
        problem = ""
        if self._nodes.is_forbidden:
            problem = f"nodes can't be listed: {self._nodes.informer.not_served}"
        all_quotas = chain.from_iterable(self._quotas)
        quotas = _by_namespace((quota.namespace, quota) for quota in all_quotas)
        accounts = _by_namespace(chain.from_iterable(self._accounts))
        return Snapshot(
            nodes=tuple(sorted(self._nodes, key=attrgetter("name"))),
            gpu_pods=gpu_pods,
            other_use=other_use,
            priorities=priorities,
            default_priority=default,
            quotas=quotas,
            storage_classes=provisioners(list(self._storage_classes)),
            job_classes=self.job_classes(),
            service_accounts={namespace: frozenset(names) for namespace, names in accounts.items()},
            visible=not self._pods.is_forbidden,
            problem=problem,
        )


def _by_namespace(pairs: Iterable[tuple[str, F]]) -> dict[str, tuple[F, ...]]:
    by_namespace: dict[str, list[F]] = {}
    for namespace, fact in pairs:
        by_namespace.setdefault(namespace, []).append(fact)
    return {namespace: tuple(facts) for namespace, facts in by_namespace.items()}


def _priority(item: Object) -> tuple[str, int, bool]:
    """Name and value of a PriorityClass, and whether it is the cluster's default."""
    whole = JsonObject(item)
    return (
        whole.part("metadata").required_text("name"),
        whole.integer("value"),
        whole.is_true("globalDefault"),
    )


def _account(item: Object) -> tuple[str, str]:
    """Namespace and name of a ServiceAccount."""
    meta = JsonObject(item).part("metadata")
    return meta.required_text("namespace"), meta.required_text("name")


def _split_pods(pods: Iterable[PodFacts]) -> tuple[tuple[PodFacts, ...], dict[str, Amounts]]:
    """Pods that have GPUs or are ours, one by one; what all others take, summed up by node."""
    matching: list[PodFacts] = []
    others: dict[str, Amounts] = {}
    for pod in pods:
        # Extended resources, such as GPUs, have a / in their name. Of pods without any the sum by
        # node is enough, and the operator must not keep every pod of a cluster.
        if pod.grpojob_uid or any("/" in resource for resource in pod.takes):
            matching.append(pod)
            continue
        total = others.setdefault(pod.node, {})
        for resource, value in pod.takes.items():
            total[resource] = total.get(resource, 0.0) + value
    return tuple(matching), others


class ReservedGangs:
    """All GRPOJobs that the admission queue must count.

    An unreadable job stays counted while its attempt's Job exists and has not ended, because more
    pods may come. Before its Job exists, it is counted until start_checks.not_started would release
    it.
    """

    def __init__(self, caches: Caches, clock: ProcessClock, scheduling: float) -> None:
        """Read from these caches; `scheduling` is in seconds."""
        self._caches = caches
        self._clock = clock
        self._scheduling = scheduling
        self._admitted: dict[tuple[str, int], Observed] = {}
        """By uid and attempt of unreadable jobs without a Job: the first sight, less the attempt's
        age then by the wall clock."""

    def __iter__(self) -> Iterator[GRPOJobRecord]:
        """Each of them."""
        yield from map(self._with_place, self._caches.grpojobs)
        yield from filter(self._may_run, self._caches.grpojobs.quarantined_records.values())

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        """Return the GRPOJob of this namespace and name, if it counts."""
        if job := self._caches.grpojobs.get(key):
            return self._with_place(job)
        aside = self._caches.grpojobs.quarantined_records.get(key)
        return aside if aside and self._may_run(aside) else None

    @property
    def requeue_after(self) -> float | None:
        """Seconds until time alone takes a job out of these; None while it doesn't."""
        waiting = (
            self._starts_within(job)
            for job in self._caches.grpojobs.quarantined_records.values()
            if not self._jobs_of_attempt(job)
        )
        return min((seconds for seconds in waiting if seconds > 0), default=None)

    def _with_place(self, job: GRPOJobRecord) -> GRPOJobRecord:
        """The job, with its place if it got a queue name after the operator had admitted it."""
        if not job.is_active or not job.queue_name:
            return job
        is_own = any(not child.workload for child in self._jobs_of_attempt(job))
        return replace(job, keeps_place=True) if is_own else job

    def _may_run(self, job: GRPOJobRecord) -> bool:
        """True if the Job of the attempt is there and has not ended, or may still be created."""
        # An unreadable job may become readable in time to be started, for as long as
        # start_checks.not_started allows it.
        begun = self._jobs_of_attempt(job)
        if not begun:
            return self._starts_within(job) > 0
        return job.is_active and any(not child.ended for child in begun)

    def _jobs_of_attempt(self, job: GRPOJobRecord) -> list[JobRecord]:
        """The Job of the attempt, if there is one; not that of its engines, which ends later."""
        current_attempt = (job.uid, job.status.attempt)
        children = (
            child for child in self._caches.jobs.owned_by(job.key) if not is_engines_job(child.name)
        )
        return [
            child for child in children if (child.grpojob_uid, child.attempt) == current_attempt
        ]

    def _starts_within(self, job: GRPOJobRecord) -> float:
        """Seconds for which the attempt may still be started; 0 if started or not committed."""
        if not job.is_active or job.status.job_uid:
            return 0.0
        now = self._clock.monotonic()
        # The wall clock may be set meanwhile, and the status of a job that can't be read can't be
        # corrected.
        age = stored_age(job.status.attempt_start_time, self._clock.wall())
        admitted_at = Observed(now.at - age)
        admitted_at = self._admitted.setdefault((job.uid, job.status.attempt), admitted_at)
        return self._scheduling - (now - admitted_at)
