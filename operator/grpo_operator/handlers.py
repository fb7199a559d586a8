"""kopf's part: GRPOJob events into the cache and on, the login, signals, and nothing else.

The only module that knows kopf's decorators, and runs it. Events carry no decisions: a handler stores what came and
says so. No finalizers, no annotations, no results in the status.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from grpo_api.contract import GROUP, PLURAL, VERSION

from . import kopf_settings
from .cluster.backoff import Backoff
from .cluster.cache import Caches
from .cluster.transport import EmptyLists, json_only, open_session
from .cluster.unreadable import identity
from .names import ObjectKey

log = logging.getLogger(__name__)


def registry(
    caches: Caches,
    heard: Callable[[ObjectKey, bool], None],
    configuration: Configuration,
    listed: Mapping[str, Callable[[], None]],
    told: asyncio.Event,
) -> kopf.OperatorRegistry:
    """The handlers, bound to this operator's caches. SIGTERM and SIGINT set `told`.

    `heard` is told of each GRPOJob of which an event came, and whether that is news. `listed` hears, by their URL path,
    when kopf begins a new watch of GRPOJobs, and lists those that it doesn't.
    """
    handlers = kopf.OperatorRegistry()

    async def startup(**_: Any) -> None:
        # kopf puts its handlers of signals in the place of ours in this turn of the loop or before
        asyncio.get_running_loop().call_soon(listen, told)

    async def login(**_: Any) -> kopf.AiohttpSession:
        session = open_session(configuration, 0, EmptyLists(listed), json_only)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    async def grpojob(event: Any, **_: Any) -> None:
        heard(*take(caches, event))

    kopf.on.startup(registry=handlers, id="startup")(startup)
    kopf.on.login(registry=handlers, id="login")(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers, id="grpojob")(grpojob)
    return handlers


def take(caches: Caches, event: Any) -> tuple[ObjectKey, bool]:
    """Takes an event into the cache; says of which job, and whether it is news: after the answer to a write of ours its
    event is none."""
    item = event["object"]
    key = identity(item)
    known = caches.grpojobs.get(key)
    if event["type"] == "DELETED":
        caches.grpojobs.discard(key, item["metadata"]["uid"])
        return key, True
    kept = caches.grpojobs.put(item)
    return key, kept is None or kept is not known


async def watch(
    registry: kopf.OperatorRegistry,
    namespaces: Collection[str],
    *,
    served: Callable[[bool], Awaitable[None]],
    ready: asyncio.Event,
    stop: threading.Event | None,
) -> None:
    """Runs kopf until it is cancelled, or until `stop` is set by another thread.

    It ends over what it doesn't expect of the API server, such as an error event in a watch or a kind that is gone, and
    begins anew then, after a pause; the periodic LISTs go on meanwhile. A kind that is not there when it begins it
    would never look for again, so it waits for that: `served` returns once it is there, and hears whether the last LIST
    is no proof of it any more.
    """
    backoff, doubted = Backoff(), False
    while True:
        await served(doubted)
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf_settings.settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                ready_flag=ready,
                stop_flag=stop,
            )
        # any of its errors: whichever it is, the answer is the same
        except Exception as error:
            log.warning("kopf's watch of GRPOJobs has ended and begins anew: %r", error)
            doubted = True
            await backoff.wait()
        else:
            return


def listen(told: asyncio.Event) -> None:
    """SIGTERM and SIGINT set the event.

    kopf's own handlers would have it end as it thinks best: it waits five seconds for every task that is younger than
    itself, such as the connection that Prometheus keeps open, while nobody leads.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
