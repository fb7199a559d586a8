"""Builds one operator process: the informers that fill its caches, and the tasks that run while it
leads.

Leader election is elsewhere. A follower keeps its caches as full as the leader's and does nothing
else: it queues no job, fetches no progress and writes nothing. Informers are listed here by the
kind of object that they mirror, each in every namespace that the operator serves. Tasks run as one
group: when one ends, all end.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import aiohttp
import kopf

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.cache import Cache
from grpo_kube.client import Client
from grpo_kube.event_sender import EventRecorder
from grpo_kube.informer import Informer
from grpo_kube.objects.errors import ClusterError
from grpo_kube.objects.resources import (
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    ObjectKey,
    Resource,
    Selection,
)
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_kube.pacing import Backoff
from grpo_kube.work_queue import BATCH_DELAY, ECHO_DELAY, WorkQueue, work

from ..admission.inventory import IMAGE_ARCHITECTURES, node_facts
from ..admission.queue import AdmissionQueue
from ..decide.first_seen import FirstSeenTracker
from ..loop.attempt_starter import AttemptStarter
from ..loop.caches import Caches, PodStartEvents
from ..loop.cluster_state import ClusterState, ReservedGangs
from ..loop.garbage_collector import GarbageCollector
from ..loop.measured_run_store import MeasuredRunStore
from ..loop.preflights import Preflights
from ..loop.progress import ProgressPuller, http_fetch, targets
from ..loop.quarantine_reporter import QuarantineReporter
from ..loop.reconcile import Observer, Reconciler
from ..loop.shared_objects import SharedObjects
from ..loop.status_writer import StatusWriter
from ..loop.workload_sync import Workloads, unseen_message
from ..records.names import (
    COMPONENT_RENDEZVOUS,
    GRPOJOBS,
    LABEL_COMPONENT,
    LABEL_JOB,
    NETWORK_POLICY,
    WORKLOADS,
)
from ..records.records import GRPOJobRecord
from ..report.events import merge_start_event, repeated_end_event, status_events
from ..tracing.attempt_trace import AttemptTraces
from . import handlers, metrics_server, settings
from .job_metrics import Sample, failure_samples, pod_samples, progress_samples
from .metrics_server import VERSION, Metrics
from .span_exporter import SpanExporter

log = logging.getLogger(__name__)

DEAF_SECONDS = 240.0
"""Without a LIST, an event or a bookmark of some kind for this long, the process is of no use."""


class Operator:
    """One operator process: its caches, its queue and everything that fills and drains them."""

    def __init__(
        self,
        settings: settings.Settings,
        cluster: Client,
        *,
        caches: Caches,
        queue: WorkQueue,
        metrics: Metrics,
        session: aiohttp.ClientSession,
        leading: asyncio.Event,
        wall: Callable[[], float],
    ) -> None:
        """`leading` is set once this process leads; `wall` gives unix seconds."""
        self.settings = settings
        self._wall = wall
        self._clock = asyncio.get_running_loop().time
        self._process_clock = ProcessClock(wall, lambda: Observed(self._clock()))
        self._cluster = cluster
        self._caches = caches
        self._queue = queue
        self._metrics = metrics

        def has_work() -> bool:
            return len(queue) + queue.active > 0

        self._recorder = EventRecorder(cluster, merge_start_event, has_work, metrics.record_event)
        self._quarantine_reporter = QuarantineReporter(cluster, caches.quarantine, wall)
        self.informers = self._informers()
        self._leading = leading
        self.warm = asyncio.Event()
        """Set once the caches are full."""
        self.working = asyncio.Event()
        """Set once the workers run; a follower's wait."""
        self._works_since: float | None = None
        self.kopf_ready = asyncio.Event()
        self._exporter: SpanExporter | None = None
        self._traces: AttemptTraces | None = None
        if tracing := settings.tracing:
            self._exporter = SpanExporter(
                session, tracing.endpoint, tracing.headers, metrics.record_spans
            )
            self._traces = AttemptTraces(self._exporter.put, every=tracing.every, version=VERSION)
        self._puller = self._rank0(session)
        parse_node = partial(
            node_facts,
            prices=settings.gpu_hour_prices,
            image_architectures=settings.pods.architectures or IMAGE_ARCHITECTURES,
        )
        self.facts = ClusterState(
            cluster,
            self._facts_changed,
            namespaces=settings.namespaces,
            parse_node=parse_node,
            resync=settings.resync,
        )
        limits = settings.limits
        gangs = ReservedGangs(caches, self._process_clock, limits.scheduling_timeout_seconds)
        self._first_seen_tracker = FirstSeenTracker()
        self._admission = AdmissionQueue(
            gangs,
            self.facts.take,
            queue.add_all,
            limits=limits,
            clock=self._process_clock,
            first_seen_tracker=self._first_seen_tracker,
            pods=settings.pods,
        )
        self._measured_runs: MeasuredRunStore | None = None
        if key := settings.measured_runs:
            self._measured_runs = MeasuredRunStore(
                cluster, key, caches.grpojobs, self._admission.take_measured_runs
            )
        self._reconcile = self._reconciler()

    def _reconciler(self) -> Reconciler:
        """Build the parts of a reconcile, one for each of its steps."""
        settings = self.settings
        cluster = self._cluster
        caches = self._caches
        limits = settings.limits
        pods = settings.pods
        workloads = Workloads(
            cluster, caches, self.facts.take, self._kueue_problem, pods=pods, clock=self._wall
        )
        shared = SharedObjects(
            cluster,
            caches,
            self._clock,
            settings.watchers,
            storage_classes=lambda: self.facts.take().storage_classes,
        )
        observer = Observer(
            cluster,
            caches,
            self._process_clock,
            workloads=workloads,
            rank0=self._puller,
            pod_start_events=PodStartEvents(cluster, limits),
            preflights=Preflights(cluster, caches, shared, pods),
            classes=self.facts.job_classes,
            traces=self._traces,
            first_seen_tracker=self._first_seen_tracker,
        )
        starter = AttemptStarter(
            cluster,
            caches,
            shared,
            workloads,
            first_seen_tracker=observer.first_seen_tracker,
            pods=pods,
        )
        interval = settings.status_interval
        status_writer = StatusWriter(cluster, caches.grpojobs, interval, self._publish_status_write)
        return Reconciler(
            observer=observer,
            queue=self._admission,
            status=status_writer,
            starter=starter,
            workloads=workloads,
            garbage=GarbageCollector(cluster, caches, limits, self._recorder.record),
            limits=limits,
        )

    def _rank0(self, session: aiohttp.ClientSession) -> ProgressPuller:
        """What asks rank 0 of every gang."""
        caches = self._caches
        tracing = self.settings.tracing
        trace_every = tracing.every if tracing else None
        fetch = http_fetch(session, trace_every=trace_every)
        current_targets = partial(targets, caches.grpojobs, caches.pods.owned_by)
        interval = self.settings.progress_interval
        progressed = partial(self._queue.add, slow=True)
        return ProgressPuller(
            current_targets, fetch, progressed, interval, self._metrics.record_pull
        )

    def _informers(self) -> dict[str, Informer[Any]]:
        """An informer per kind and namespace, by `plural/namespace`; `*` for all namespaces."""
        caches = self._caches
        resync = self.settings.resync
        add, add_namespaces = self._add, self._add_namespaces
        our_policy = f"metadata.name={NETWORK_POLICY}"
        rendezvous = f"{LABEL_COMPONENT}={COMPONENT_RENDEZVOUS}"
        kinds: list[tuple[Resource, str, Cache[Any], Callable[[Iterable[ObjectKey]], None]]] = [
            (JOBS, LABEL_JOB, caches.jobs, add),
            (PODS, LABEL_JOB, caches.pods, add),
            (SERVICES, rendezvous, caches.services, add_namespaces),
            (WORKLOADS, LABEL_JOB, caches.workloads, add),
            (GRPOJOBS, "", caches.grpojobs, add),
        ]
        if self.settings.watchers is not None:
            kinds.append((NETWORK_POLICIES, "", caches.network_policies, add_namespaces))
        by_name: dict[str, Informer[Any]] = {}
        for namespace in self.settings.namespaces or (None,):
            for resource, labels, cache, changed in kinds:
                # by name: who takes its labels away is noticed, and no other policy may be read
                fields = our_policy if resource is NETWORK_POLICIES else ""
                selection = Selection(resource, namespace, labels, fields)
                by_name[f"{resource.plural}/{namespace or '*'}"] = Informer(
                    self._cluster,
                    selection,
                    cache,
                    changed,
                    resync=resync,
                    optional=resource is WORKLOADS,
                )
        return by_name

    def add(self, key: ObjectKey, news: bool = True) -> None:
        """Queue a job for a reconcile; a follower queues nothing.

        Without `news` the event shows a write of our own, whose consequences were seen to already.
        """
        if not self.working.is_set():
            return
        if not news:
            self._queue.add_after(key, ECHO_DELAY)
        elif self._caches.is_quiet(key):
            self._queue.add_after(key, BATCH_DELAY, slow=True)
        else:
            self._queue.add(key)

    def _add(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self.add(key)

    def _publish_status_write(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        """The API server has taken a status: events, metrics and traces follow."""
        for event in status_events(job, new, now):
            self._recorder.record(job.key, event)
        self._metrics.record_status_write(job, new, now)
        if self._traces:
            self._traces.record_status(job, new, now)
        if self._measured_runs:
            self._measured_runs.record(job, new)

    def _facts_changed(self) -> None:
        self._admission.wake()

    def _add_namespaces(self, keys: Iterable[ObjectKey]) -> None:
        """A Service or NetworkPolicy came or went: its namespace's active jobs need it."""
        namespaces = {key.namespace for key in keys}
        active_jobs = (job for job in self._caches.grpojobs if job.is_active)
        self._add(job.key for job in active_jobs if job.key.namespace in namespaces)

    def _kueue_problem(self, namespace: str) -> str:
        """Why Workloads of a namespace can't be seen now; empty when they can."""
        served = namespace if self.settings.namespaces else "*"
        informer = self.informers[f"{WORKLOADS.plural}/{served}"]
        if informer.not_served:
            informer.request_list()
        return unseen_message(informer.not_served, forbidden=informer.forbidden)

    async def run(self, on_filled: Callable[[], None]) -> None:
        """Fill the caches by LISTs, call `on_filled`, then work while it leads, until cancelled."""
        leads_from_start = self._leading.is_set()
        async with asyncio.TaskGroup() as tasks:
            for name, informer in self.informers.items():
                # kopf delivers the events of GRPOJobs
                is_of_kopf = name.startswith(GRPOJOBS.plural)
                follow = informer.relist_forever() if is_of_kopf else informer.follow()
                tasks.create_task(follow, name=name)
            tasks.create_task(self.facts.run(), name="facts")
            for informer in self.informers.values():
                await informer.settled.wait()
            on_filled()
            tasks.create_task(self._metrics.follow_lag(), name="lag")
            for name, part in self._parts().items():
                # a task of a follower's, too: kopf at its end cancels all that are younger than
                # itself
                tasks.create_task(self._once_leading(part), name=name)
            tasks.create_task(self._take_over(leads_from_start), name="takeover")
            self.warm.set()

    def _parts(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What runs in the leader alone, by name."""

        def worker() -> Coroutine[Any, Any, None]:
            return work(self._queue, self._reconcile, self._metrics)

        parts = {
            "events": self._recorder.run,
            "unreadable": self._quarantine_reporter.run,
            "progress": self._puller.run,
            "admission": self._admission.run,
        }
        if self._exporter:
            parts["spans"] = self._exporter.run
        if self._measured_runs:
            parts["measured-runs"] = self._measured_runs.run
        return parts | {f"worker-{number}": worker for number in range(self.settings.workers)}

    async def flush_spans(self) -> None:
        """Send the spans that are left, for a few seconds."""
        if self._exporter:
            await self._exporter.flush()

    async def _once_leading(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.working.wait()
        await part()

    async def _take_over(self, leads_from_start: bool) -> None:
        """Let the parts run once this process leads, on all that the former leader wrote."""
        # A LIST that began before this process led may lack the last admissions of that leader.
        if not leads_from_start:
            await self._leading.wait()
            lists = [
                informer.list_if_served()
                for informer in self.informers.values()
                # a kind that is not there is no reason to wait
                if not informer.is_missing_kind
            ]
            await asyncio.gather(*lists)
        for job in self._caches.grpojobs:
            if end := repeated_end_event(job, self._wall()):
                self._recorder.record(job.key, end)
        self._works_since = self._clock()
        self.working.set()
        self._add(job.key for job in self._caches.grpojobs)

    def relist_callbacks(self) -> dict[str, Callable[[], None]]:
        """What makes the GRPOJobs of a URL path be listed again."""
        callbacks: dict[str, Callable[[], None]] = {}
        for namespace in self.settings.namespaces or (None,):
            path = GRPOJOBS.path(namespace)
            informer = self.informers[f"{GRPOJOBS.plural}/{namespace or '*'}"]
            callbacks[path] = informer.request_list
        return callbacks

    async def grpojobs_served(self, doubted: bool) -> None:
        """Waits until the API server gives a LIST of GRPOJobs, in one of the namespaces at least,
        and discovers them.

        The last LIST that was tried counts, unless it is `doubted`. kopf finds kinds by discovery,
        once.
        """
        informers = [
            informer
            for name, informer in self.informers.items()
            if name.startswith(GRPOJOBS.plural)
        ]
        if doubted or all(informer.not_served for informer in informers):
            lists = [asyncio.create_task(informer.list_until_served()) for informer in informers]
            await until_one_ends(*lists)
        backoff = Backoff()
        while not await self._is_discovered():
            await backoff.wait()

    async def _is_discovered(self) -> bool:
        try:
            return await self._cluster.is_discovered(GRPOJOBS)
        except ClusterError as error:
            log.info("%s; trying again", error)
            return False

    async def watch(self, registry: kopf.OperatorRegistry, stop: threading.Event | None) -> None:
        """Watch GRPOJobs, once all else runs: at its end kopf cancels all tasks younger than it."""
        await self.warm.wait()
        await handlers.watch(
            registry,
            self.settings.namespaces,
            served=self.grpojobs_served,
            ready=self.kopf_ready,
            stop=stop,
        )

    def unready(self) -> str:
        """What is still missing before the first job can be worked on."""
        unsettled = [
            name for name, informer in self.informers.items() if not informer.settled.is_set()
        ]
        if unsettled:
            names = ", ".join(unsettled)
            return f"not listed yet: {names}"
        return "" if self.kopf_ready.is_set() else "kopf is starting"

    def not_served(self) -> str:
        """What the API server does not serve now."""
        return metrics_server.not_served(self._watched_informers())

    def unhealthy(self) -> str:
        """Which watch has gone deaf."""
        longest_silence = max(DEAF_SECONDS, 2 * self.settings.resync)
        return metrics_server.silent_watches_message(
            self._watched_informers(), self._clock(), longest_silence
        )

    def last_update_times(self) -> dict[str, float]:
        """By kind of object, the unix time in seconds of the last LIST, event or bookmark."""
        return metrics_server.last_update_times(
            self._watched_informers(), self._clock(), self._wall()
        )

    def _watched_informers(self) -> dict[str, Informer[Any]]:
        return self.informers | self.facts.informers()

    def leads(self) -> dict[str, float]:
        """Return 1 if this operator works, else 0, as a metric without labels."""
        return {"": float(self.working.is_set())}

    def failover_seconds(self, free_since: float | None) -> dict[str, float]:
        """How long after that moment it took the place of the one before; nothing before it has."""
        if self._works_since is None or free_since is None:
            return {}
        return {"": self._works_since - free_since}

    def own_jobs(self) -> Iterable[GRPOJobRecord]:
        """The jobs that this operator exports; none for a follower, for the leader does."""
        return self._caches.grpojobs if self.working.is_set() else ()

    def live_samples(self, job: GRPOJobRecord) -> Iterable[Sample]:
        """The samples of a job that change while its object doesn't."""
        pull = self._puller.pull(job)
        silence = self._puller.silence(job)

        def unix_time(at: Observed) -> float:
            seconds_since = self._clock() - at.at
            return self._wall() - seconds_since

        yield from progress_samples(job, pull, silence, unix_time)
        yield from pod_samples(job, self._caches.pods.owned_by(job.key))
        yield from failure_samples(self._queue.failures(job.key))


async def until_one_ends(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first task to end, cancel the others, and raise the error of the first."""
    ended_tasks, running_tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in running_tasks:
        task.cancel()
    await asyncio.gather(*running_tasks, return_exceptions=True)
    for task in ended_tasks:
        task.result()
