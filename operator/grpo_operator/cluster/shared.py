"""What attempts share, the Services of their namespace and the claim of their job: made if missing, mended if ours.

Both outlive attempts and have fixed names, so that there may be one already: another's, or a dying one. That is told
instead of being used.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from ..errors import AlreadyExists, Denied, NotFound
from ..manifests import checkpoint_volume_claim
from ..names import RENDEZVOUS_SERVICE, ObjectKey
from ..ownership import claim_problem, foreign_service, is_ours, service_repair
from ..parsing import claim_record, service_record
from ..records import GRPOJobRecord
from ..services import wanted_service
from ..shared_records import ServiceRecord
from .api import CLAIMS, SERVICES, Cluster, Object, Resource
from .cache import Cache

log = logging.getLogger(__name__)

GOES_PAUSE, STAYS_PAUSE = 2.0, 15.0
"""Seconds until a name is tried again: one whose object is on its way out, and one that somebody must free."""


class Taken(NamedTuple):
    """A name that an attempt needs is another's."""

    message: str
    look_again: float
    """Seconds until it may be free; nobody tells us."""


class SharedObjects:
    """Sees to the objects that attempts share."""

    def __init__(self, cluster: Cluster, services: Cache[ServiceRecord], clock: Callable[[], float]) -> None:
        """`services` mirrors the Services with our label; `clock` gives monotonic seconds."""
        self._cluster = cluster
        self._services = services
        self._clock = clock
        self._lock = asyncio.Lock()
        self._taken: dict[ObjectKey, tuple[float, Taken]] = {}
        """Services of our names that are another's, and until when that is believed: every job there asks."""

    async def claim(self, job: GRPOJobRecord) -> Taken | None:
        """Makes the claim of spec.checkpoint.volumeClaimTemplate, if there is one; says why it can't be had.

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
            found = await self._get(CLAIMS, job.key.namespace, name)
            if found is None:
                return Taken(f"PersistentVolumeClaim {name} has just been deleted", GOES_PAUSE)
            claim = claim_record(found)
            if problem := claim_problem(claim, job):
                return Taken(problem, GOES_PAUSE if claim.deleting or claim.grpojob_uid else STAYS_PAUSE)
        return None

    async def service(self, namespace: str, name: str = RENDEZVOUS_SERVICE) -> Taken | None:
        """Makes or mends a Service under which pods have their names, that of rank 0 or of engines; says why it can't
        be had.

        Raises:
            ClusterError: the API server refused or did not answer.
        """
        async with self._lock:
            key = ObjectKey(namespace, name)
            known = self._services.get(key)
            if known and not known.deleting and service_repair(known) is None:
                self._taken.pop(key, None)
                return None
            until, taken = self._taken.get(key, (0.0, None))
            if taken and self._clock() < until:
                return taken
            taken = await self._make_service(key)
            self._taken.pop(key, None)
            if taken:
                log.warning("namespace %s: %s", namespace, taken.message)
                self._taken[key] = (self._clock() + taken.look_again, taken)
            return taken

    async def _make_service(self, key: ObjectKey) -> Taken | None:
        try:
            self._services.put(await self._cluster.create(SERVICES, key.namespace, wanted_service(*key)))
        except AlreadyExists:
            return await self._take_service(key)
        return None

    async def _take_service(self, key: ObjectKey) -> Taken | None:
        """The Service that is there: ours is mended, a stranger's is told."""
        namespace, name = key
        found = await self._get(SERVICES, namespace, name)
        service = service_record(found) if found else None
        if service is None or service.deleting:
            return Taken(f"Service {name} is being deleted", GOES_PAUSE)
        if not is_ours(service):
            return Taken(foreign_service(service), STAYS_PAUSE)
        patch = service_repair(service)
        if patch:
            try:
                found = await self._cluster.patch(SERVICES, namespace, name, patch)
            except Denied as error:
                return Taken(f"Service {name} can't be mended, so delete it: {error}", STAYS_PAUSE)
            log.info("namespace %s: Service %s was mended: %s", namespace, name, patch)
        self._services.put(found)
        return None

    async def _get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        try:
            return await self._cluster.get(resource, namespace, name)
        except NotFound:
            return None
