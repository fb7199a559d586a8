"""Attempts of a run on an object store, each of which is struck at one of its requests, and a last
one that is not.

A strike falls on a request of some kind, before the store has carried it out or after, and takes
one pod or both. Or the attempt is cut off there: its requests wait until the next attempt has
claimed the run, and then come all the same.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from grpo_api.report.report import Result
from grpo_trainer.stores.run_store import StoredRun
from harness.programs.object_stores import BUCKET
from harness.programs.patience import Patience
from tests.support.ranks.pods import PATIENCE_SECONDS, Gang
from tests.trainer.store_gang import Run
from tests.trainer.store_proxy import Pace, StoreProxy, proxy_to

REQUESTS = {
    "probe": rf"(PUT|GET|POST) /{BUCKET}/.*/probe-\w+",
    "head read": r"GET .*/head\.json",
    "head write": r"PUT .*/head\.json",
    "part": r"PUT .*/checkpoint-\d+/.*\.\d{6}",
    "manifest": r"PUT .*/manifest\.json",
    "list": rf"GET /{BUCKET}",
    "deletion": rf"(POST /{BUCKET}|DELETE .*)",
    "manifest read": r"GET .*/manifest\.json",
    "part read": r"GET .*/checkpoint-\d+/.*\.\d{6}",
    "model": r"PUT .*/export/.*",
}
"""The kinds of requests that an attempt makes, by their words."""
MOST = {"part": 40, "part read": 12, "list": 6, "deletion": 4, "head read": 5, "head write": 4}
"""So many of a kind an attempt makes about, where it is more than two."""
WAYS = ("both before", "both after", "one before", "one after", "cut off")
STORM = 0.3
"""Share of requests that are refused in a storm."""


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls an attempt."""

    kind: str
    number: int
    """Which of these requests, from 0."""
    way: str
    pod: int = 0
    """The one that is taken."""
    stormy: bool = False
    pace: tuple[float, float] = (0.0, 0.0)
    """Seconds until an answer, and bytes per second."""


def drawn(chance: random.Random) -> Strike:
    """Any strike; one in three attempts meets a storm, one in three a slow store."""
    kind = chance.choice(list(REQUESTS))
    slow = (chance.uniform(0.0, 0.1), chance.uniform(1e6, 1e7))
    return Strike(
        kind,
        chance.randrange(MOST.get(kind, 2)),
        chance.choice(WAYS),
        chance.randrange(2),
        stormy=chance.random() < 1 / 3,
        pace=slow if chance.random() < 1 / 3 else (0.0, 0.0),
    )


@dataclass
class Door:
    """An attempt's own way to the store, at which it is struck."""

    number: int
    """The attempt's."""
    proxy: StoreProxy
    strike: Strike | None
    chance: random.Random
    claimed: threading.Event = field(default_factory=threading.Event)
    fallen: threading.Event = field(default_factory=threading.Event)
    """Set when the strike falls."""
    gang: Gang | None = None
    matching_requests: int = 0

    def __post_init__(self) -> None:
        """Opens it."""
        self.proxy.struck, self.proxy.passed = self._kill, self._hear
        if self.strike:
            self.proxy.pace = Pace(*self.strike.pace)
        self.proxy.reset(self._fault)

    def _fault(self, _: int, words: str) -> str:
        strike = self.strike
        if strike is None:
            return ""
        if self.fallen.is_set():
            return {"cut off": "held", "one before": "", "one after": ""}.get(
                strike.way, "cut before"
            )
        if re.fullmatch(REQUESTS[strike.kind], words):
            self.matching_requests += 1
        if self.matching_requests > strike.number:
            self.fallen.set()
            return "held" if strike.way == "cut off" else f"dies {strike.way.split()[1]}"
        return "503" if strike.stormy and self.chance.random() < STORM else ""

    def until(self, done: Callable[[], bool]) -> bool:
        """Wait until something is true or all pods have ended; whether it is true."""
        assert self.gang is not None
        patience = Patience(PATIENCE_SECONDS)
        while not done():
            if all(pod.poll() is not None for pod in self.gang.pods):
                return done()
            assert not patience.is_over, self.gang.log()[-4000:]
            time.sleep(0.05)
        return True

    def _kill(self) -> None:
        assert self.gang is not None, "pods meet before they ask for anything"
        assert self.strike is not None
        both = self.strike.way.startswith("both")
        for pod in self.gang.pods if both else self.gang.pods[self.strike.pod :][:1]:
            pod.kill()

    def _hear(self, words: str, status: int) -> None:
        if re.fullmatch(REQUESTS["head write"], words) and status == 200:
            self.claimed.set()


@contextmanager
def attempt(run: Run, number: int, strike: Strike | None, chance: random.Random) -> Iterator[Door]:
    """The pods of an attempt at their door."""
    with proxy_to(run.endpoint) as proxy:
        door = Door(number, proxy, strike, chance)
        try:
            with run.gang(number, proxy.url) as door.gang:
                yield door
        finally:
            proxy.released.set()


def story(run: Run, strikes: Sequence[Strike], chance: random.Random) -> list[Strike]:
    """Attempts that are struck one after the other, until one ends well; which strikes fell.

    After each end what counts is whole, and only the newest attempt has moved the head.
    """
    fallen: list[Strike] = []
    with ExitStack() as alive:
        old: Door | None = None
        for number, planned in enumerate([*strikes, None], 1):
            strike = _bearable(planned) if planned and old else planned
            door = alive.enter_context(attempt(run, number, strike, chance))
            if old and door.until(door.claimed.is_set):
                _go_on_in_vain(run, old, number)
                old = None
            if strike and strike.way == "cut off" and door.until(door.fallen.is_set):
                old = door
            else:
                _end(run, door, number)
            fallen += [strike] if strike and door.fallen.is_set() else []
            if not door.fallen.is_set():
                break
        assert old is None
    return fallen


def _bearable(strike: Strike) -> Strike:
    """A strike for an attempt beside one that was cut off: two of these at once are more than two
    cores bear."""
    return replace(strike, way="both before") if strike.way == "cut off" else strike


def _end(run: Run, door: Door, number: int) -> None:
    """The end of an attempt; a good one unless it was struck."""
    assert door.gang is not None
    run.ended(door.gang)
    head = run.whole_head()
    assert (head.attempt if head else 0) <= number
    if door.claimed.is_set():
        assert head is not None
        assert head.attempt == number
    if not door.fallen.is_set():
        assert door.gang.outcome().result is Result.SUCCEEDED, door.gang.log()[-4000:]


def _go_on_in_vain(run: Run, old: Door, newest: int) -> None:
    """The requests of an attempt that was cut off come through at last; it ends, and commits
    nothing."""
    assert old.gang is not None
    old.proxy.released.set()
    run.ended(old.gang)
    head = StoredRun(run.store).head()
    assert head is not None
    assert head.attempt == newest
    assert head.outcome is None or head.outcome.attempt != old.number
