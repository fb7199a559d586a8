"""Sets objects aside that can't be read: counts them, logs each problem once and reports it on GRPOJobs.

An unreadable object must affect nothing but itself. A label from a stranger, or a status from a newer version of the
operator, must not end a watch, hide other objects or keep the process from starting.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from grpo_api.status import ConditionType

from ..errors import ClusterError, Conflict, Denied, NotFound
from ..events import unreadable_event, unreadable_message
from ..names import ObjectKey
from ..reasons import Reason
from ..times import timestamp
from ..untyped import MAX_NAME
from .api import EVENTS, GRPOJOBS, Cluster, Object

log = logging.getLogger(__name__)

T = TypeVar("T")
BACKLOG = 1000
MAX_PROBLEM = 1024


class Unreadables:
    """What is set aside now, by kind and name."""

    def __init__(self) -> None:
        """Nothing is."""
        self._problems: dict[str, dict[ObjectKey, str]] = {}
        self.quarantined: Callable[[str, Object, str], None] = lambda *_: None
        """Called with the kind's plural name, the object and its problem whenever an object is set aside."""

    def read(self, plural: str, parse: Callable[[Any], T], item: object) -> T | None:
        """What `parse` makes of an object; None for one that it can't read, which is set aside."""
        try:
            return parse(item)
        # whatever is wrong with it: the content is not ours, and must cost this object only
        except Exception as error:
            self._set_aside(plural, item, error)
            return None

    def _set_aside(self, plural: str, item: object, error: Exception) -> None:
        """Takes an object in; the same problem of the same object is logged and told once."""
        key, problem = identity(item), " ".join(str(error).split())[:MAX_PROBLEM]
        known = self._problems.setdefault(plural, {})
        if known.get(key) != problem:
            known[key] = problem
            log.warning("%s %s can't be read and is set aside: %s", plural, key, problem)
            if isinstance(item, dict):
                self.quarantined(plural, item, problem)

    def forget_problem(self, plural: str, key: ObjectKey) -> None:
        """Forget that an object's problem was reported, so that the next LIST or event reports it again."""
        if key in self._problems.get(plural, {}):
            self._problems[plural][key] = ""

    def forget(self, plural: str, key: ObjectKey) -> None:
        """The object can be read again, or is gone."""
        if self._problems.get(plural, {}).pop(key, None) is not None:
            log.info("%s %s is no longer set aside", plural, key)

    def keep(self, plural: str, keys: Collection[ObjectKey], namespace: str | None) -> None:
        """After a full LIST of a namespace (None: of all): forgets those that are not among the keys."""
        for key in [key for key in self._problems.get(plural, {}) if namespace in (None, key.namespace)]:
            if key not in keys:
                self.forget(plural, key)

    def counts(self) -> Mapping[str, int]:
        """How many are set aside, by plural name of their kind."""
        return Counter({plural: len(known) for plural, known in self._problems.items()})


def identity(item: object) -> ObjectKey:
    """Return namespace and name of any object; `?` for a part that can't be read."""
    # The object may be anything; its name is needed all the same, to set it aside and to report it.
    meta = item.get("metadata") if isinstance(item, dict) else None
    named: dict[str, Any] = meta if isinstance(meta, dict) else {}
    namespace, name = named.get("namespace") or "?", named.get("name") or "?"
    return ObjectKey(str(namespace)[:MAX_NAME], str(name)[:MAX_NAME])


class Teller:
    """Tells on GRPOJobs that they can't be read."""

    def __init__(self, cluster: Cluster, unreadables: Unreadables, clock: Callable[[], float]) -> None:
        """`clock` gives unix seconds."""
        self._cluster = cluster
        self._unreadables = unreadables
        self._clock = clock
        self._waiting: asyncio.Queue[tuple[Object, str]] = asyncio.Queue(BACKLOG)
        """GRPOJobs on which an unreadable object is still to be reported, each with the problem."""
        unreadables.quarantined = self.add

    def add(self, plural: str, item: Object, problem: str) -> None:
        """Queue a report on an object that can't be read, if it is a GRPOJob."""
        if plural != GRPOJOBS.plural:
            return
        if self._waiting.full():
            self._unreadables.forget_problem(GRPOJOBS.plural, identity(item))
        else:
            self._waiting.put_nowait((item, problem))

    async def run(self) -> None:
        """Tells until cancelled."""
        while True:
            item, problem = await self._waiting.get()
            try:
                await self._tell_newest(item, problem)
            except ClusterError as error:
                log.warning("%s: could not be told that it is unreadable: %s", identity(item), error)
                self._unreadables.forget_problem(GRPOJOBS.plural, identity(item))

    async def _tell_newest(self, item: Object, problem: str) -> None:
        try:
            await self.tell(item, problem)
        except Conflict:
            await self.tell(await self._cluster.get(GRPOJOBS, *identity(item)), problem)

    async def tell(self, item: Object, problem: str) -> None:
        """One PATCH that touches only `conditions`; an event where even that is denied.

        The rest of the status stays byte for byte: a newer operator wrote it, and will go on from it.

        Raises:
            ClusterError: neither was possible.
        """
        key, now = identity(item), self._clock()
        conditions = _told(item, problem, timestamp(now))
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
            about = {"namespace": key.namespace, "name": key.name, "uid": str(item["metadata"]["uid"])}
            await self._cluster.create(EVENTS, key.namespace, unreadable_event(about, problem, now))


def _told(item: Object, problem: str, now: str) -> list[Any] | None:
    """The conditions with `Readable=False` among them, all others as they are; None when it says so already."""
    status = item.get("status")
    known = status.get("conditions") if isinstance(status, dict) else None
    conditions = list(known) if isinstance(known, list) else []
    message = unreadable_message(problem)
    others: list[Any] = []
    for one in conditions:
        if not isinstance(one, dict) or one.get("type") != ConditionType.READABLE:
            others.append(one)
        elif one.get("message") == message:
            return None
    readable = {
        "type": ConditionType.READABLE.value,
        "status": "False",
        "observedGeneration": item["metadata"].get("generation", 0),
        "lastTransitionTime": now,
        "reason": Reason.STATUS_UNREADABLE.value,
        "message": message,
    }
    return [*others, readable]
