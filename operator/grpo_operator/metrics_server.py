"""The operator's own HTTP server: /healthz, /readyz and /metrics.

kopf's own liveness endpoint only proves that its loop turns. Job metrics are computed from the cache at scrape time, so
that a deleted job's series are gone at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_api.metrics import (
    API_REQUESTS,
    EVENTS,
    JOB,
    JOB_ATTEMPTS,
    JOB_CONDITION,
    JOB_INFO,
    JOB_MEMORY_MEASURED,
    JOB_MEMORY_PREDICTED,
    JOB_MEMORY_RATIO,
    JOB_PHASE,
    JOB_RESTARTS,
    JOB_STEP,
    PROGRESS_PULLS,
    QUEUE_DEPTH,
    QUEUE_SECONDS,
    RECONCILE_SECONDS,
    RECONCILES,
    UNREADABLE_OBJECTS,
)
from grpo_api.metrics import Metric as Declared
from grpo_api.status import Phase

from .records import GRPOJobRecord
from .workqueue import Observer

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class JobCollector(Collector):
    """The grpo_job_* families, from the GRPOJobs in the cache."""

    def __init__(self, jobs: Callable[[], Iterable[GRPOJobRecord]]) -> None:
        """`jobs` gives the cache's content at scrape time."""
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """One sample per job, condition or phase."""
        families = {one.name: GaugeMetricFamily(one.name, one.help, labels=one.labels) for one in JOB}

        def add(metric: Declared, labels: Iterable[str], value: float) -> None:
            families[metric.name].add_metric(list(labels), value)

        for job in self._jobs():
            _job_samples(job, add)
        yield from families.values()


def _job_samples(job: GRPOJobRecord, add: Callable[[Declared, Iterable[str], float], None]) -> None:
    status, plan, who = job.status, job.status.plan, job.key
    model = plan.parameters if plan else ""
    add(JOB_INFO, (*who, model, plan.strategy if plan else "", str(plan.gpus) if plan else ""), 1)
    for condition in status.conditions:
        add(JOB_CONDITION, (*who, condition.type), float(condition.status == "True"))
    for phase in Phase:
        add(JOB_PHASE, (*who, phase), float(status.phase == phase))
    add(JOB_ATTEMPTS, who, status.attempt)
    add(JOB_RESTARTS, who, status.restarts)
    if status.progress:
        add(JOB_STEP, who, status.progress.step)
    if plan and plan.memory:
        for name, size in plan.memory.phases.model_dump().items():
            add(JOB_MEMORY_PREDICTED, (*who, name), size)
    if status.memory:
        add(JOB_MEMORY_RATIO, who, float(status.memory.ratio))
        for name, memory in status.memory.phases.items():
            add(JOB_MEMORY_MEASURED, (*who, name), memory.measured_bytes)


class UnreadableCollector(Collector):
    """How many objects are set aside, by kind."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """`counts` gives them at scrape time, by plural name of the kind."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """One sample per kind."""
        family = GaugeMetricFamily(UNREADABLE_OBJECTS.name, UNREADABLE_OBJECTS.help, labels=UNREADABLE_OBJECTS.labels)
        for resource, count in self._counts().items():
            family.add_metric([resource], count)
        yield family


class Metrics(Observer):
    """The operator's own counters and times."""

    def __init__(
        self,
        jobs: Callable[[], Iterable[GRPOJobRecord]],
        depth: Callable[[], int],
        unreadable: Callable[[], Mapping[str, int]],
    ) -> None:
        """All at scrape time: the cached GRPOJobs, the length of the work queue, the unreadable objects by kind."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(JobCollector(jobs))
        self.registry.register(UnreadableCollector(unreadable))
        self._reconciles = self._counter(RECONCILES)
        self._requests = self._counter(API_REQUESTS)
        self._pulls = self._counter(PROGRESS_PULLS)
        self._events = self._counter(EVENTS)
        self._seconds = self._histogram(RECONCILE_SECONDS)
        self._waited = self._histogram(QUEUE_SECONDS)
        Gauge(QUEUE_DEPTH.name, QUEUE_DEPTH.help, registry=self.registry).set_function(depth)

    def _counter(self, metric: Declared) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Declared) -> Histogram:
        return Histogram(metric.name, metric.help, registry=self.registry, buckets=BUCKETS)

    def waited(self, seconds: float) -> None:
        """See Observer."""
        self._waited.observe(seconds)

    def worked(self, seconds: float, result: str) -> None:
        """See Observer."""
        self._seconds.observe(seconds)
        self._reconciles.labels(result).inc()

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Counts a request to the API server."""
        self._requests.labels(verb, resource, str(code)).inc()

    def pulled(self, result: str) -> None:
        """Counts a pull of a job's progress."""
        self._pulls.labels(result).inc()

    def told(self, result: str) -> None:
        """Counts an event on a GRPOJob."""
        self._events.labels(result).inc()


Check = Callable[[], str]
"""Says what is wrong; empty when all is well."""


def application(registry: CollectorRegistry, healthy: Check, ready: Check, detail: Check) -> web.Application:
    """The three pages; a check that complains answers 503 with its sentence. `detail` is only shown beside it."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    def checked(check: Check) -> Callable[[web.Request], Any]:
        async def answer(_: web.Request) -> web.Response:
            problem = check()
            text = "\n".join(filter(None, (problem or "ok", detail())))
            return web.Response(text=text, status=503 if problem else 200)

        return answer

    pages = web.Application()
    pages.router.add_get("/metrics", metrics)
    pages.router.add_get("/healthz", checked(healthy))
    pages.router.add_get("/readyz", checked(ready))
    return pages
