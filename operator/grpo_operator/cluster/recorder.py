"""Sends events in the background, so that they cost nobody a wait.

Events are dropped when the API server can't keep up, and never retried for long.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from grpo_api.status import Condition

from ..errors import ClusterError
from ..events import event, telling_change
from ..records import GRPOJobRecord
from .api import EVENTS, Cluster

log = logging.getLogger(__name__)

BACKLOG = 1000
PATIENCE = 0.2
"""Longest wait of an event for the work queue to be empty, in seconds."""


class EventRecorder:
    """Sends events one after the other."""

    def __init__(self, cluster: Cluster, busy: Callable[[], bool] = lambda: False) -> None:
        """`busy` says whether jobs wait for a look: they go before what only has to be told."""
        self._cluster = cluster
        self._busy = busy
        self._backlog: asyncio.Queue[dict[str, Any]] = asyncio.Queue(BACKLOG)

    def record(self, job: GRPOJobRecord, old: list[Condition], new: list[Condition], now: float) -> None:
        """Queues the event of a status write, if there is something to tell."""
        condition = telling_change(old, new)
        if condition is None:
            return
        try:
            self._backlog.put_nowait(event(job, condition, now))
        except asyncio.QueueFull:
            log.warning("%s: event %s dropped, %d are waiting", job.key, condition.reason, BACKLOG)

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            body = await self._backlog.get()
            await self._let_work_go_first()
            try:
                await self._cluster.create(EVENTS, body["metadata"]["namespace"], body)
            except ClusterError as error:
                log.warning("event %s not recorded: %s", body["reason"], error)

    async def _let_work_go_first(self) -> None:
        for _ in range(10):
            if not self._busy():
                return
            await asyncio.sleep(PATIENCE / 10)
