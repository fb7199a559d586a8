"""The operator's own HTTP server: /healthz, /readyz and /metrics.

kopf's own liveness endpoint only proves that its loop turns. The operator's own metrics are few and prometheus_client
writes them; the jobs' come as text, for it would take 10 ms per thousand series and hold everybody up.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_api.metrics import (
    API_REQUESTS,
    EVENTS,
    LOOP_LAG,
    PROGRESS_PULLS,
    QUEUE_DEPTH,
    QUEUE_SECONDS,
    RECONCILE_SECONDS,
    RECONCILES,
    UNREADABLE_OBJECTS,
)
from grpo_api.metrics import Metric as Declared

from .errors import ConfigurationError
from .workqueue import Observer

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAG_PERIOD = 0.05
"""Seconds between two timers that tell how late the event loop is: shorter waits go unseen."""


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

    def __init__(self, depth: Callable[[], int], unreadable: Callable[[], Mapping[str, int]]) -> None:
        """At scrape time: the length of the work queue, the unreadable objects by kind."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(UnreadableCollector(unreadable))
        self._reconciles = self._counter(RECONCILES)
        self._requests = self._counter(API_REQUESTS)
        self._pulls = self._counter(PROGRESS_PULLS)
        self._events = self._counter(EVENTS)
        self._seconds = self._histogram(RECONCILE_SECONDS)
        self._waited = self._histogram(QUEUE_SECONDS)
        self._lag = self._histogram(LOOP_LAG)
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

    async def follow_lag(self) -> None:
        """Measures how late the event loop is, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            self._lag.observe(max(0.0, clock() - due))


Check = Callable[[], str]
"""Says what is wrong; empty when all is well."""


Text = Callable[[], Awaitable[str]]


def application(
    registry: CollectorRegistry, jobs: Text, healthy: Check, ready: Check, detail: Check
) -> web.Application:
    """The three pages; a check that complains answers 503 with its sentence. `detail` is only shown beside it.

    `jobs` writes the jobs' metrics, those of the registry follow.
    """

    async def metrics(_: web.Request) -> web.Response:
        text = (await jobs()).encode(errors="replace")  # what is not Unicode in a label would cost the whole page
        body = text + generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

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


@contextlib.asynccontextmanager
async def served(pages: web.Application, address: str, port: int) -> AsyncIterator[None]:
    """Serves the pages while the block runs; without an address on every one of the machine, of both families.

    Raises:
        ConfigurationError: the port is taken.
    """
    runner = web.AppRunner(pages, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address or None, port).start()
        yield
    except OSError as error:
        raise ConfigurationError(f"--metrics-port {port}: {error}") from error
    finally:
        await runner.cleanup()
