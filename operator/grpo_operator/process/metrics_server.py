"""Serves /healthz, /readyz and /metrics, and counts what status writes add to the metrics of all
jobs.

kopf's own liveness endpoint only proves that its loop runs. Here, health follows from the watches:
which are not served, which are silent, and which objects can't be read. The metrics, /readyz and
/healthz use the same functions, so that they never disagree.

prometheus_client renders the operator's own metrics, which are few. It would take 10 ms per
thousand series and block the event loop meanwhile, so the jobs' metrics arrive here as text.

Times to a milestone and reasons of restarts are counted by the process that wrote the status, once
the API server has accepted it. So a restarted operator counts nothing twice. Its counters begin at
0, which Prometheus recognises as a reset.
"""

import asyncio
import contextlib
from collections import Counter as Tally
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from grpo_api.report.metrics import (
    ACTIVE_WORKERS,
    API_REQUESTS,
    BUILD_INFO,
    CONTROLLER,
    EVENTS,
    LOOP_LAG,
    LOSSES,
    MAX_WORKERS,
    PROGRESS_PULLS,
    QUEUE_ADDS,
    QUEUE_DEPTH,
    QUEUE_LONGEST,
    QUEUE_RETRIES,
    QUEUE_SECONDS,
    RECONCILE_SECONDS,
    RECONCILES,
    RESTARTS,
    SPANS,
    TIME_TO_ADMITTED,
    TIME_TO_FIRST_STEP,
    TIME_TO_RUNNING,
    TIME_TO_SCHEDULED,
    TIMES_TO,
    Metric,
)
from grpo_api.report.report import Result
from grpo_api.status.status import ConditionType, GRPOJobStatus
from grpo_kube.cache import Quarantine
from grpo_kube.informer import Informer
from grpo_kube.objects.errors import ConfigurationError
from grpo_kube.work_queue import WorkObserver, WorkQueue

from ..records.records import GRPOJobRecord

VERSION = version("grpo-operator")
BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_BUCKETS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
"""For what may take as long as a queue is."""
LAG_PERIOD = 0.05
"""Seconds between two timers that measure the event loop's lag: the shortest one seen."""

ByLabel = Callable[[], Mapping[str, float]]
"""The values of a family by its one label, as they are now."""


class NowCollector(Collector):
    """Families that are read at the time of the scrape."""

    def __init__(self, families: Mapping[Metric, ByLabel]) -> None:
        """`families` gives each family's values."""
        self._families = families

    def collect(self) -> Iterator[Family]:
        """One sample per label."""
        for metric, values in self._families.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for label, value in values().items():
                family.add_metric([label], value)
            yield family


class Metrics(WorkObserver):
    """The operator's own counters and times."""

    def __init__(self, queue: WorkQueue, workers: int) -> None:
        """Register the families for this queue; `workers` is the number of its workers."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.export_families(
            {
                BUILD_INFO: lambda: {VERSION: 1},
                ACTIVE_WORKERS: lambda: {CONTROLLER: queue.active},
                MAX_WORKERS: lambda: {CONTROLLER: workers},
                QUEUE_DEPTH: lambda: {CONTROLLER: len(queue)},
                QUEUE_ADDS: lambda: {CONTROLLER: queue.adds},
                QUEUE_RETRIES: lambda: {CONTROLLER: queue.retries},
                QUEUE_LONGEST: lambda: {CONTROLLER: queue.longest},
            }
        )
        self._reconciles = self._counter(RECONCILES)
        self._requests = self._counter(API_REQUESTS)
        self._pulls = self._counter(PROGRESS_PULLS)
        self._events = self._counter(EVENTS)
        self._spans = self._counter(SPANS)
        self._restarts = self._counter(RESTARTS)
        # The first restart for a reason, or loss, is an increase only from 0.
        for reason in Result:
            self._restarts.labels(reason.value)
        for counter, result in product((self._events, self._spans), LOSSES):
            counter.labels(result)
        self._seconds = self._histogram(RECONCILE_SECONDS).labels(CONTROLLER)
        self._waited = self._histogram(QUEUE_SECONDS).labels(CONTROLLER)
        self._lag = self._histogram(LOOP_LAG)
        self._times_to = {metric: self._histogram(metric, LONG_BUCKETS) for metric in TIMES_TO}

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric, buckets: Sequence[float] = BUCKETS) -> Histogram:
        return Histogram(
            metric.name, metric.help, metric.labels, registry=self.registry, buckets=buckets
        )

    def export_families(self, families: Mapping[Metric, ByLabel]) -> None:
        """Exports these, too: what their functions give at the time of each scrape."""
        self.registry.register(NowCollector(families))

    def record_wait(self, seconds: float) -> None:
        """See WorkObserver."""
        self._waited.observe(seconds)

    def record_reconcile(self, seconds: float, result: str) -> None:
        """See WorkObserver."""
        self._seconds.observe(seconds)
        self._reconciles.labels(CONTROLLER, result).inc()

    def record_status_write(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        """Count what a status write means, once it has been taken; `now` in unix seconds."""
        for metric, seconds in milestones(job, new, now):
            self._times_to[metric].observe(seconds)
        if reason := restart_reason(job, new):
            self._restarts.labels(reason).inc()

    def record_request(self, verb: str, resource: str, code: int) -> None:
        """Counts a request to the API server."""
        self._requests.labels(verb, resource, str(code)).inc()

    def record_pull(self, result: str) -> None:
        """Counts a pull of a job's progress."""
        self._pulls.labels(result).inc()

    def record_event(self, result: str) -> None:
        """Counts an event on a GRPOJob."""
        self._events.labels(result).inc()

    def record_spans(self, result: str, spans: int) -> None:
        """Counts spans of traces."""
        self._spans.labels(result).inc(spans)

    async def follow_lag(self) -> None:
        """Measures how late the event loop is, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            self._lag.observe(max(0.0, clock() - due))


Check = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""


Text = Callable[[], Awaitable[str]]


def application(
    registry: CollectorRegistry, jobs: Text, healthy: Check, ready: Check, detail: Check
) -> web.Application:
    """The three pages; a check that complains answers 503 with its sentence. `detail` is only shown
    beside it.

    `jobs` writes the jobs' metrics, those of the registry follow.
    """

    async def metrics(_: web.Request) -> web.Response:
        text = (await jobs()).encode(
            errors="replace"
        )  # what is not Unicode in a label would cost the whole page
        body = text + generate_latest(registry)
        return web.Response(
            body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def probe_handler(check: Check) -> Callable[[web.Request], Any]:
        async def answer(_: web.Request) -> web.Response:
            problem = check()
            text = "\n".join(filter(None, (problem or "ok", detail())))
            return web.Response(text=text, status=503 if problem else 200)

        return answer

    pages = web.Application()
    pages.router.add_get("/metrics", metrics)
    pages.router.add_get("/healthz", probe_handler(healthy))
    pages.router.add_get("/readyz", probe_handler(ready))
    return pages


@contextlib.asynccontextmanager
async def serve_pages(pages: web.Application, address: str, port: int) -> AsyncIterator[None]:
    """Serves the pages while the block runs; without an address on every one of the machine, of
    both families.

    Raises:
        ConfigurationError: the port is taken.
    """
    runner = web.AppRunner(pages, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address or None, port).start()
        except OSError as error:
            raise ConfigurationError(f"--metrics-port {port}: {error}") from error
        yield
    finally:
        await runner.cleanup()


Informers = Mapping[str, Informer[Any]]
"""By kind and namespace, such as `pods/*`."""


def not_served(informers: Informers) -> str:
    """What the API server does not serve now: a detail, and no reason to be unready."""
    lines: list[str] = []
    for name, informer in informers.items():
        # a cluster may well lack an optional kind, but a missing right to see it is a mistake
        matters = informer.forbidden or not informer.optional
        if informer.not_served and matters:
            lines.append(f"not served now: {name}: {informer.not_served}")
    return "\n".join(lines)


def silent_watches_message(informers: Informers, now: float, limit: float) -> str:
    """Return a sentence that names the watches without a LIST, event or bookmark for `limit`
    seconds; empty if none.

    A watch that is not served is left out: it is being retried, and a restart would not help. `now`
    is the event loop's time, as are the informers' times.
    """
    names: list[str] = []
    for name, informer in informers.items():
        if informer.heard_at is not None and now - informer.heard_at > limit:
            names.append(name)
    return f"nothing received for {limit:.0f} s from: {', '.join(names)}" if names else ""


def last_update_times(informers: Informers, now: float, unix: float) -> dict[str, float]:
    """Return, by kind, the unix time in seconds of the last LIST, event or bookmark.

    Of several namespaces the oldest time counts. `now` and `unix` are the same moment on the two
    clocks.
    """
    times: dict[str, float] = {}
    for name, informer in informers.items():
        kind = name.partition("/")[0]
        if informer.heard_at is not None:
            times[kind] = min(times.get(kind, unix), unix - (now - informer.heard_at))
    return times


def unreadable(*sources: Quarantine) -> Tally[str]:
    """How many objects can't be read, by kind, from all sources."""
    total: Tally[str] = Tally()
    for source in sources:
        total.update(source.counts())
    return total


MEMORY_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")
"""Where a container reads its own limit (cgroup v2); `max` means no limit."""


def memory_limit(file: Path = MEMORY_LIMIT_FILE) -> dict[str, float]:
    """The container's memory limit in bytes, as a metric without labels; empty without one."""
    try:
        text = file.read_text().strip()
    except OSError:
        return {}
    return {"": float(text)} if text.isdecimal() else {}


_BY_CONDITION = {
    ConditionType.ADMITTED: TIME_TO_ADMITTED,
    ConditionType.SCHEDULED: TIME_TO_SCHEDULED,
    ConditionType.RUNNING: TIME_TO_RUNNING,
}


def milestones(
    job: GRPOJobRecord, new: GRPOJobStatus, now: float
) -> Iterator[tuple[Metric, float]]:
    """The histograms that a write of the new status over the job's adds to, each with seconds since
    its creation.

    Only the first attempt has them, and only until it is interrupted: later ones began long after
    the job.
    """
    old = job.status
    if new.attempt != 1 or old.active_seconds:
        return
    since = max(0.0, now - job.created)  # the API server's clock may be ahead of ours
    for kind, metric in _BY_CONDITION.items():
        if new.is_true(kind) and not old.is_true(kind):
            yield metric, since
    if _has_stepped(new) and not _has_stepped(old):
        yield TIME_TO_FIRST_STEP, since


def restart_reason(job: GRPOJobRecord, new: GRPOJobStatus) -> str | None:
    """Return how the last attempt ended if the new status restarts the job; None if it doesn't."""
    old = job.status
    before = old.restarts + old.uncounted_restarts
    after = new.restarts + new.uncounted_restarts
    if after <= before or not new.ends:
        return None
    return new.ends[-1].reason


def _has_stepped(status: GRPOJobStatus) -> bool:
    return status.progress is not None and status.progress.last_step_time is not None
