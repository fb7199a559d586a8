"""Elects one of several operators by a Lease.

Leadership is the pure rule: it decides when to take the Lease, when to renew it, when to wait and
when it is lost. Callers pass the Lease as they read it, and times as readings of this process's
monotonic clock. Clocks of different processes are never compared: a Lease is free once its record
has not changed for its duration, by the observer's clock. A holder counts the duration from the
moment at which it sent the renewal, which no other process can see earlier. So it stops writing
well before another process may take over.

Elector carries the rule out on the API server. It has a client of its own, so that a burst of
writes never delays a renewal. All other clients ask it before each write.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from .client import Client
from .objects.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    LeadershipLost,
    NotFound,
    NotLeading,
)
from .objects.json_reader import MAX_OBJECT, JsonObject
from .objects.resources import LEASES, Object, ObjectKey

LONGEST = 60.0
"""Seconds after which a Lease is free, whatever duration is written in it."""
MOST_TRANSITIONS = 2**31 - 1
"""What the API server can count to."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The durations of a Lease, in seconds."""

    duration: float = 10.0
    """Others wait for so long without a change before they take over."""

    @property
    def deadline(self) -> float:
        """The holder stops writing so long after its last renewal. What is on its way then has the
        rest of the duration to arrive."""
        return 0.6 * self.duration

    @property
    def retry(self) -> float:
        """Time between two renewals."""
        return 0.2 * self.duration

    @property
    def poll(self) -> float:
        """Time between two reads of the Lease by those who wait."""
        return 0.1 * self.duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """The Lease by which one of several operators leads."""

    lease: ObjectKey
    identity: str
    """Name of this process's pod, the Lease's holder, with which the policy compares writers."""
    terms: Terms = field(default_factory=Terms)


@dataclass(frozen=True, slots=True)
class Lease:
    """A Lease as it was read or is to be written. Its timestamps are for people only."""

    version: str
    """Its resourceVersion; not part of the record."""
    holder: str
    seconds: int
    transitions: int
    acquired: str
    renewed: str

    def is_same_record(self, other: "Lease | None") -> bool:
        """True if the Lease was not renewed, taken or released between the two reads."""
        return other is not None and replace(self, version=other.version) == other

    @property
    def spec(self) -> dict[str, Any]:
        """The spec for the API server, which rejects an empty time."""
        fields = {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.seconds,
            "leaseTransitions": self.transitions,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
        }
        return {name: value for name, value in fields.items() if value != ""}


def lease_of(item: Any) -> Lease:
    """The Lease of an API object.

    Raises:
        Unreadable: it is no Lease.
    """
    whole = JsonObject(item)
    meta, spec = whole.part("metadata"), whole.part("spec")
    return Lease(
        version=meta.text("resourceVersion"),
        holder=spec.text("holderIdentity", MAX_OBJECT),
        seconds=spec.integer("leaseDurationSeconds"),
        transitions=spec.integer("leaseTransitions"),
        acquired=spec.text("acquireTime"),
        renewed=spec.text("renewTime"),
    )


class Turn(Enum):
    """What a candidate or leader has to do next."""

    WAIT = "wait"
    ACQUIRE = "acquire"
    RENEW = "renew"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Step:
    """The next step, and for WAIT how long."""

    turn: Turn
    seconds: float = 0.0
    why: str = ""


class Leadership:
    """One candidate: at first it waits, it leads at most once, and what is lost stays lost."""

    def __init__(self, identity: str, terms: Terms) -> None:
        """`identity` is the holder that this candidate writes into the Lease."""
        self.terms = terms
        self._identity = identity
        self._lease: Lease | None = None
        self._changed_at = -math.inf
        self._renewed_at = -math.inf
        """When the newest renewal that was answered had been sent."""
        self._tried_at = -math.inf
        self._led = False
        self._lost = ""

    @property
    def changed_at(self) -> float:
        """When its record was first seen as it is now."""
        return self._changed_at

    def record_lease(self, lease: Lease | None, now: float) -> None:
        """Record the Lease as it was read at this moment; None if it does not exist."""
        observed_lease = self._lease
        same = lease.is_same_record(observed_lease) if lease else observed_lease is None
        if self._changed_at == -math.inf or not same:
            self._changed_at = now
        if observed_lease and lease and lease.version != observed_lease.version:
            # the renewal that was tried can't have succeeded: the Lease was renewed in between by
            # one whose answer was lost
            self._tried_at = -math.inf
        self._lease = lease
        if self._led and lease and lease.holder != self._identity:
            self._lost = self._lost or f"{lease.holder or 'nobody'} holds the Lease now"

    def step(self, now: float) -> Step:
        """What to do next."""
        if not self._led:
            seconds_left = max(self._taken_for(now), self._tried_at + self.terms.poll - now)
            if seconds_left <= 0:
                return Step(Turn.ACQUIRE)
            return Step(Turn.WAIT, min(seconds_left, self.terms.poll))
        if not self._lost and now - self._renewed_at >= self.terms.deadline:
            self._lost = f"the Lease was not renewed for {now - self._renewed_at:.1f} s"
        if self._lost:
            return Step(Turn.LOST, why=self._lost)
        # a renewal that failed is not tried again at once
        due = max(self._renewed_at, self._tried_at) + self.terms.retry
        if due <= now:
            return Step(Turn.RENEW)
        return Step(Turn.WAIT, min(due, self._renewed_at + self.terms.deadline) - now)

    def _taken_for(self, now: float) -> float:
        """Seconds until the Lease is free, unless it changes; 0 for one of our own."""
        lease = self._lease
        if lease is None or lease.holder in ("", self._identity):
            return 0.0
        return self._changed_at + max(self.terms.duration, min(float(lease.seconds), LONGEST)) - now

    def proposal(self, now: float, timestamp: str) -> Lease:
        """The Lease to write now, on the version that was seen; `timestamp` is for people."""
        self._tried_at = now
        observed_lease = self._lease
        if observed_lease and observed_lease.holder == self._identity:
            return replace(observed_lease, seconds=self._seconds, renewed=timestamp)
        version, transitions = "", 0
        if observed_lease:
            version = observed_lease.version
            transitions = min(observed_lease.transitions + 1, MOST_TRANSITIONS)
        return Lease(version, self._identity, self._seconds, transitions, timestamp, timestamp)

    @property
    def _seconds(self) -> int:
        return math.ceil(self.terms.duration)

    def record_write(self, lease: Lease, sent_at: float, now: float) -> None:
        """A proposal sent then was taken as this."""
        self.record_lease(lease, now)
        if not self._lost:
            self._led = True
            self._renewed_at = max(self._renewed_at, sent_at)

    def resign(self, timestamp: str) -> Lease | None:
        """Write no more; return the Lease to write for its release, None without one."""
        was_leader = self._led and not self._lost
        self._led, self._lost = True, self._lost or "it was released"
        lease = self._lease
        if not was_leader or lease is None or lease.holder != self._identity:
            return None
        return replace(lease, holder="", renewed=timestamp)

    def is_leader(self, now: float) -> bool:
        """True if writes may be sent at this moment."""
        return self._led and not self._lost and now - self._renewed_at < self.terms.deadline

    def answer_within(self, now: float) -> float:
        """Seconds for which a write that is sent now may be under way: others take over no sooner.

        Raises:
            NotLeading: none may be sent.
        """
        if not self.is_leader(now):
            raise NotLeading(self._lost or "the Lease is not held, or was not renewed in time")
        return self._renewed_at + self.terms.duration - now


log = logging.getLogger(__name__)

BeforeLeading = Callable[[Client, Election], Awaitable[None]]
"""Called with the Lease held, before `leading` is set; again as long as it raises ClusterError."""


class Elector:
    """One candidate for a Lease."""

    def __init__(
        self,
        cluster: Client,
        election: Election,
        leading: asyncio.Event,
        wall: Callable[[], float],
        before_leading: BeforeLeading | None = None,
    ) -> None:
        """`cluster` must have no gate, and give up soon; `leading` is set once this process leads,
        and it ends when that is over. `wall` gives unix seconds for people.
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
        """Campaign until elected, then renew the Lease.

        Raises:
            LeadershipLost: another may lead by now.
        """
        await self._read_lease()
        while True:
            step = self._leadership.step(self._clock())
            if step.turn is Turn.LOST:
                raise LeadershipLost(f"Lease {self._lease}: {step.why}")
            if step.turn is not Turn.WAIT:
                await self._write_lease()
            # The Lease alone is not enough: work begins only after what must be recorded before the
            # first write.
            elif self.is_leader() and not self.leading.is_set():
                await self._start_leading()
            else:
                await asyncio.sleep(step.seconds)
                # A leader learns of a change by its own renewal; only a candidate has to look.
                if not self.leading.is_set():
                    await self._read_lease()

    def answer_within(self) -> float:
        """The gate of all writes of this process: see Leadership.answer_within."""
        return self._leadership.answer_within(self._clock())

    def is_leader(self) -> bool:
        """True if writes may be sent now."""
        return self._leadership.is_leader(self._clock())

    def free_since(self) -> float | None:
        """Loop time of the former leader's last sign, or of the own start; None for a follower."""
        return self._free_since if self.leading.is_set() else None

    async def release(self) -> None:
        """End the lead and release the Lease; nothing is written after that in any case."""
        lease = self._leadership.resign(self._timestamp())
        if lease is None:
            return
        try:
            await self._write_release(lease)
        except ClusterError as error:
            log.warning(
                "the Lease is not released, others take it when its time is over: %s", error
            )
        else:
            log.info("Lease %s is released", self._lease)

    async def _write_release(self, lease: Lease) -> None:
        try:
            await self._cluster.replace(LEASES, *self._lease, self._body(lease))
        except Conflict:
            # A renewal that the end of this process cut off may have been taken all the same.
            newest_lease = lease_of(await self._cluster.get(LEASES, *self._lease))
            if newest_lease.holder != self._identity:
                raise
            released_lease = replace(lease, version=newest_lease.version)
            await self._cluster.replace(LEASES, *self._lease, self._body(released_lease))

    async def _read_lease(self) -> None:
        try:
            lease: Object | None = await self._cluster.get(LEASES, *self._lease)
        except NotFound:
            lease = None
        except ClusterError as error:
            log.warning("%s; trying again", error)
            await asyncio.sleep(self._leadership.terms.poll)
            return
        self._leadership.record_lease(lease_of(lease) if lease else None, self._clock())

    async def _write_lease(self) -> None:
        """Takes or renews the Lease; where somebody was faster, looks what is there now."""
        # Taken before the request: others count from when they see the renewal, which is later.
        sent_at = self._clock()
        if not self.is_leader():
            self._free_since = max(self._leadership.changed_at, self._began)
        lease = self._leadership.proposal(sent_at, self._timestamp())
        try:
            answer = await self._send(lease)
        # Another process wrote or deleted the Lease meanwhile: the Lease as it is now decides what
        # to do next.
        except (AlreadyExists, Conflict, NotFound) as error:
            log.info(
                "Lease %s has changed; looking again", self._lease, extra={"detail": str(error)}
            )
            await self._read_lease()
            return
        except ClusterError as error:
            log.warning("%s; trying again", error)
            return
        self._leadership.record_write(lease_of(answer), sent_at, self._clock())

    async def _start_leading(self) -> None:
        """Lets the work begin, once what has to come before it is done."""
        try:
            if self._before_leading:
                await self._before_leading(self._cluster, self._election)
        except ClusterError as error:
            log.warning(
                "%s holds Lease %s but does not lead yet: %s", self._identity, self._lease, error
            )
            await asyncio.sleep(self._leadership.terms.poll)
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
