"""Reports that a GRPOJob can't be read: by a condition, or an event if that is denied."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from grpo_api.status.status import ConditionType
from grpo_kube.cache import Quarantine
from grpo_kube.client import Client
from grpo_kube.objects.errors import ClusterError, Conflict, Denied, NotFound
from grpo_kube.objects.resources import EVENTS, Object, identity
from grpo_kube.objects.times import timestamp

from ..records.names import GRPOJOBS
from ..records.reasons import Reason
from ..report.events import unreadable_event, unreadable_message

log = logging.getLogger(__name__)
BACKLOG = 1000


class QuarantineReporter:
    """Writes into unreadable GRPOJobs that they can't be read."""

    def __init__(self, cluster: Client, quarantine: Quarantine, clock: Callable[[], float]) -> None:
        """`clock` gives unix seconds."""
        self._cluster = cluster
        self._quarantine = quarantine
        self._clock = clock
        self._pending: asyncio.Queue[tuple[Object, str]] = asyncio.Queue(BACKLOG)
        """GRPOJobs on which an unreadable object is still to be reported, each with the problem."""
        quarantine.on_quarantined = self.add

    def add(self, plural: str, item: Object, problem: str) -> None:
        """Queue a report on an object that can't be read, if it is a GRPOJob."""
        if plural != GRPOJOBS.plural:
            return
        if self._pending.full():
            self._quarantine.forget_problem(GRPOJOBS.plural, identity(item))
        else:
            self._pending.put_nowait((item, problem))

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            item, problem = await self._pending.get()
            try:
                await self._report_newest(item, problem)
            except ClusterError as error:
                log.warning(
                    "%s: its status could not say that it is unreadable: %s", identity(item), error
                )
                self._quarantine.forget_problem(GRPOJOBS.plural, identity(item))

    async def _report_newest(self, item: Object, problem: str) -> None:
        try:
            await self.report(item, problem)
        except Conflict:
            await self.report(await self._cluster.get(GRPOJOBS, *identity(item)), problem)

    async def report(self, item: Object, problem: str) -> None:
        """One PATCH that touches only `conditions`; an event where even that is denied.

        The rest of the status stays byte for byte: a newer operator wrote it, and will go on from
        it.

        Raises:
            ClusterError: neither was possible.
        """
        key, now = identity(item), self._clock()
        conditions = _unreadable_conditions(item, problem, timestamp(now))
        if conditions is None:
            return
        version = {"resourceVersion": item["metadata"]["resourceVersion"]}
        try:
            patch = {"metadata": version, "status": {"conditions": conditions}}
            await self._cluster.patch(GRPOJOBS, *key, patch, "status")
        except NotFound:
            return
        except Denied as error:
            log.warning("%s: its conditions can't be written: %s", key, error)
            event = unreadable_event(key, str(item["metadata"]["uid"]), problem, now)
            await self._cluster.create(EVENTS, key.namespace, event)


def _unreadable_conditions(item: Object, problem: str, now: str) -> list[Any] | None:
    """The conditions with `Readable=False` among them; None if it says so already."""
    status = item.get("status")
    raw_conditions = status.get("conditions") if isinstance(status, dict) else None
    conditions = raw_conditions if isinstance(raw_conditions, list) else []
    message = unreadable_message(problem)
    since = now
    others: list[Any] = []
    for condition in conditions:
        if not isinstance(condition, dict) or condition.get("type") != ConditionType.READABLE:
            others.append(condition)
        elif condition.get("message") == message:
            return None
        elif condition.get("status") == "False":
            since = condition.get("lastTransitionTime") or now
    readable = {
        "type": ConditionType.READABLE.value,
        "status": "False",
        "observedGeneration": item["metadata"].get("generation", 0),
        "lastTransitionTime": since,
        "reason": Reason.STATUS_UNREADABLE.value,
        "message": message,
    }
    return [*others, readable]
