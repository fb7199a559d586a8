"""The last known state of one kind of object, with an index from a GRPOJob to its children.

A reconcile reads the world from here, without a request. Never the truth: the watcher replaces the whole content by a
real LIST now and then, which heals whatever an event stream missed. Our own writes put their answers in, so that a
reconcile sees them before the event comes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ..names import ObjectKey
from ..parsing import grpojob_record, job_record, pod_record, service_record
from .api import GRPOJOBS, JOBS, PODS, SERVICES, Resource
from .unreadable import Unreadables, identity


class Record(Protocol):
    """What the cache needs of a record."""

    @property
    def key(self) -> ObjectKey: ...
    @property
    def job_key(self) -> ObjectKey: ...
    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


R = TypeVar("R", bound=Record)


class Cache(Generic[R]):
    """Records of one kind by their own key, and by that of the GRPOJob to which they belong."""

    def __init__(self, resource: Resource, parse: Callable[[Any], R], unreadables: Unreadables) -> None:
        """`parse` makes a record of an API object; those for which it can't are set aside in `unreadables`."""
        self.resource = resource
        self._parse = parse
        self._unreadables = unreadables
        self._items: dict[ObjectKey, R] = {}
        self._children: dict[ObjectKey, dict[ObjectKey, R]] = {}
        self.ghosts = 0
        """Objects that a LIST found missing although no event had said so."""

    def __iter__(self) -> Iterator[R]:
        """All records."""
        return iter(self._items.values())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    def get(self, key: ObjectKey) -> R | None:
        """The object of that namespace and name."""
        return self._items.get(key)

    def of(self, job_key: ObjectKey) -> Collection[R]:
        """The objects that belong to a GRPOJob."""
        return self._children.get(job_key, {}).values()

    def read(self, item: Any) -> R | None:
        """The record of an object; None for one that can't be read, which is set aside."""
        record = self._unreadables.read(self.resource.plural, self._parse, item)
        if record is not None:
            self._unreadables.forget(self.resource.plural, record.key)
        return record

    def put(self, item: Any) -> R | None:
        """Takes an object in, unless something newer of the same uid is there; returns what is kept.

        One that can't be read is None, and what was known of it is dropped: nobody may act on an old picture.
        """
        record = self.read(item)
        if record is None:
            if known := self._items.get(identity(item)):
                self._remove(known)
            return None
        known = self._items.get(record.key)
        # an event can arrive after the answer to a later write of ours
        if known and known.uid == record.uid and known.version > record.version:
            return known
        self._store(record)
        return record

    def discard(self, key: ObjectKey, uid: str) -> R | None:
        """Forgets an object, unless another one has taken its name; returns what was forgotten."""
        self._unreadables.forget(self.resource.plural, key)
        known = self._items.get(key)
        if known is None or known.uid != uid:
            return None
        self._remove(known)
        return known

    def replace(
        self, records: Iterable[R], unread: Collection[ObjectKey], version: int, namespace: str | None = None
    ) -> set[ObjectKey]:
        """Takes a full LIST of a namespace (None: of all) in; returns the GRPOJobs whose objects differ from before.

        What is newer than the list's resourceVersion (written while it was on its way) stays. `unread` are the objects
        of the list that can't be read.
        """
        listed = {record.key: record for record in records}
        changed: set[ObjectKey] = set()
        self._unreadables.keep(self.resource.plural, unread, namespace)
        for key, known in list(self._items.items()):
            if key not in listed and known.version <= version and namespace in (None, key.namespace):
                self._remove(known)
                self.ghosts += key not in unread
                changed.add(known.job_key)
        for key, record in listed.items():
            current = self._items.get(key)
            if current is None or current.version < record.version:
                self._store(record)
                changed.add(record.job_key)
        return changed

    def _store(self, record: R) -> None:
        known = self._items.get(record.key)
        if known:
            self._remove(known)
        self._items[record.key] = record
        self._children.setdefault(record.job_key, {})[record.key] = record

    def _remove(self, record: R) -> None:
        del self._items[record.key]
        siblings = self._children[record.job_key]
        del siblings[record.key]
        if not siblings:
            del self._children[record.job_key]


class Caches:
    """All that is known of the cluster without asking."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.unreadables = Unreadables()
        self.grpojobs = Cache(GRPOJOBS, grpojob_record, self.unreadables)
        self.jobs = Cache(JOBS, job_record, self.unreadables)
        self.pods = Cache(PODS, pod_record, self.unreadables)
        self.services = Cache(SERVICES, service_record, self.unreadables)

    def quiet(self, key: ObjectKey) -> bool:
        """Whether nobody waits for a job's next step: its gang starts or runs, or it has ended and nothing is asked."""
        job = self.grpojobs.get(key)
        if job is None:
            return False
        if job.finished:
            return job.generation == job.observed_generation
        if not job.active or not self.jobs.of(key):
            return False
        return all(pod.live for pod in self.pods.of(key) if pod.attempt == job.status.attempt)
