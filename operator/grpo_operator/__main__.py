"""`python -m grpo_operator`: runs one operator process until SIGTERM, or until another leads in its
place.

kopf handles its own end; when it stops, everything else is cancelled. A part of ours that dies
takes the process down, and the kubelet starts a clean one. So no part may die of what the cluster
contains.
"""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any

import aiohttp
from kubernetes.aio.client import Configuration

from grpo_api.report.metrics import HEARD, LEADER, MEMORY_LIMIT, TAKEOVER, UNREADABLE_OBJECTS
from grpo_kube import transport
from grpo_kube.client import Client
from grpo_kube.leader_election import Elector
from grpo_kube.objects.errors import ConfigurationError, LeadershipLost
from grpo_kube.work_queue import WorkQueue

from .loop.caches import Caches
from .process import handlers, metrics_server, settings
from .process.fence import record_leader
from .process.job_metrics import JobMetrics
from .process.metrics_server import Metrics, application, serve_pages
from .process.wiring import Operator, until_one_ends
from .records.names import FENCE, MANAGER

log = logging.getLogger("grpo_operator")

GENERATIONS = (5_000, 10, 100)
"""Thresholds of the garbage collector: old objects are examined a hundredth as often."""


async def run(
    chosen: settings.Settings,
    stop: threading.Event | None = None,
    filled: Callable[[], None] = lambda: None,
    *,
    wall: Callable[[], float] = time.time,
) -> None:
    """The whole process, from login to SIGTERM, or until `stop` is set by another thread.

    `filled` is called once the caches are full; `wall` gives unix seconds.
    """
    asyncio.get_running_loop().set_exception_handler(handlers.log_loop_error)
    configuration = await transport.load(chosen.kubeconfig)
    caches = Caches()
    queue = WorkQueue()
    ending = asyncio.Event()
    leading = asyncio.Event()
    metrics = Metrics(queue, chosen.workers)
    # the lanes of the progress puller bound its connections; one bound for all would make a lane
    # wait for another
    pods = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(connector=pods) as session,
        AsyncExitStack() as after_release,
        _leader_elector(chosen, configuration, metrics, leading, wall) as elector,
        _client(
            configuration, metrics, gate=elector.answer_within if elector else lambda: inf
        ) as cluster,
    ):
        operator = Operator(
            chosen,
            cluster,
            caches=caches,
            queue=queue,
            metrics=metrics,
            session=session,
            leading=leading,
            wall=wall,
        )
        # A collector that does not answer must not delay the next leader.
        after_release.push_async_callback(operator.flush_spans)
        unreadables = caches.quarantine, operator.facts.quarantine
        free_since = elector.free_since if elector else lambda: None
        metrics.export_families(
            {
                HEARD: operator.last_update_times,
                UNREADABLE_OBJECTS: lambda: metrics_server.unreadable(*unreadables),
                MEMORY_LIMIT: metrics_server.memory_limit,
                LEADER: operator.leads,
                TAKEOVER: lambda: operator.failover_seconds(free_since()),
            }
        )
        jobs = JobMetrics(operator.own_jobs, wall, operator.live_samples)
        pages = application(
            metrics.registry, jobs.text, operator.unhealthy, operator.unready, operator.not_served
        )
        async with serve_pages(pages, chosen.metrics_address, chosen.metrics_port):
            served = ", ".join(chosen.namespaces) or "all namespaces"
            log.info("watching %s", served)
            tasks: list[asyncio.Task[Any]] = []
            if elector:
                tasks.append(asyncio.create_task(elector.run(), name="elector"))
            tasks.append(asyncio.create_task(operator.run(filled), name="operator"))
            relist_callbacks = operator.relist_callbacks()
            registry = handlers.registry(
                caches, operator.add, configuration, relist_callbacks, ending
            )
            handlers.listen(ending)
            tasks.append(asyncio.create_task(operator.watch(registry, stop), name="kopf"))
            tasks.append(asyncio.create_task(ending.wait(), name="signals"))
            await until_one_ends(*tasks)
            queue.close()
    log.info("stopped")


def _client(configuration: Configuration, metrics: Metrics, **chosen: Any) -> Client:
    """The operator's client of the API server; `chosen` are further arguments of Client."""
    # the fence is updated a moment after the Lease: what a former leader writes until then follows
    # from no decision of a leader
    return Client(
        configuration,
        metrics.record_request,
        try_again=lambda message: FENCE in message,
        user_agent=MANAGER,
        **chosen,
    )


@asynccontextmanager
async def _leader_elector(
    chosen: settings.Settings,
    configuration: Configuration,
    metrics: Metrics,
    leading: asyncio.Event,
    wall: Callable[[], float],
) -> AsyncIterator[Elector | None]:
    """The elector, which releases its Lease in the end; None if this process leads by itself."""
    election = chosen.election
    if election is None:
        leading.set()
        yield None
        return
    patience = election.terms.deadline / 2
    fence = record_leader if chosen.fenced else None
    async with _client(configuration, metrics, tries=1, seconds=patience) as client:
        elector = Elector(client, election, leading, wall, fence)
        try:
            yield elector
        finally:
            await elector.release()


def main() -> int:
    """Run the operator; 0 after SIGTERM, 1 after a lost lead, 2 for settings that can't work."""
    chosen = settings.parse()
    settings.configure(chosen.log_format, chosen.log_level)
    # a full collection of ten thousand jobs' records holds everybody up for 100 ms and finds
    # nothing: what is there once the caches are full is left out of them, and they come seldom
    gc.set_threshold(*GENERATIONS)
    try:
        asyncio.run(run(chosen, filled=gc.freeze))
    except ConfigurationError as error:
        # the sentence says it all; a traceback would hide it
        log.critical("%s", error)
        return 2
    except LeadershipLost as error:
        # no traceback: another operator leads, and nothing failed here
        log.error("leadership lost, ends and starts again as a follower: %s", error)  # noqa: TRY400
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
