"""Several candidates for one Lease: at most one leads at any moment, and in the end somebody does.

The candidates are the real state machine and the real elector; the API server is a Lease with a
resourceVersion. What becomes of requests, what clocks show and when a process stands still is
generated.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.leader_election import Election, Elector, Leadership, Terms, Turn, lease_of
from grpo_kube.objects.errors import AlreadyExists, Conflict, LeadershipLost, NotFound, Unavailable
from grpo_kube.objects.resources import Object, ObjectKey, Resource
from tests.generated import cases
from tests.virtual_time import virtually

TERMS = Terms(10.0)

LEASES: Any = None
"""The store holds one object, so it does not look at the resource."""


class Store:
    """The API server's Lease; what happens to a request is drawn: it arrives late or never, its
    answer gets lost."""

    def __init__(self) -> None:
        self.item: Object | None = None
        self.version = 0
        self.fate: Callable[[str], str] = lambda _: "ok"
        self.requests: list[str] = []

    async def get(self, _: Resource, __: str, ___: str) -> Object:
        self._ask("get")
        if self.item is None:
            raise NotFound("none")
        return self.item

    async def create(self, _: Resource, __: str, body: Object) -> Object:
        return self._write("create", body, self.item is None, AlreadyExists("there is one"))

    async def replace(self, _: Resource, __: str, ___: str, body: Object) -> Object:
        if self.item is None:
            self._ask("replace")
            raise NotFound("none")
        same = body["metadata"]["resourceVersion"] == self.item["metadata"]["resourceVersion"]
        return self._write("replace", body, same, Conflict("changed"))

    def _write(self, verb: str, body: Object, allowed: bool, refused: Exception) -> Object:
        fate = self._ask(verb)
        if not allowed:
            raise refused
        self.version += 1
        self.item = {"metadata": {"resourceVersion": str(self.version)}, "spec": body["spec"]}
        if fate == "lost":
            raise Unavailable("the answer got lost")
        return self.item

    def _ask(self, verb: str) -> str:
        self.requests.append(verb)
        fate = self.fate(verb)
        if fate == "away":
            raise Unavailable("no answer")
        return fate


@dataclass
class Candidate:
    """One process: its clock has an offset of its own and stands still while it is stopped."""

    store: Store
    name: str
    offset: float
    ahead: float
    """By how much its wall clock is off, in seconds."""
    one: Leadership = field(init=False)
    wakes: float = 0.0
    runs: int = 0

    def __post_init__(self) -> None:
        self.one = Leadership(self.name, TERMS)

    def now(self, real: float) -> float:
        return real + self.offset

    def leads(self, real: float) -> bool:
        return self.one.is_leader(self.now(real))

    async def turn(self, real: float, late: float) -> None:
        """What the elector does in one round, an answer coming `late` seconds after it was asked
        for."""
        now = self.now(real)
        step = self.one.step(now)
        if step.turn is Turn.LOST:
            self.runs += 1
            self.one = Leadership(f"{self.name}.{self.runs}", TERMS)
            self.wakes = real + 1.0
        elif step.turn is Turn.WAIT:
            self.wakes = real + step.seconds
        else:
            await self._write(now, late, f"{real + self.ahead}")
            self.wakes = real + late
            return
        if not self.leads(real):
            await self.look(now)

    async def look(self, now: float) -> None:
        with contextlib.suppress(
            Unavailable
        ):  # lost, as drawn: the candidate goes on knowing what it knew
            try:
                self.one.record_lease(lease_of(await self.store.get(LEASES, "", "")), now)
            except NotFound:
                self.one.record_lease(None, now)

    async def _write(self, now: float, late: float, stamp: str) -> None:
        lease = self.one.proposal(now, stamp)
        body = {"metadata": {"resourceVersion": lease.version}, "spec": lease.spec}
        with contextlib.suppress(
            Unavailable
        ):  # lost, as drawn: whether it was written shows in a later look
            try:
                create, replace = self.store.create, self.store.replace
                send = replace(LEASES, "", "", body) if lease.version else create(LEASES, "", body)
                self.one.record_write(lease_of(await send), now, now + late)
            except (Conflict, AlreadyExists, NotFound):
                await self.look(now)


FATES = ["ok"] * 6 + ["lost", "away"]


class Story:
    """Candidates in real time, drawn from one seed: their clocks, fates of requests, pauses of
    whole processes."""

    def __init__(self, seed: int) -> None:
        self.chance, self.store, self.real = random.Random(seed), Store(), 0.0
        self.all = [
            Candidate(
                self.store,
                f"c{number}",
                self.chance.uniform(-1e6, 1e6),
                self.chance.uniform(-1e6, 1e6),
            )
            for number in range(self.chance.randint(2, 4))
        ]

    @property
    def leaders(self) -> int:
        return sum(one.leads(self.real) for one in self.all)

    def next(self) -> Candidate:
        one = min(self.all, key=lambda candidate: candidate.wakes)
        self.real = max(self.real, one.wakes)
        return one

    async def troubled(self, seconds: float) -> None:
        self.store.fate = lambda _: self.chance.choice(FATES)
        while self.real < seconds:
            one = self.next()
            assert self.leaders <= 1
            if self.chance.random() < 0.05:  # it is stopped for a while, and goes on where it was
                one.wakes = self.real + self.chance.uniform(0.0, 25.0)
                continue
            await one.turn(self.real, self.chance.uniform(0.001, 4.0))
            assert self.leaders <= 1

    async def quiet(self, seconds: float) -> None:
        self.store.fate = lambda _: "ok"
        while self.real < seconds:
            await self.next().turn(self.real, 0.001)


@settings(max_examples=cases(100))
@given(st.integers(0, 2**32))
def test_at_most_one_leads_at_any_moment_and_somebody_does_in_the_end(seed: int) -> None:
    story = Story(seed)
    virtually(story.troubled(60.0))
    virtually(story.quiet(120.0))
    assert story.leaders == 1


def elector(store: Store, name: str) -> Elector:
    clock = asyncio.get_running_loop().time
    election = Election(lease=ObjectKey("n", "lease"), identity=name)
    return Elector(store, election, asyncio.Event(), lambda: 1.7e9 + clock())  # type: ignore[arg-type]


def test_a_follower_takes_over_after_the_duration_or_soon_after_a_release() -> None:
    async def story() -> tuple[float, float]:
        store, clock = Store(), asyncio.get_running_loop().time
        first, second, third = (elector(store, name) for name in "abc")
        running = asyncio.create_task(first.run())
        await first.leading.wait()
        follower = asyncio.create_task(second.run())
        await asyncio.sleep(31.0)
        assert (first.is_leader(), second.is_leader()) == (True, False)
        running.cancel()
        killed_at = clock()
        await second.leading.wait()
        taken_after = clock() - killed_at
        assert not first.is_leader()
        others = asyncio.create_task(third.run())
        await asyncio.sleep(5.0)
        follower.cancel()
        await second.release()
        released_at = clock()
        await third.leading.wait()
        others.cancel()
        assert store.item
        assert store.item["spec"]["leaseTransitions"] == 2
        return taken_after, clock() - released_at

    after_kill, after_release = virtually(story())
    assert 8.0 <= after_kill <= 11.0
    assert after_release <= 1.0


def test_an_elector_that_can_not_renew_ends_the_process() -> None:
    async def story() -> float:
        store = Store()
        one = elector(store, "a")
        running = asyncio.create_task(one.run())
        await one.leading.wait()
        store.fate = lambda _: "away"
        since = asyncio.get_running_loop().time()
        with pytest.raises(LeadershipLost, match="Lease n/lease: the Lease was not renewed for"):
            await running
        await one.release()
        assert store.requests.count("replace") == 2, (
            "what is lost is not released, for it may be another's"
        )
        return asyncio.get_running_loop().time() - since

    assert virtually(story()) <= 6.0


def test_a_lost_answer_or_a_deleted_lease_costs_no_leadership() -> None:
    async def story() -> list[str]:
        store, fates = Store(), ["ok", "ok", "lost", "ok"]
        store.fate = lambda _: fates.pop(0) if fates else "ok"
        one = elector(store, "a")
        running = asyncio.create_task(one.run())
        await asyncio.sleep(9.0)
        assert one.is_leader()
        store.item = None
        await asyncio.sleep(9.0)
        assert one.is_leader()
        assert not running.done()
        running.cancel()
        item: Any = store.item
        assert item["spec"]["holderIdentity"] == "a"
        return store.requests

    assert virtually(story())[:2] == ["get", "create"]


class Slow(Store):
    """An API server that takes a Lease at once and answers 2.5 s later."""

    async def replace(self, kind: Resource, namespace: str, name: str, body: Object) -> Object:
        answer = await super().replace(kind, namespace, name, body)
        await asyncio.sleep(2.5)
        return answer


def test_an_elector_holds_the_lease_from_when_it_asked_and_not_from_the_answer() -> None:
    async def story() -> float:
        one = elector(Slow(), "a")
        running = asyncio.create_task(one.run())
        await one.leading.wait()
        acquired_at = asyncio.get_running_loop().time()
        await asyncio.sleep(TERMS.retry + 2.6)  # the first renewal has been answered
        running.cancel()
        renewal_sent_at = acquired_at + TERMS.retry
        return (
            renewal_sent_at
            + TERMS.duration
            - asyncio.get_running_loop().time()
            - one.answer_within()
        )

    assert virtually(story()) == pytest.approx(0.0)


@pytest.mark.parametrize("taken_by", ["a", "b"])
def test_a_renewal_that_was_cut_off_does_not_keep_the_lease_from_its_release(taken_by: str) -> None:
    async def story() -> str:
        store = Slow()
        one = elector(store, "a")
        running = asyncio.create_task(one.run())
        await one.leading.wait()
        await asyncio.sleep(TERMS.retry + 1.0)  # the first renewal is taken, and not answered yet
        running.cancel()
        item: Any = store.item
        item["spec"]["holderIdentity"] = taken_by
        await one.release()
        last: Any = store.item
        holder: str = last["spec"].get("holderIdentity", "")
        return holder

    assert virtually(story()) == {"a": "", "b": "b"}[taken_by]
