"""Creates and repairs what attempts share: the Services and NetworkPolicy of a namespace, and the
claim of a job.

These objects outlive attempts and have fixed names, so that one may exist already: somebody else's,
or one that is being deleted. Such an object is reported and not used.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_kube.cache import Cache, version_of
from grpo_kube.client import Client
from grpo_kube.objects.errors import AlreadyExists, Denied, NotFound
from grpo_kube.objects.json_reader import JsonObject
from grpo_kube.objects.resources import CLAIMS, Object, ObjectKey, Resource

from ..admission.spec_checks import Problem
from ..admission.storage_classes import unbindable_claim
from ..pods.manifests import checkpoint_volume_claim
from ..pods.namespace_objects import (
    claim_problem,
    foreign_policy,
    foreign_service,
    is_ours,
    network_policy,
    repair,
    wanted_service,
)
from ..pods.pod_volumes import Manifest, claims_of_pod
from ..records.names import NETWORK_POLICY, RENDEZVOUS_SERVICE, checkpoint_claim
from ..records.parsing import claim_record
from ..records.records import GRPOJobRecord, SharedRecord
from .caches import Caches

log = logging.getLogger(__name__)

GOES_PAUSE, STAYS_PAUSE = 2.0, 15.0
"""Seconds until a name is tried again whose object goes, or that somebody must free."""


class NameConflict(NamedTuple):
    """A name that an attempt needs is another's."""

    message: str
    requeue_after: float
    """Seconds until the next try; no event reports that the name is free."""


class _Kind(NamedTuple):
    """How one kind of them is kept."""

    kind: str
    cache: Cache[SharedRecord]
    """Mirrors those with our label, or of our name."""
    wanted: Callable[[str, str], Manifest]
    """Makes the object of a namespace and name."""
    foreign: Callable[[SharedRecord], str]


@dataclass(slots=True, kw_only=True)
class _Place:
    """One object of one namespace, there or not."""

    kind: _Kind
    key: ObjectKey
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the object is made: jobs of a namespace that start together would all make it."""
    correct_version: int = 0
    """The resourceVersion that is right, whatever defaults the API server has added."""
    conflict: NameConflict | None = None
    """Why its name can't be had: every job asks, so it is believed for a while."""
    denied: Denied | None = None
    """Why it may not be made, believed for a while, too."""
    until: float = 0.0
    """Monotonic seconds until which these are believed."""

    @property
    def is_correct(self) -> bool:
        """True if the object is known to be as it should be."""
        cached_object = self.kind.cache.get(self.key)
        if cached_object is None or cached_object.deleting:
            return False
        # A version that was found right needs no comparison: each reconcile of each running job
        # asks.
        return (
            self.correct_version == cached_object.version
            or repair(cached_object, self.kind.wanted(*self.key)) is None
        )

    def store(self, answer: Object) -> None:
        """Take the API server's answer to a write or a read as right."""
        self.kind.cache.put(answer)
        # Of the answer alone: the cache may have had the event of somebody's later change already,
        # which would pass for correct until the next LIST.
        _, self.correct_version = version_of(answer)


class SharedObjects:
    """Creates and repairs the objects that attempts share."""

    def __init__(
        self,
        cluster: Client,
        caches: Caches,
        clock: Callable[[], float],
        watchers: Sequence[Manifest] | None,
        storage_classes: Callable[[], Mapping[str, tuple[str, str]]] = dict,
    ) -> None:
        """`clock` gives monotonic seconds; `watchers` are let in by the NetworkPolicies, which None
        makes none of; `storage_classes` as of a Snapshot."""
        self._cluster = cluster
        self._clock = clock
        self._places: dict[tuple[str, ObjectKey], _Place] = {}
        self._storage_classes = storage_classes
        self._services = _Kind("Service", caches.services, wanted_service, foreign_service)
        self._policies: _Kind | None = None
        if watchers is not None:
            self._policies = _Kind(
                "NetworkPolicy",
                caches.network_policies,
                lambda namespace, _: network_policy(namespace, watchers),
                foreign_policy,
            )

    async def create_claim(self, job: GRPOJobRecord) -> NameConflict | None:
        """Create the claim of spec.checkpoint.volumeClaimTemplate, if it is set. Return why it
        can't be had, else None.

        Raises:
            ClusterError: the API server refused or did not answer.
        """
        body = checkpoint_volume_claim(job.key, job.uid, job.spec) if job.spec else None
        if body is None:
            return None
        name = body["metadata"]["name"]
        try:
            await self._cluster.create(CLAIMS, job.key.namespace, body)
        except AlreadyExists:
            existing = await self._get(CLAIMS, ObjectKey(job.key.namespace, name))
            if existing is None:
                return NameConflict(
                    f"PersistentVolumeClaim {name} has just been deleted", GOES_PAUSE
                )
            claim = claim_record(existing)
            if problem := claim_problem(claim, job):
                goes_by_itself = claim.deleting or claim.grpojob_uid
                return NameConflict(problem, GOES_PAUSE if goes_by_itself else STAYS_PAUSE)
        return None

    async def unbound_claims(
        self, job: GRPOJobRecord, body: Manifest
    ) -> tuple[set[str], Problem | None]:
        """Return which claims of the pods of this Job have no volume yet, and why nothing makes one
        for one of them. A claim that is missing is the job's own, or keeps the pods waiting.

        Raises:
            ClusterError: the API server did not answer, or the StorageClasses are not known.
        """
        unbound: set[str] = set()
        problem: Problem | None = None
        for name in claims_of_pod(body["spec"]["template"]["spec"]):
            item = await self._get(CLAIMS, ObjectKey(job.key.namespace, name))
            if item is None:
                if name == checkpoint_claim(job.name):
                    unbound.add(name)
            elif JsonObject(item).part("status").text("phase") != "Bound":
                unbound.add(name)
                problem = problem or unbindable_claim(item, self._storage_classes())
        return unbound, problem

    async def ensure_service(
        self, namespace: str, name: str = RENDEZVOUS_SERVICE
    ) -> NameConflict | None:
        """Makes or mends a Service under which pods have their names, that of rank 0 or of engines;
        says why it can't be had.

        Raises:
            ClusterError: the API server refused or did not answer.
        """
        return await self._ensure(self._place(self._services, ObjectKey(namespace, name)))

    async def ensure_policy(self, namespace: str) -> None:
        """Create or repair the NetworkPolicy of the namespace's pods.

        Somebody else's policy of the same name is only logged: who may create one there may admit
        anybody anyway.

        Raises:
            ClusterError: the API server refused or did not answer.
        """
        if self._policies is None:
            return
        place = self._place(self._policies, ObjectKey(namespace, NETWORK_POLICY))
        if place.denied and self._clock() < place.until:
            raise place.denied
        place.denied = None
        try:
            await self._ensure(place)
        except Denied as error:
            place.denied, place.until = error, self._clock() + STAYS_PAUSE
            log.warning(
                "namespace %s: no NetworkPolicy holds strangers off its pods: %s", namespace, error
            )
            raise

    def _place(self, kind: _Kind, key: ObjectKey) -> _Place:
        """The place of an object; places of namespaces that are gone are dropped for a new one."""
        known = self._places.get((kind.kind, key))
        if known:
            return known
        now = self._clock()
        self._places = {
            name: place
            for name, place in self._places.items()
            if place.kind.cache.get(place.key) or place.lock.locked() or now < place.until
        }
        place = _Place(kind=kind, key=key)
        self._places[kind.kind, key] = place
        return place

    async def _ensure(self, place: _Place) -> NameConflict | None:
        """Makes or mends an object, where it is not known to be right; says why it can't be had."""
        async with place.lock:
            if place.is_correct:
                place.conflict = None
                return None
            if place.conflict and self._clock() < place.until:
                return place.conflict
            conflict = await self._make(place)
            # once, not for every job of the namespace that asks
            if conflict and conflict != place.conflict:
                log.warning("namespace %s: %s", place.key.namespace, conflict.message)
            place.conflict = conflict
            if conflict:
                place.until = self._clock() + conflict.requeue_after
            return conflict

    async def _make(self, place: _Place) -> NameConflict | None:
        kind, key = place.kind, place.key
        wanted = kind.wanted(*key)
        try:
            answer = await self._cluster.create(kind.cache.resource, key.namespace, wanted)
        except AlreadyExists:
            return await self._repair_existing(place, wanted)
        place.store(answer)
        return None

    async def _repair_existing(self, place: _Place, wanted: Manifest) -> NameConflict | None:
        """The object that is there: ours is repaired, a stranger's is reported."""
        kind, key = place.kind, place.key
        # Asked for, not taken from the cache: Services are mirrored by our labels, and a stranger's
        # has none of them.
        existing_object = await self._get(kind.cache.resource, key)
        record = kind.cache.parse_item(existing_object) if existing_object else None
        # An object on its way out can't be repaired, and its name is free only once it is gone.
        if existing_object is None or record is None or record.deleting:
            return NameConflict(f"{kind.kind} {key.name} is being deleted", GOES_PAUSE)
        if not is_ours(record, wanted):
            return NameConflict(kind.foreign(record), STAYS_PAUSE)
        patch = repair(record, wanted)
        if patch:
            try:
                existing_object = await self._cluster.patch(
                    kind.cache.resource, key.namespace, key.name, patch
                )
            except Denied as error:
                return NameConflict(
                    f"{kind.kind} {key.name} can't be mended, so delete it: {error}", STAYS_PAUSE
                )
            log.info(
                "namespace %s: %s %s was mended: %s", key.namespace, kind.kind, key.name, patch
            )
        place.store(existing_object)
        return None

    async def _get(self, resource: Resource, key: ObjectKey) -> Object | None:
        try:
            return await self._cluster.get(resource, *key)
        except NotFound:
            return None
