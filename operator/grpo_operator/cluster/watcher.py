"""Mirrors one kind of object into a cache: a LIST, a watch from there, and a LIST again every so often.

Exists because an event stream alone is never enough: deletions get lost in watch gaps, and nothing tells. The periodic
LIST is real, not a replay of the cache. kopf watches GRPOJobs; Jobs, pods and Services are watched here, where an event
costs a dictionary update instead of a task (measured in benchmarks/watch.py). Run by __main__.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Generic

from ..errors import Expired, Unavailable
from ..names import Key
from .cache import Cache, R
from .client import Cluster, Object, Selection

log = logging.getLogger(__name__)

RELIST_AFTER_ERROR = 1.0


class Mirror(Generic[R]):
    """Keeps `cache` like what the selection holds in the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        selection: Selection,
        cache: Cache[R],
        changed: Callable[[Iterable[Key]], None],
        resync: float,
    ) -> None:
        """`changed` hears the GRPOJobs that a change concerns; `resync` is the time between two LISTs, in seconds."""
        self._cluster = cluster
        self._selection = selection
        self._cache = cache
        self._changed = changed
        self._resync = resync
        self.synced = asyncio.Event()
        """Set once the first LIST is in the cache."""
        self.heard_at = 0.0
        """Monotonic time of the last LIST, event or bookmark."""

    async def list(self) -> int:
        """Takes a full LIST in; returns its resourceVersion."""
        records: list[R] = []
        version = 0
        async for items, listed_at in self._cluster.pages(self._selection):
            records += map(self._cache.parse, items)
            version = listed_at
        ghosts = self._cache.ghosts
        changed = self._cache.replace(records, version)
        if self._cache.ghosts > ghosts:
            log.info(
                "a LIST of %s found %d deletions that no event told of",
                self._selection.resource.plural,
                self._cache.ghosts - ghosts,
            )
        self.heard_at = time.monotonic()
        self.synced.set()
        self._changed(changed)
        return version

    async def relist_forever(self) -> None:
        """Only the LISTs, for a kind whose events come from elsewhere."""
        while True:
            await self._retrying_list()
            await asyncio.sleep(self._resync * random.uniform(0.9, 1.1))

    async def follow(self) -> None:
        """LIST, watch until the next LIST is due, and so on."""
        while True:
            version = await self._retrying_list()
            due = time.monotonic() + self._resync * random.uniform(0.9, 1.1)
            try:
                while (left := due - time.monotonic()) > 0:
                    version = await self._watch(version, left)
            except Expired:
                log.info("the watch of %s is too far behind; listing again", self._selection.resource.plural)

    async def _retrying_list(self) -> int:
        while True:
            try:
                return await self.list()
            except Unavailable as error:
                log.warning("%s; trying again", error)
                await asyncio.sleep(RELIST_AFTER_ERROR * random.uniform(0.5, 1.5))

    async def _watch(self, version: int, seconds: float) -> int:
        """Follows the stream while it lasts; returns the version to go on from."""
        try:
            async for kind, item in self._cluster.watch(self._selection, version, seconds):
                version = int(item["metadata"]["resourceVersion"])
                self.heard_at = time.monotonic()
                if kind != "BOOKMARK":
                    self._changed(self._take(kind, item))
        except Unavailable as error:
            log.warning("%s; watching again", error)
            await asyncio.sleep(RELIST_AFTER_ERROR * random.uniform(0.5, 1.5))
        return version

    def _take(self, kind: str, item: Object) -> tuple[Key, ...]:
        if kind == "DELETED":
            meta = item["metadata"]
            gone = self._cache.discard(meta["namespace"], meta["name"], meta["uid"])
            return (gone.parent,) if gone else ()
        return (self._cache.put(item).parent,)
