"""Holds a Lease against other operators: what leadership.py says is next, done on the API server.

It has a client of its own, so that a burst of writes never keeps a renewal waiting; all others ask it before a write.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from ..errors import AlreadyExists, ClusterError, Conflict, LeadershipLost, NotFound
from ..leadership import Election, Leadership, Lease, Turn, lease_of
from .api import LEASES, Object
from .client import HttpCluster

log = logging.getLogger(__name__)

BeforeLeading = Callable[[HttpCluster, Election], Awaitable[None]]
"""Called when the Lease is held and before `leading` is set; as long as it raises a ClusterError, nothing is led."""


class Elector:
    """One candidate for a Lease."""

    def __init__(
        self,
        cluster: HttpCluster,
        election: Election,
        leading: asyncio.Event,
        wall: Callable[[], float],
        before_leading: BeforeLeading | None = None,
    ) -> None:
        """`cluster` must have no gate, and give up soon; `leading` is set once this process leads, and it ends when
        that is over. `wall` gives unix seconds for people.
        """
        self._cluster = cluster
        self._election = election
        self._before_leading = before_leading
        self._lease = election.lease
        self._identity = election.identity
        self._leadership = Leadership(election.identity, election.terms)
        self.leading = leading
        """Set once this process leads."""
        self._clock = asyncio.get_running_loop().time
        self._wall = wall
        self._began = self._clock()
        self._free_since: float | None = None

    async def run(self) -> None:
        """Stands until it leads, then renews.

        Raises:
            LeadershipLost: another may lead by now.
        """
        await self._look()
        while True:
            step = self._leadership.step(self._clock())
            if step.turn is Turn.LOST:
                raise LeadershipLost(f"Lease {self._lease}: {step.why}")
            if step.turn is not Turn.WAIT:
                await self._write()
            # The Lease alone is not enough: work begins only after what must be recorded before the first write.
            elif self.leads() and not self.leading.is_set():
                await self._begin()
            else:
                await asyncio.sleep(step.seconds)
                # A leader learns of a change by its own renewal; only a candidate has to look.
                if not self.leading.is_set():
                    await self._look()

    def answer_within(self) -> float:
        """The gate of everybody's writes: see Leadership.answer_within."""
        return self._leadership.answer_within(self._clock())

    def leads(self) -> bool:
        """True if writes may be sent now."""
        return self._leadership.leads(self._clock())

    def free_since(self) -> float | None:
        """Return the loop's time of the last sign of the leader before, or of the own start; None for a follower."""
        return self._free_since if self.leading.is_set() else None

    async def release(self) -> None:
        """Ends the lead, so that others need not wait; nothing more is written, whatever the API server answers."""
        lease = self._leadership.resign(self._timestamp())
        if lease is None:
            return
        try:
            await self._cluster.replace(LEASES, *self._lease, self._body(lease))
        except ClusterError as error:
            log.warning("the Lease is not released, others take it when its time is over: %s", error)
        else:
            log.info("Lease %s is released", self._lease)

    async def _look(self) -> None:
        try:
            found: Object | None = await self._cluster.get(LEASES, *self._lease)
        except NotFound:
            found = None
        except ClusterError as error:
            log.warning("%s; trying again", error)
            await asyncio.sleep(self._leadership.terms.look)
            return
        self._leadership.saw(lease_of(found) if found else None, self._clock())

    async def _write(self) -> None:
        """Takes or renews the Lease; where somebody was faster, looks what is there now."""
        # Taken before the request: others count from when they see the renewal, which is later.
        sent_at = self._clock()
        if not self.leads():
            self._free_since = max(self._leadership.changed_at, self._began)
        lease = self._leadership.proposal(sent_at, self._timestamp())
        try:
            answer = await self._send(lease)
        # Somebody else wrote or deleted the Lease meanwhile: what is there now decides whose turn it is.
        except (AlreadyExists, Conflict, NotFound) as error:
            log.info("Lease %s has changed; looking again", self._lease, extra={"detail": str(error)})
            await self._look()
            return
        except ClusterError as error:
            log.warning("%s; trying again", error)
            return
        self._leadership.wrote(lease_of(answer), sent_at, self._clock())

    async def _begin(self) -> None:
        """Lets the work begin, once what has to come before it is done."""
        try:
            if self._before_leading:
                await self._before_leading(self._cluster, self._election)
        except ClusterError as error:
            log.warning("%s holds Lease %s but does not lead yet: %s", self._identity, self._lease, error)
            await asyncio.sleep(self._leadership.terms.look)
            return
        log.info("%s leads, by Lease %s", self._identity, self._lease)
        self.leading.set()

    async def _send(self, lease: Lease) -> Object:
        if lease.version:
            return await self._cluster.replace(LEASES, *self._lease, self._body(lease))
        return await self._cluster.create(LEASES, self._lease.namespace, self._body(lease))

    def _body(self, lease: Lease) -> Object:
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | ({"resourceVersion": lease.version} if lease.version else {}),
            "spec": lease.spec,
        }

    def _timestamp(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
