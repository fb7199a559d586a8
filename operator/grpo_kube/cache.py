"""The last known state of one kind of object, with an index from an owner to its children.

A reconcile reads the world from here, without a request. Never the truth: the informer replaces the
whole content by a real LIST now and then, which heals whatever an event stream missed. Our own
writes put their answers in, so that a reconcile sees them before the event comes.

An object that can't be read is set aside, and must affect nothing but itself. A label from a
stranger, or a status from a newer version of the operator, must not end a watch. Nor may it hide
other objects or keep the process from starting.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from .objects.errors import Stale
from .objects.json_reader import JsonObject, Unreadable
from .objects.resources import Object, ObjectKey, Resource, identity

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_PROBLEM = 1024


class Quarantine:
    """The objects that could not be parsed, by kind and name: counted, and each problem is logged
    once and reported to a callback."""

    def __init__(self) -> None:
        """Start empty."""
        self._problems: dict[str, dict[ObjectKey, str]] = {}
        self.on_quarantined: Callable[[str, Object, str], None] = lambda *_: None
        """Called with plural name, object and problem whenever an object is set aside."""

    def parse_object(self, plural: str, parse: Callable[[Any], T], item: object) -> T | None:
        """Parse an object. Return None for one that can't be parsed, and quarantine it."""
        try:
            return parse(item)
        # whatever is wrong with it: the content is not ours, and must cost this object only
        except Exception as error:
            self._add(plural, item, error)
            return None

    def _add(self, plural: str, item: object, error: Exception) -> None:
        """Takes an object in; the same problem of the same object is logged and reported once."""
        key, problem = identity(item), " ".join(str(error).split())[:MAX_PROBLEM]
        problems = self._problems.setdefault(plural, {})
        if problems.get(key) != problem:
            problems[key] = problem
            log.warning("%s %s can't be read and is set aside: %s", plural, key, problem)
            if isinstance(item, dict):
                self.on_quarantined(plural, item, problem)

    def forget_problem(self, plural: str, key: ObjectKey) -> None:
        """Forget that a problem was reported, so that the next LIST or event reports it again."""
        if key in self._problems.get(plural, {}):
            self._problems[plural][key] = ""

    def forget(self, plural: str, key: ObjectKey) -> None:
        """The object can be read again, or is gone."""
        if self._problems.get(plural, {}).pop(key, None) is not None:
            log.info("%s %s is no longer set aside", plural, key)

    def forget_unlisted(
        self, plural: str, keys: Collection[ObjectKey], namespace: str | None
    ) -> None:
        """After a LIST of a namespace (None: of all), forget those that are not among the keys."""
        for key in [
            key for key in self._problems.get(plural, {}) if namespace in (None, key.namespace)
        ]:
            if key not in keys:
                self.forget(plural, key)

    def is_quarantined(self, plural: str, key: ObjectKey) -> bool:
        """True if the object can't be read."""
        return key in self._problems.get(plural, {})

    def counts(self) -> Mapping[str, int]:
        """Return the number of quarantined objects by plural name of their kind."""
        return Counter({plural: len(problems) for plural, problems in self._problems.items()})


class Record(Protocol):
    """What the cache needs of a record, which is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> ObjectKey: ...
    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


R = TypeVar("R", bound=Record)

REMEMBERED = 1024
"""How many objects that left are remembered, lest the answer to an earlier write bring one back:
more than leave in the time of an answer."""
AGED = 1
"""A resourceVersion that is older than that of any object."""


class Cache(Generic[R]):
    """Records of one kind by their own key, and by the key of an owner."""

    def __init__(
        self,
        resource: Resource,
        parse: Callable[[Any], R],
        quarantine: Quarantine,
        salvage: Callable[[Any], R] | None = None,
        *,
        index: Callable[[R], ObjectKey] = lambda record: record.key,
    ) -> None:
        """`parse` makes a record of an API object; those for which it can't are set aside in
        `quarantine`, with what `salvage` makes of them. `index` gives the key of the object to
        which a record belongs."""
        self.on_deleted: Callable[[R], None] = lambda _: None
        """Called with the last known record of each deleted object."""
        self.resource = resource
        self.index = index
        self._parse = parse
        self._salvage = salvage
        self._quarantine = quarantine
        self._items: dict[ObjectKey, R] = {}
        self._children: dict[ObjectKey, dict[ObjectKey, R]] = {}
        self._quarantined: dict[ObjectKey, R] = {}
        self._removed: dict[str, float] = {}
        """Up to which version a removed object is out of date, by uid."""
        self._relists: list[Relist[R]] = []
        self.newest: float = 0
        """The newest resourceVersion that was received."""
        self.restores = 0
        """Count of restores of the API server from a backup."""
        self.ghosts = 0
        """Count of objects that a LIST found missing without an event of their deletion."""

    def __iter__(self) -> Iterator[R]:
        """All records."""
        return iter(self._items.values())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    def get(self, key: ObjectKey) -> R | None:
        """The object of that namespace and name."""
        return self._items.get(key)

    def owned_by(self, owner: ObjectKey) -> Collection[R]:
        """The objects that belong to another; not itself."""
        return self._children.get(owner, {}).values()

    @property
    def quarantined_records(self) -> Mapping[ObjectKey, R]:
        """Objects that are set aside now, as far as they could be read; no decision uses them."""
        return self._quarantined

    def parse_item(self, item: Any) -> R | None:
        """The record of an object; None for one that can't be read, which is set aside."""
        record = self._quarantine.parse_object(self.resource.plural, self._parse, item)
        if record is not None:
            self._quarantine.forget(self.resource.plural, record.key)
        return record

    def put(self, item: Any) -> R | None:
        """Store an object, unless a newer one of its name is known; return the record that is kept.

        For an object that can't be read, return None and drop its old record, so that no decision
        uses old data. An object that has been deleted does not come back: the answer to our write
        can arrive after the deletion.
        """
        # Answers to our writes and events come on two connections, in any order.
        uid, version = version_of(item)
        self.newest = max(self.newest, version)
        if self._removed.get(uid, -1) > version:
            return None
        cached_record = self._items.get(identity(item))
        # An event can arrive after the answer to that write of ours, or to a later one. The answer
        # can arrive after a LIST that shows another object of this name.
        if cached_record and cached_record.version >= version > 0:
            return cached_record
        record = self.parse_item(item)
        if record is None:
            self._quarantine_item(item)
        else:
            self._store(record)
        return record

    def discard(self, key: ObjectKey, uid: str, version: float = inf) -> R | None:
        """Forgets an object as of a version, unless it is newer or another one has taken its name;
        returns what was forgotten."""
        if version != inf:
            self.newest = max(self.newest, version)
        cached_record = self._items.get(key)
        # a label that the selection asks for was off, and is on again
        if cached_record and cached_record.uid == uid and cached_record.version > version:
            return None
        self._quarantine.forget(self.resource.plural, key)
        self._mark_removed(key, uid, version)
        self._quarantined.pop(key, None)
        if cached_record is None or cached_record.uid != uid:
            return None
        self._remove(cached_record)
        self.on_deleted(cached_record)
        return cached_record

    @contextmanager
    def relist(self, namespace: str | None = None) -> Iterator["Relist[R]"]:
        """Store a full LIST of a namespace, or of all namespaces for None, while events arrive."""
        relist = Relist(self, namespace)
        self._relists.append(relist)
        try:
            yield relist
        finally:
            self._relists.remove(relist)

    def age(self) -> None:
        """Take whatever comes for newer than what is known; no write can stand on that."""
        self.newest = 0
        self.restores += 1
        self._removed.clear()
        for record in list(self._items.values()):
            self._store(replace(record, version=AGED))

    def _quarantine_item(self, item: Any) -> R | None:
        """Drops what was known of an object that can't be read any more; returns it."""
        key = identity(item)
        self._mark_removed(key, *version_of(item))
        cached_record = self._items.get(key)
        if cached_record:
            self._remove(cached_record)
        if salvaged := self._salvage_record(item) or cached_record:
            self._quarantined[key] = salvaged
        return cached_record

    def _salvage_record(self, item: Any) -> R | None:
        try:
            return self._salvage(item) if self._salvage else None
        # as in Quarantine.parse_object: whatever is wrong with it
        except Exception:
            return None

    def _mark_removed(self, key: ObjectKey, uid: str, version: float = inf) -> None:
        """The object was deleted, or can't be read as of that version."""
        if uid:
            self._removed[uid] = max(version, self._removed.pop(uid, 0))
        # Bounded: a cluster deletes objects for ever. The oldest goes first, since insertion renews
        # the order.
        if len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]
        for relist in self._relists:
            relist.mark_removed(key, uid, version)

    def _store(self, record: R) -> None:
        self._quarantined.pop(record.key, None)
        cached_record = self._items.get(record.key)
        if cached_record:
            self._remove(cached_record)
        self._items[record.key] = record
        owner = self.index(record)
        if owner != record.key:
            self._children.setdefault(owner, {})[record.key] = record

    def _remove(self, record: R) -> None:
        del self._items[record.key]
        owner = self.index(record)
        if owner == record.key:
            return
        siblings = self._children[owner]
        del siblings[record.key]
        # An empty entry for every owner that ever was would be a leak.
        if not siblings:
            del self._children[owner]


class Relist(Generic[R]):
    """A full LIST on its way into a cache, object by object, while events and answers of our own go
    on.

    The objects are as they were at the list's resourceVersion. What is newer stays, and what has
    left the cache since then does not come back.
    """

    def __init__(self, cache: Cache[R], namespace: str | None) -> None:
        """Begin a LIST of a namespace; None: of all namespaces."""
        self._cache = cache
        self._newest = cache.newest
        self._namespace = namespace
        self._listed: set[ObjectKey] = set()
        self._unreadable: set[ObjectKey] = set()
        self._removed: dict[tuple[ObjectKey, str], float] = {}
        """Up to which version each object, by key and uid, is out of date; infinite: deleted."""
        self.changed: set[ObjectKey] = set()
        """Indexed keys of the objects that differ from before."""

    def begin(self) -> None:
        """Start again with the first page, after a LIST that broke off."""
        self._listed.clear()
        self._unreadable.clear()

    def add(self, item: Any) -> None:
        """Take the next object of the LIST into the cache."""
        cache, key, (uid, version) = self._cache, identity(item), version_of(item)
        cached_record = cache.get(key)
        known_version = -1
        if cached_record and cached_record.uid == uid:
            known_version = cached_record.version
        removed_version = self._removed.get((key, uid), -1)
        # The LIST has the very version that could not be read while the LIST was on its way.
        if removed_version == version:
            self._unreadable.add(key)
        if max(known_version, removed_version) >= version:
            self._listed.add(key)
            return
        record = cache.parse_item(item)
        if record is None:
            self._unreadable.add(key)
            if dropped := cache._quarantine_item(item):
                self.changed.add(cache.index(dropped))
            return
        self._listed.add(key)
        if cached_record and cached_record.version >= record.version:
            return
        cache._store(record)
        if not has_same_content(cached_record, record):
            self.changed |= {cache.index(known) for known in (cached_record, record) if known}

    def mark_removed(self, key: ObjectKey, uid: str, version: float = inf) -> None:
        """Record that the object was deleted, or can't be read as of that version."""
        self._removed[key, uid] = max(version, self._removed.get((key, uid), 0))
        if version != inf:
            self._unreadable.add(key)

    def finish(self, version: int) -> None:
        """End the LIST: remove the objects that are older than it and not in it.

        Raises:
            Stale: the API server was restored from a backup, and another LIST is needed.
        """
        cache = self._cache
        if version < self._newest:
            cache.age()
            raise Stale(
                f"{cache.resource.plural} are at resourceVersion {version} after {self._newest}: "
                "the API server was restored from a backup"
            )
        cache.newest = max(cache.newest, version)
        cache._quarantine.forget_unlisted(cache.resource.plural, self._unreadable, self._namespace)
        for key in [key for key in cache._quarantined if self._namespace in (None, key.namespace)]:
            if key not in self._unreadable:
                del cache._quarantined[key]
        # What is newer than the LIST came by an event or by our own write, after the LIST was
        # taken.
        for key, cached_record in list(cache._items.items()):
            if (
                key not in self._listed
                and cached_record.version <= version
                and self._namespace in (None, key.namespace)
            ):
                cache.discard(key, cached_record.uid, version)
                cache.ghosts += 1
                self.changed.add(cache.index(cached_record))


def has_same_content(before: R | None, now: R) -> bool:
    """True if two records of an object differ only in its version, which no reader sees."""
    if before is None:
        return False
    return before is now or replace(before, version=now.version) == now


def version_of(item: Any) -> tuple[str, int]:
    """uid and resourceVersion of any object; empty and 0 when they can't be read."""
    try:
        meta = JsonObject(item).part("metadata")
        return meta.text("uid"), meta.digits("resourceVersion")
    except Unreadable:
        return "", 0
