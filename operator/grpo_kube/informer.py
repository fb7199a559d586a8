"""Mirrors one kind of object into a cache: a LIST, a watch from there, and a LIST again every so
often.

An event stream alone is not enough: a gap in the watch loses deletions, and nothing reports the
loss. The periodic LIST is a real request, not a replay of the cache. An event costs a dictionary
update here, while kopf starts a task for it (measured in the benchmark watch).

No answer of the API server ends an informer. A namespace may not be served because it is gone or
the operator may not read it. It is tried again with growing pauses and reported, and the informers
of other namespaces go on.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from typing import Generic

from .cache import Cache, R, has_same_content, version_of
from .client import Client, each_listed
from .objects.errors import ClusterError, Denied, Forbidden, NotFound, Stale, Unavailable
from .objects.resources import Object, ObjectKey, Selection, identity
from .pacing import Backoff

log = logging.getLogger(__name__)

MISSING_KIND_PAUSE = 5.0
"""Seconds from a LIST of a kind that the cluster lacks until the next one."""


class Informer(Generic[R]):
    """Keeps `cache` like what the selection holds in the cluster."""

    def __init__(
        self,
        cluster: Client,
        selection: Selection,
        cache: Cache[R],
        changed: Callable[[Iterable[ObjectKey]], None],
        *,
        resync: float,
        backoff: Backoff | None = None,
        optional: bool = False,
    ) -> None:
        """Take what to mirror and where.

        Args:
            changed: called with the indexed keys that a change concerns; with none if the objects
                are not served.
            resync: time between two LISTs, in seconds.
            optional: True if a cluster may lack the kind. It is then asked for at the pace of the
                LISTs, and when `request_list` is called.
        """
        self.optional = optional
        self._cluster = cluster
        self._selection = selection
        self._cache = cache
        self._changed = changed
        self._resync = resync
        self._backoff = backoff or Backoff()
        self._listing = asyncio.Lock()
        self._list_requested = asyncio.Event()
        self.settled = asyncio.Event()
        """Set once the first LIST is in the cache, or the API server has refused it."""
        self.heard_at: float | None = None
        """Loop time of the last LIST, event or bookmark; None while it is not served."""
        self.not_served = ""
        """Why the API server does not serve this selection now; empty while it does."""
        self.forbidden = False
        """True if that is because the operator may not see it."""

    @property
    def is_missing_kind(self) -> bool:
        """True if the cluster does not serve the selection now, and may well lack its kind."""
        return self.optional and bool(self.not_served)

    async def list(self) -> int:
        """Take a full LIST into the cache; return its resourceVersion."""
        async with self._listing:
            ghosts = self._cache.ghosts
            with self._cache.relist(self._selection.namespace) as relist:
                try:
                    version = await each_listed(
                        self._cluster, self._selection, relist.begin, relist.add
                    )
                    relist.finish(version)
                    self._mark_served()
                finally:
                    # Also for a LIST that broke off: what it put into the cache stays there.
                    self._changed(relist.changed)
        if new_ghosts := self._cache.ghosts - ghosts:
            log.info(
                "a LIST of %s found %d deletions that no event had reported",
                self._selection.resource.plural,
                new_ghosts,
            )
        return version

    async def relist_forever(self) -> None:
        """LIST alone, periodically and on request, for a kind whose events come otherwise."""
        while True:
            self._list_requested.clear()
            await self.list_until_served()
            self._backoff.reset()
            await self._until_requested()

    async def _until_requested(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._resync * random.uniform(0.9, 1.1)):
                await self._list_requested.wait()

    def request_list(self) -> None:
        """Ask for a LIST now: events may have been missed, or a kind is needed."""
        self._list_requested.set()

    async def follow(self) -> None:
        """LIST, watch until the next LIST is due, and so on."""
        while True:
            # A watch goes on from a LIST's resourceVersion, so that nothing is missed in between.
            version = await self.list_until_served()
            clock = asyncio.get_running_loop().time
            # With jitter: otherwise all kinds would be listed at the same moment, for ever.
            due = clock() + self._resync * random.uniform(0.9, 1.1)
            try:
                while (seconds_left := due - clock()) > 0:
                    version = await self._watch(version, seconds_left)
            except ClusterError as error:
                await self._handle_failure(error)

    async def list_until_served(self) -> int:
        """Takes a full LIST in, however often it takes; returns its resourceVersion."""
        while (version := await self.list_if_served()) is None:
            pass  # each failure has waited already
        return version

    async def list_if_served(self) -> int | None:
        """Store a LIST and return its resourceVersion; None if the API server refuses it."""
        while True:
            try:
                return await self.list()
            except ClusterError as error:
                await self._handle_failure(error)
                if self.not_served:
                    return None

    async def _watch(self, version: int, seconds: float) -> int:
        """Follows the stream while it lasts; returns the version to go on from."""
        try:
            async for kind, item in self._cluster.watch(self._selection, version, seconds):
                # An object whose version can't be read must not make the next watch begin at 0.
                version = version_of(item)[1] or version
                self.heard_at = asyncio.get_running_loop().time()
                self._backoff.reset()
                if kind != "BOOKMARK":
                    self._changed(self._apply_event(kind, item))
        # The next watch goes on from the last version; after any other error a LIST comes first.
        except Unavailable as error:
            await self._handle_failure(error)
        return version

    def _apply_event(self, kind: str, item: Object) -> tuple[ObjectKey, ...]:
        if kind == "DELETED":
            deleted_record = self._cache.discard(identity(item), *version_of(item))
            return (self._cache.index(deleted_record),) if deleted_record else ()
        # An event that changes no field of the record calls for no work: four pods send 14 to 17
        # events while they start, and most change nothing that is read.
        before = self._cache.get(identity(item))
        record = self._cache.put(item)
        if record is None:
            return (self._cache.index(before),) if before else ()
        if has_same_content(before, record):
            return ()
        return tuple({self._cache.index(known) for known in (before, record) if known})

    def _mark_served(self) -> None:
        if self.not_served:
            log.info("%s are served again", self._selection)
        self.not_served, self.forbidden = "", False
        self.heard_at = asyncio.get_running_loop().time()
        self.settled.set()

    async def _handle_failure(self, error: ClusterError) -> None:
        """Log the error and wait. A refusal settles the informer, since it may last."""
        if isinstance(error, Denied | NotFound):
            if not self.not_served:
                is_usual = self.optional and isinstance(error, NotFound)
                level = logging.INFO if is_usual else logging.WARNING
                log.log(level, "%s are not served now; trying again: %s", self._selection, error)
            self.not_served, self.heard_at = str(error), None
            self.forbidden = isinstance(error, Forbidden)
            self.settled.set()
            # No object has changed, but the right to see them has.
            self._changed(())
        else:
            log.log(
                logging.INFO if isinstance(error, Stale) else logging.WARNING,
                "%s; trying again",
                error,
            )
        if self.is_missing_kind:
            self._list_requested.clear()
            # Hundreds of objects may need the kind, and each asks for a LIST of its own.
            await asyncio.sleep(MISSING_KIND_PAUSE)
            await self._until_requested()
        else:
            await self._backoff.wait()
