"""Sends events in the background, so that no reconcile waits for them.

Events are dropped when the API server can't keep up. Those of one job are sent in their order,
those of different jobs at the same time. While reconciles run an event waits, but no longer than
PATIENCE: under lasting load events come late, but they come. An admission event that still waits
when its job starts is merged with the start event.
"""

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .client import Client
from .objects.errors import AlreadyExists, ClusterError
from .objects.resources import EVENTS, Object, ObjectKey

log = logging.getLogger(__name__)

BACKLOG = 1000
SENDERS = 4
"""Events that are on their way at a time, each of another job."""
PATIENCE = 10.0
"""Longest time that an event waits for the work queue to be empty, in seconds."""
_LOOK = 0.05
"""Seconds between two looks at the work queue."""


Fold = Callable[[Object, Object], Object | None]
"""Makes one event of two consecutive ones of the same object; None if both must be sent."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    body: Object
    since: float


class EventRecorder:
    """Sends events: one after the other of a job, several at a time of all."""

    def __init__(
        self,
        cluster: Client,
        fold: Fold = lambda *_: None,
        busy: Callable[[], bool] = lambda: False,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`busy` is True while jobs are reconciled; they go before events. `count` is called for
        every event with `sent`, `refused` (by the API server), `folded` or `dropped`."""
        self._cluster = cluster
        self._fold = fold
        self._busy = busy
        self._count = count
        self._waiting: dict[ObjectKey, deque[_Waiting]] = {}
        """Events of each job, oldest first; of a job with one on its way, those after that."""
        self._ready: asyncio.Queue[ObjectKey] = asyncio.Queue()
        """Jobs with events of which none is on its way."""
        self._free_places = BACKLOG
        """Events that may still come before one is dropped."""

    def record(self, key: ObjectKey, body: Object) -> None:
        """Queue an event, the body of a core/v1 Event on the object of that key."""
        waiting = self._waiting.get(key)
        if waiting and (both := self._fold(waiting[-1].body, body)):
            waiting[-1] = _Waiting(both, waiting[-1].since)
            self._count("folded")
        elif not self._free_places:
            self._count("dropped")
            log.warning("%s: event %s dropped, %d are waiting", key, body["reason"], BACKLOG)
        else:
            self._free_places -= 1
            if key not in self._waiting:
                self._waiting[key] = deque()
                self._ready.put_nowait(key)
            self._waiting[key].append(_Waiting(body, asyncio.get_running_loop().time()))

    async def run(self) -> None:
        """Sends until cancelled."""
        async with asyncio.TaskGroup() as senders:
            for _ in range(SENDERS):
                senders.create_task(self._send_forever())

    async def _send_forever(self) -> None:
        while True:
            key = await self._ready.get()
            waiting = self._waiting[key]
            # The job's queue stays in `_waiting` while its event is sent, so that no other sender
            # takes its next one.
            await self._let_work_go_first(waiting[0].since)
            await self._send_event(waiting.popleft().body)
            self._free_places += 1
            if waiting:
                self._ready.put_nowait(key)
            else:
                del self._waiting[key]

    async def _send_event(self, body: Object) -> None:
        try:
            await self._cluster.create(EVENTS, body["metadata"]["namespace"], _named(body))
        except AlreadyExists:
            # It was sent before: the answer was lost, or another leader sent it.
            self._count("sent")
        except ClusterError as error:
            self._count("refused")
            log.warning("event %s not recorded: %s", body["reason"], error)
        else:
            self._count("sent")

    async def _let_work_go_first(self, since: float) -> None:
        # A POST per event competes with the reconciles' requests for the API server, and no one
        # waits for an event.
        seconds_left = since + PATIENCE - asyncio.get_running_loop().time()
        for _ in range(math.ceil(seconds_left / _LOOK)):
            if not self._busy():
                return
            await asyncio.sleep(_LOOK)


def _named(body: Object) -> Object:
    """The event under a name of its own. A request is sent again if its answer is lost, and the API
    server would make an event of each, with a name that it generates."""
    metadata = dict(body["metadata"])
    prefix = metadata.pop("generateName", "")
    metadata.setdefault("name", prefix + secrets.token_hex(8))
    return {**body, "metadata": metadata}
