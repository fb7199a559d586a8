"""`python -m grpo_operator`: wires the parts together and runs them until SIGTERM.

kopf handles signals and its own end; when it stops, everything else is cancelled. A part of ours that dies takes the
process down, and the kubelet starts a clean one; so no part may die of what the cluster contains.
"""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import aiohttp
import kopf

from grpo_api.metrics import HEARD, UNREADABLE_OBJECTS
from grpo_api.status import GRPOJobStatus

from . import handlers, health, logs, settings
from .admission.queue import AdmissionQueue
from .cluster import credentials
from .cluster.api import GRPOJOBS, JOBS, PODS, SERVICES, Resource, Selection
from .cluster.backoff import Backoff
from .cluster.cache import Cache, Caches
from .cluster.client import HttpCluster
from .cluster.exporter import SpanExporter
from .cluster.facts import ClusterFacts
from .cluster.gangs import Gangs
from .cluster.progress import ProgressPuller, http_fetch, targets
from .cluster.recorder import EventRecorder
from .cluster.unreadable import Teller
from .cluster.watcher import Mirror
from .errors import ClusterError, ConfigurationError
from .job_metrics import JobMetrics, Sample, standing
from .metrics_server import VERSION, Metrics, application, served
from .names import COMPONENT_RENDEZVOUS, LABEL_COMPONENT, LABEL_JOB, ObjectKey
from .reconcile import Reconciler
from .records import GRPOJobRecord
from .tasks import until_one_ends
from .times import Observed
from .tracing.attempts import AttemptTraces
from .workqueue import WorkQueue, work

log = logging.getLogger("grpo_operator")

GENERATIONS = (5_000, 10, 100)
"""Thresholds of the garbage collector, with which it looks at old objects a hundredth as often as by default."""
DEAF_SECONDS = 240.0
"""Without a LIST, an event or a bookmark of some kind for this long, the process is of no use."""


class Operator:
    """One operator process: its caches, its queue and everything that fills and drains them."""

    def __init__(
        self,
        chosen: settings.Settings,
        cluster: HttpCluster,
        *,
        caches: Caches,
        queue: WorkQueue,
        metrics: Metrics,
        session: aiohttp.ClientSession,
    ) -> None:
        """Puts the parts together; nothing runs yet."""
        self.settings = chosen
        self._cluster = cluster
        self._caches = caches
        self._queue = queue
        self._metrics = metrics
        self._recorder = EventRecorder(cluster, lambda: len(queue) > 0, metrics.told)
        self._teller = Teller(cluster, caches.unreadables)
        self.mirrors = self._mirrors(cluster)
        self.working = asyncio.Event()
        """Set once the caches are full and the workers run."""
        self.kopf_ready = asyncio.Event()
        self._exporter: SpanExporter | None = None
        self._traces: AttemptTraces | None = None
        if tracing := chosen.tracing:
            self._exporter = SpanExporter(session, tracing.endpoint, tracing.headers, metrics.exported)
            self._traces = AttemptTraces(self._exporter.put, every=tracing.every, version=VERSION)
        fetch = http_fetch(session, trace_every=tracing.every if tracing else None)
        asked = partial(targets, caches.grpojobs, caches.pods.of)
        self._puller = ProgressPuller(asked, fetch, self._progressed, chosen.progress_interval, metrics.pulled)
        served, prices = chosen.namespaces, chosen.gpu_hour_prices
        self.facts = ClusterFacts(cluster, self._facts_changed, namespaces=served, prices=prices, resync=chosen.resync)
        self._admission = AdmissionQueue(
            Gangs(caches, time.time, chosen.limits.scheduling),
            self.facts,
            queue.add_all,
            limits=chosen.limits,
            clock=time.time,
            default_image=chosen.trainer_image,
        )
        self._reconcile = Reconciler(
            cluster,
            caches,
            self._admission,
            self._wrote,
            limits=chosen.limits,
            clock=time.time,
            monotonic=lambda: Observed(time.monotonic()),
            image=chosen.trainer_image,
            rank0=self._puller,
            traces=self._traces,
            status_interval=chosen.status_interval,
        )

    def _mirrors(self, cluster: HttpCluster) -> dict[str, Mirror[Any]]:
        """A mirror per kind and namespace."""
        ours, shared = LABEL_JOB, f"{LABEL_COMPONENT}={COMPONENT_RENDEZVOUS}"
        kinds: tuple[tuple[Resource, str, Cache[Any], Callable[[Iterable[ObjectKey]], None]], ...] = (
            (JOBS, ours, self._caches.jobs, self._add),
            (PODS, ours, self._caches.pods, self._add),
            (SERVICES, shared, self._caches.services, self._add_namespaces),
            (GRPOJOBS, "", self._caches.grpojobs, self._add),
        )
        return {
            f"{resource.plural}/{namespace or '*'}": Mirror(
                cluster, Selection(resource, namespace, labels), cache, changed, resync=self.settings.resync
            )
            for namespace in self.settings.namespaces or (None,)
            for resource, labels, cache, changed in kinds
        }

    def _add(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._queue.add(key, slow=self._caches.quiet(key))

    def _wrote(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        """The API server has taken a status: events, metrics and traces follow."""
        self._recorder.record(job, job.status.conditions, new.conditions, now, new)
        self._metrics.wrote(job, new, now)
        if self._traces:
            self._traces.wrote(job, new, now)

    def _facts_changed(self) -> None:
        self._admission.wake()

    def _progressed(self, key: ObjectKey) -> None:
        self._queue.add(key, slow=True)

    def _add_namespaces(self, keys: Iterable[ObjectKey]) -> None:
        """A Service came or went: its namespace's active jobs need it."""
        namespaces = {key.namespace for key in keys}
        self._add(job.key for job in self._caches.grpojobs if job.active and job.key.namespace in namespaces)

    async def run(self, filled: Callable[[], None]) -> None:
        """Fills the caches by full LISTs, says so, then works, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, mirror in self.mirrors.items():
                # kopf delivers the events of GRPOJobs
                follow = mirror.relist_forever() if name.startswith(GRPOJOBS.plural) else mirror.follow()
                tasks.create_task(follow, name=name)
            tasks.create_task(self.facts.run(), name="facts")
            for mirror in self.mirrors.values():
                await mirror.settled.wait()
            filled()
            tasks.create_task(self._metrics.follow_lag(), name="lag")
            tasks.create_task(self._recorder.run(), name="events")
            tasks.create_task(self._teller.run(), name="unreadable")
            tasks.create_task(self._puller.run(), name="progress")
            if self._exporter:
                tasks.create_task(self._exporter.run(), name="spans")
            tasks.create_task(self._admission.run(), name="admission")
            for number in range(self.settings.workers):
                tasks.create_task(work(self._queue, self._reconcile, self._metrics), name=f"worker-{number}")
            self.working.set()

    def listed(self) -> dict[str, Callable[[], None]]:
        """What makes the GRPOJobs of a URL path be listed again."""
        return {
            GRPOJOBS.path(namespace): self.mirrors[f"{GRPOJOBS.plural}/{namespace or '*'}"].want_list
            for namespace in self.settings.namespaces or (None,)
        }

    async def grpojobs_served(self, doubted: bool) -> None:
        """Waits until the API server gives a LIST of GRPOJobs, in one of the namespaces at least, and discovers them.

        The last LIST that was tried counts, unless it is `doubted`. kopf finds kinds by discovery, once.
        """
        mirrors = [mirror for name, mirror in self.mirrors.items() if name.startswith(GRPOJOBS.plural)]
        if doubted or all(mirror.not_served for mirror in mirrors):
            await until_one_ends(*(asyncio.create_task(mirror.list_until_served()) for mirror in mirrors))
        backoff = Backoff()
        while not await self._discovered():
            await backoff.wait()

    async def _discovered(self) -> bool:
        try:
            return await self._cluster.discovers(GRPOJOBS)
        except ClusterError as error:
            log.info("%s; trying again", error)
            return False

    async def watch(self, registry: kopf.OperatorRegistry, stop: threading.Event | None, told: asyncio.Event) -> None:
        """Has GRPOJobs watched, once everything of ours runs: at its end kopf waits for all tasks younger than itself.

        `told` is set by SIGTERM and SIGINT while kopf is not there to hear them.
        """
        handlers.listen(told)
        await self.working.wait()
        await handlers.watch(
            registry,
            self.settings.namespaces,
            served=self.grpojobs_served,
            ready=self.kopf_ready,
            stop=stop,
            told=told,
        )

    def unready(self) -> str:
        """What is still missing before the first job can be worked on."""
        waiting = [name for name, mirror in self.mirrors.items() if not mirror.settled.is_set()]
        if waiting:
            return f"not listed yet: {', '.join(waiting)}"
        return "" if self.kopf_ready.is_set() else "kopf is starting"

    def not_served(self) -> str:
        """What the API server does not serve now."""
        return health.not_served(self._watched())

    def unhealthy(self) -> str:
        """Which watch has gone deaf."""
        return health.deaf(self._watched(), time.monotonic(), max(DEAF_SECONDS, 2 * self.settings.resync))

    def heard(self) -> dict[str, float]:
        """When each kind of object was last heard of, in unix seconds."""
        return health.heard(self._watched(), time.monotonic(), time.time())

    def _watched(self) -> dict[str, Mirror[Any]]:
        return self.mirrors | self.facts.mirrors()

    def standing(self, job: GRPOJobRecord) -> Iterable[Sample]:
        """See job_metrics.standing."""
        pull, silence = self._puller.pull(job.key), self._puller.silence(job.key)
        return standing(job, pull, silence, lambda at: time.time() - (time.monotonic() - at.at))


async def run(
    chosen: settings.Settings, stop: threading.Event | None = None, filled: Callable[[], None] = lambda: None
) -> None:
    """The whole process, from login to SIGTERM, or until `stop` is set by another thread.

    `filled` is called once the caches are full.
    """
    configuration = await credentials.load(chosen.kubeconfig)
    caches, queue, told = Caches(), WorkQueue(), asyncio.Event()
    metrics = Metrics(queue, chosen.workers)
    # the lanes of the progress puller bound its connections; one bound for all would make a lane wait for another
    pods = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        HttpCluster(configuration, metrics.requested) as cluster,
        aiohttp.ClientSession(connector=pods) as session,
    ):
        operator = Operator(chosen, cluster, caches=caches, queue=queue, metrics=metrics, session=session)
        unreadables = caches.unreadables, operator.facts.unreadables
        metrics.read({HEARD: operator.heard, UNREADABLE_OBJECTS: lambda: health.unreadable(*unreadables)})
        jobs = JobMetrics(lambda: caches.grpojobs, time.time, operator.standing)
        pages = application(metrics.registry, jobs.text, operator.unhealthy, operator.unready, operator.not_served)
        async with served(pages, chosen.metrics_address, chosen.metrics_port):
            log.info("watching %s", ", ".join(chosen.namespaces) or "all namespaces")
            ours = asyncio.create_task(operator.run(filled), name="operator")
            watched = handlers.registry(caches, queue, configuration, operator.listed())
            kopfs = asyncio.create_task(operator.watch(watched, stop, told))
            await until_one_ends(kopfs, ours, asyncio.create_task(told.wait(), name="signals"))
            queue.close()
    log.info("stopped")


def main() -> int:
    """Runs the operator; 0 after SIGTERM, 2 for settings that can't work."""
    chosen = settings.parse()
    logs.configure(chosen.log_format, chosen.log_level)
    # a full collection of ten thousand jobs' records holds everybody up for 100 ms and finds nothing: what is there
    # once the caches are full is left out of them, and they come seldom
    gc.set_threshold(*GENERATIONS)
    try:
        asyncio.run(run(chosen, filled=gc.freeze))
    except ConfigurationError as error:
        # the sentence says it all; a traceback would hide it
        log.critical("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
