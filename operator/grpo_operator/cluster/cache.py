"""The last known state of one kind of object, with an index from a GRPOJob to its children.

Exists so that a reconcile reads the world without a request. Never the truth: the watcher replaces the whole content
by a real LIST now and then, which heals whatever an event stream missed. Filled by watcher and handlers; our own
writes put their answers in, so that a reconcile sees them before the event comes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ..names import Key


class Record(Protocol):
    """What the cache needs of a record."""

    @property
    def parent(self) -> Key: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


R = TypeVar("R", bound=Record)


class Cache(Generic[R]):
    """Records of one kind by namespace and name, and by the GRPOJob that they belong to."""

    def __init__(self, parse: Callable[[Any], R]) -> None:
        """`parse` makes a record of an API object."""
        self.parse = parse
        self._items: dict[Key, R] = {}
        self._children: dict[Key, dict[str, R]] = {}
        self.ghosts = 0
        """Objects that a LIST found missing although no event had said so."""

    def __iter__(self) -> Iterator[R]:
        """All records."""
        return iter(self._items.values())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    def get(self, key: Key) -> R | None:
        """The object of that namespace and name."""
        return self._items.get(key)

    def of(self, parent: Key) -> Collection[R]:
        """The objects that belong to a GRPOJob."""
        return self._children.get(parent, {}).values()

    def put(self, item: Any) -> R:
        """Takes an object in, unless something newer of the same uid is there; returns what is kept."""
        record = self.parse(item)
        known = self._items.get(Key(record.parent.namespace, record.name))
        # an event can arrive after the answer to a later write of ours
        if known and known.uid == record.uid and known.version > record.version:
            return known
        self._store(record)
        return record

    def discard(self, namespace: str, name: str, uid: str) -> R | None:
        """Forgets an object, unless another one has taken its name; returns what was forgotten."""
        known = self._items.get(Key(namespace, name))
        if known is None or known.uid != uid:
            return None
        self._remove(known)
        return known

    def replace(self, records: Iterable[R], version: int) -> set[Key]:
        """Takes a full LIST of the given resourceVersion in; returns the parents of all that differ from before.

        What is newer than the list (written while it was on its way) stays.
        """
        listed = {Key(record.parent.namespace, record.name): record for record in records}
        changed: set[Key] = set()
        for key, known in list(self._items.items()):
            if key not in listed and known.version <= version:
                self._remove(known)
                self.ghosts += 1
                changed.add(known.parent)
        for key, record in listed.items():
            current = self._items.get(key)
            if current is None or current.version < record.version:
                self._store(record)
                changed.add(record.parent)
        return changed

    def _store(self, record: R) -> None:
        key = Key(record.parent.namespace, record.name)
        known = self._items.get(key)
        if known:
            self._remove(known)
        self._items[key] = record
        self._children.setdefault(record.parent, {})[record.name] = record

    def _remove(self, record: R) -> None:
        del self._items[Key(record.parent.namespace, record.name)]
        siblings = self._children[record.parent]
        del siblings[record.name]
        if not siblings:
            del self._children[record.parent]
