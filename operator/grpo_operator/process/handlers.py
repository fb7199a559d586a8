"""Configures kopf and handles its events: GRPOJob events go to the cache, and log-in and signals to
their handlers.

Only this module uses kopf's decorators and runs kopf. Events carry no decisions: a handler stores
the object and reports that it changed. There are no finalizers, no annotations and no results in
the status.

All of kopf is off that costs requests, waits or CPU time and that a level-triggered loop does not
need. By default kopf copies and compares every object on every event, to find what changed since
its handlers last succeeded. In a burst that took half of this operator's CPU time.
"""

import asyncio
import itertools
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from grpo_api.text.contract import GROUP, PLURAL, VERSION
from grpo_kube.objects.resources import ObjectKey, identity
from grpo_kube.pacing import Backoff
from grpo_kube.transport import EmptyLists, json_only, open_session

from ..loop.caches import Caches
from ..records.names import MANAGER

log = logging.getLogger(__name__)


def registry(
    caches: Caches,
    event_came: Callable[[ObjectKey, bool], None],
    configuration: Configuration,
    listed: Mapping[str, Callable[[], None]],
    ending: asyncio.Event,
) -> kopf.OperatorRegistry:
    """Return kopf's registry with the handlers, bound to this operator's caches.

    Args:
        caches: where the GRPOJobs of events are stored.
        event_came: called for each event with the job's key, and whether the event changed what is
            known of the job.
        configuration: how to reach the API server.
        listed: callbacks by URL path, called when kopf begins a new watch there: kopf's own LIST is
            made empty, so the callback lists the GRPOJobs.
        ending: set by SIGTERM and SIGINT.
    """
    handlers = kopf.OperatorRegistry()

    async def startup(**_: Any) -> None:
        # kopf puts its handlers of signals in the place of ours in this turn of the loop or before
        asyncio.get_running_loop().call_soon(listen, ending)

    async def login(**_: Any) -> kopf.AiohttpSession:
        lists = EmptyLists(listed, lambda: caches.grpojobs.restores)
        session = open_session(configuration, lists, json_only, user_agent=MANAGER)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    async def grpojob(event: Any, **_: Any) -> None:
        event_came(*take(caches, event))

    kopf.on.startup(registry=handlers, id="startup")(startup)
    kopf.on.login(registry=handlers, id="login")(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers, id="grpojob")(grpojob)
    return handlers


def take(caches: Caches, event: Any) -> tuple[ObjectKey, bool]:
    """Store the object of an event in the cache; return its key, and whether the event changed what
    is known.

    The event of our own write changes nothing, because the answer to that write was stored before.
    """
    item = event["object"]
    key = identity(item)
    before = caches.grpojobs.get(key)
    if event["type"] == "DELETED":
        caches.grpojobs.discard(key, item["metadata"]["uid"])
        return key, True
    after = caches.grpojobs.put(item)
    is_unchanged = after is not None and after is before
    return key, not is_unchanged


async def watch(
    registry: kopf.OperatorRegistry,
    namespaces: Collection[str],
    *,
    served: Callable[[bool], Awaitable[None]],
    ready: asyncio.Event,
    stop: threading.Event | None,
) -> None:
    """Run kopf until this task is cancelled, or until another thread sets `stop`.

    kopf ends on answers that it doesn't expect, such as an error event in a watch or a kind that is
    gone. It is then restarted after a pause; the periodic LISTs go on meanwhile. kopf never looks
    again for a kind that is missing at its start. So `served` is awaited first: it returns once the
    kind is there. Its argument is True if the last LIST no longer proves that.
    """
    backoff = Backoff()
    doubted = False
    while True:
        await served(doubted)
        try:
            await kopf.operator(
                registry=registry,
                settings=settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                ready_flag=ready,
                stop_flag=stop,
            )
        # any of its errors: whichever it is, the answer is the same
        except Exception as error:
            log.warning("kopf's watch of GRPOJobs has ended and begins again: %r", error)
            doubted = True
            await backoff.wait()
        else:
            return


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an error that the event loop reports, as asyncio does, but without kopf's cut watch.

    When kopf is cancelled between two events it leaves the generator of its watch open. asyncio
    closes it after everything else has ended, and CPython raises a RuntimeError out of its
    `finally`. Nothing is lost by that, and its traceback would hide why the process has ended.
    """
    generator = context.get("asyncgen")
    if generator is not None and generator.__name__ == "infinite_watch":
        log.debug("kopf's watch of GRPOJobs was cut off by the end of this process")
        return
    loop.default_exception_handler(context)


def listen(ending: asyncio.Event) -> None:
    """Let SIGTERM and SIGINT set the event, in place of kopf's own handlers.

    With its own handlers kopf waits five seconds for every task that is younger than itself, such
    as the connection that Prometheus keeps open. No operator leads during that time.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)


class _ForEver(Iterable[float]):
    """Seconds between the tries of a request, however long the API server is away."""

    def __iter__(self) -> Iterator[float]:
        """Growing at first, then all alike, without an end."""
        return itertools.chain((0.5, 1.0, 2.0, 5.0), itertools.repeat(10.0))


class _NoDifference(kopf.MultiDiffBaseStorage):  # type: ignore[misc]
    """Remembers nothing about objects: an event is only a reason to look."""

    def build(self, **_: Any) -> Any:
        """No essence to compare, and no copy of the object to make it from."""
        return {}


def settings() -> kopf.OperatorSettings:
    """kopf with everything off that costs a request or a wait."""
    chosen = kopf.OperatorSettings()
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.queueing.worker_limit = None
    chosen.queueing.idle_timeout = 1.0
    chosen.networking.request_timeout = 30.0
    chosen.networking.connect_timeout = 10.0
    chosen.networking.error_backoffs = _ForEver()
    chosen.watching.server_timeout = 300  # the API server takes whole seconds only
    chosen.watching.client_timeout = 310
    # kopf would kill the whole process so long after its own end, also when it only begins again;
    # kubelets do that
    chosen.process.ultimate_exiting_timeout = None
    chosen.persistence.diffbase_storage = _NoDifference([])
    # of handlers, too: they can't fail, and our own queue retries
    chosen.persistence.progress_storage = kopf.MultiProgressStorage([])
    return chosen
