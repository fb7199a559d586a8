"""kopf's part: GRPOJob events into the cache and the queue, the login, and nothing else.

Exists as the only module that knows kopf's decorators. Events carry no decisions: a handler stores what came and asks
for a look. No finalizers, no annotations, no results in the status. Called by kopf; registered by __main__.
"""

from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from grpo_api.contract import GROUP, PLURAL, VERSION

from .cluster import credentials
from .names import Key
from .reconcile import Caches
from .workqueue import WorkQueue


def registry(caches: Caches, queue: WorkQueue, configuration: Configuration) -> kopf.OperatorRegistry:
    """The handlers, bound to this operator's caches and queue."""
    handlers = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials.for_kopf(configuration)

    async def grpojob(event: Any, **_: Any) -> None:
        item = event["object"]
        meta = item["metadata"]
        if event["type"] == "DELETED":
            caches.grpojobs.discard(meta["namespace"], meta["name"], meta["uid"])
            queue.add(Key(meta["namespace"], meta["name"]))
        else:
            parent = caches.grpojobs.put(item).parent
            queue.add(parent, slow=caches.quiet(parent))

    kopf.on.login(registry=handlers, id="login")(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers, id="grpojob")(grpojob)
    return handlers
