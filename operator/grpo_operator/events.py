"""Events on GRPOJobs, for `kubectl describe`: one per change of the conditions, after the status was written.

Exists so that an event costs nobody a wait: they are sent in the background, dropped when the API server can't keep up,
and never retried for long. Called by reconcile.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from grpo_api.contract import API_VERSION, KIND
from grpo_api.status import Condition, ConditionType

from .cluster.client import EVENTS, Cluster
from .errors import ClusterError
from .names import MANAGER
from .records import GRPOJobRecord, timestamp

log = logging.getLogger(__name__)

BACKLOG = 1000
PATIENCE = 0.2
"""Longest wait of an event for the work queue to be empty, in seconds."""
_TOLD = (
    ConditionType.FAILED,
    ConditionType.SUCCEEDED,
    ConditionType.SUSPENDED,
    ConditionType.TRAINS_ADAPTER_ONLY,
    ConditionType.DEGRADED,
    ConditionType.RUNNING,
    ConditionType.ADMITTED,
)
"""The most telling change of a write becomes the event; the others are in the conditions."""

_WARN_WHEN_TRUE = (ConditionType.FAILED, ConditionType.DEGRADED, ConditionType.TRAINS_ADAPTER_ONLY)


def telling_change(old: list[Condition], new: list[Condition]) -> Condition | None:
    """The condition whose change matters most; None when no status or reason changed."""
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    changed = {c.type: c for c in new if before.get(c.type) != (c.status, c.reason)}
    # conditions that start out False tell nothing: only Admitted=False is news by itself
    news = [
        c for t in _TOLD if (c := changed.get(t)) and (t in before or c.status == "True" or t == ConditionType.ADMITTED)
    ]
    return next(iter(news), None)


def event(job: GRPOJobRecord, condition: Condition, now: float) -> dict[str, Any]:
    """A core/v1 Event that tells of a condition."""
    refused = condition.type == ConditionType.ADMITTED and condition.status == "False"
    warns = refused or (condition.type in _WARN_WHEN_TRUE and condition.status == "True")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{job.name}.", "namespace": job.parent.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": job.parent.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": "Warning" if warns else "Normal",
        "reason": condition.reason,
        "message": f"{condition.type}={condition.status}: {condition.message}"[:1024],
        "source": {"component": MANAGER},
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }


class Recorder:
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
            log.warning("%s: event %s dropped, %d are waiting", job.parent, condition.reason, BACKLOG)

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
