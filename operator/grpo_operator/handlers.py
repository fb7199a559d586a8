"""kopf's part: GRPOJob events into the cache and the queue, the login, and nothing else.

The only module that knows kopf's decorators. Events carry no decisions: a handler stores what came and asks for a look.
No finalizers, no annotations, no results in the status.
"""

from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from grpo_api.contract import GROUP, PLURAL, VERSION

from .cluster.cache import Caches
from .cluster.transport import open_session
from .cluster.unreadable import identity
from .workqueue import WorkQueue


def registry(caches: Caches, queue: WorkQueue, configuration: Configuration) -> kopf.OperatorRegistry:
    """The handlers, bound to this operator's caches and queue."""
    handlers = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=open_session(configuration))

    async def grpojob(event: Any, **_: Any) -> None:
        item = event["object"]
        key = identity(item)
        if event["type"] == "DELETED":
            caches.grpojobs.discard(key, item["metadata"]["uid"])
        else:
            caches.grpojobs.put(item)
        queue.add(key, slow=caches.quiet(key))

    kopf.on.login(registry=handlers, id="login")(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers, id="grpojob")(grpojob)
    return handlers
