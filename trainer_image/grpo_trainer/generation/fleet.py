"""Rank 0's engines: their addresses, their states, and the thread with the event loop that talks to
all of them.

The loop polls every engine, so that a death or a restart is noticed while rank 0 waits for
completions. The polls also show each engine during long steps that its trainer lives. They don't
count as progress of the run: only code that syncs weights or samples publishes the numbers.

EngineView holds the rules of one engine. It is used only under a version of the weights that this
process of it was proven to have. An engine that was out of reach, restarted or answered wrongly
must get the weights again first.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from grpo_api.plan.plan import EngineAddresses
from grpo_api.report.training_metrics import (
    ENGINE_CACHE,
    ENGINE_LOSSES,
    ENGINE_UP,
    ENGINE_VERSION,
    ENGINE_WAITING,
)

from ..engine_pod.messages import EngineState
from .engine_client import EngineClient, EngineFailed, EngineUnreachable

MAX_STRIKES = 2
"""Failed syncs after which a process is given up."""


@dataclass(slots=True)
class EngineView:
    """Rank 0's view of one engine pod, over all processes that the pod starts."""

    index: int
    """Of its pod, from 0."""
    host: str
    """DNS name or address."""
    incarnation: str | None = None
    """The process that last answered; None while it doesn't answer."""
    process: str | None = None
    """The pod's present process: the newest that has answered, also while it doesn't."""
    replaced: set[str] = field(default_factory=set)
    """Its processes before that."""
    version: int | None = None
    """What that process was proven to have."""
    given_up_incarnation: str | None = None
    """The process that gets no further chance."""
    losses: int = 0
    """Processes that were given up, or lost while they had weights; a lost process that is proven
    again may count again."""
    is_loss_counted: bool = False
    """Whether `losses` has the present process since its last proof."""
    strikes: int = 0
    """Syncs in a row that this process failed."""
    last_message: str = "has not answered yet"
    """What is known of it, for messages."""

    @property
    def name(self) -> str:
        """Name of the engine for messages."""
        return f"engine {self.index} at {self.host}"

    @property
    def is_usable(self) -> bool:
        """True if the engine may be sent weights."""
        return self.incarnation is not None and not self.is_condemned

    @property
    def is_condemned(self) -> bool:
        """True if the process that answers has been given up or replaced, and should make room for
        another."""
        if self.incarnation is None:
            return False
        return self.incarnation == self.given_up_incarnation or self.incarnation in self.replaced

    def is_serving(self, version: int | None) -> bool:
        """True if the engine may sample completions of this version."""
        return self.is_usable and version is not None and self.version == version

    def record_answer(self, incarnation: str) -> None:
        """Note that the engine answered as this process."""
        if incarnation != self.incarnation:
            # The new process has random weights until a sync.
            self.record_lost_weights("has restarted")
            self.incarnation = incarnation
        # Two processes at one address: as that of a lost node that is back beside its successor. No
        # sync could prove either of them while both answer.
        if incarnation in self.replaced:
            self.last_message = f"has two processes; {incarnation[:8]} was replaced and has to end"
        # A process that comes back keeps its strikes, and its loss has been counted.
        elif incarnation != self.process:
            if self.process is not None:
                self.replaced.add(self.process)
            self.process, self.strikes, self.is_loss_counted = incarnation, 0, False
        if self.version is None and self.is_usable:
            self.last_message = "is up and waits for weights"

    def record_absence(self, reason: str) -> None:
        """Note that the engine does not answer, or answers wrongly."""
        self.record_lost_weights(reason)
        self.incarnation = None

    def record_proof(self, version: int) -> None:
        """Note that the engine was proven to have this version."""
        self.version, self.strikes, self.is_loss_counted = version, 0, False
        self.last_message = f"serves version {version}"

    def record_failure(self, reason: str) -> None:
        """Note a failed sync or proof. After MAX_STRIKES in a row the process is given up."""
        # The first failure may be one of the transfer, so the weights are sent once more.
        self.strikes += 1
        if self.strikes >= MAX_STRIKES:
            self.give_up(reason)
        else:
            self.record_lost_weights(reason)

    def give_up(self, reason: str) -> None:
        """Give up the present process. The next process of the pod is used again."""
        self.record_lost_weights(reason)
        self._count_loss()
        self.given_up_incarnation = self.process

    def record_lost_weights(self, reason: str) -> None:
        """Note that the engine lost its proven weights; if it lives it may be sent weights
        again."""
        if self.version is not None:
            self._count_loss()
        self.version = None
        self.last_message = reason

    def _count_loss(self) -> None:
        if not self.is_loss_counted:
            self.losses += 1
        self.is_loss_counted = True


def engines_message(engines: Iterable[EngineView]) -> str:
    """The names and states of all engines, for messages."""
    return "; ".join(f"{engine.name} {engine.last_message}" for engine in engines)


T = TypeVar("T")
POLL_SECONDS = 1.0
MISSES = 3
"""Looks in a row without an answer in time after which an engine counts as gone; a refused
connection counts at once.
"""


@dataclass(slots=True)
class Engine:
    """One engine pod: its view, its client and its last state."""

    view: EngineView
    client: EngineClient
    state: EngineState | None = None
    """The state that the engine last reported; None before the first answer."""
    tokens_changed_at: float = 0.0
    """When its count of tokens was last seen to change, by the time of the engines' event loop."""
    is_syncing: bool = False
    """Whether a sync is under way, in which it may say of itself what it likes."""
    misses: int = 0

    def record_failure(self, error: EngineFailed, process: str | None, when: str = "") -> None:
        """Note how a sync or a proof of a process failed: a live process gets a strike, a dead one
        may come back as another."""
        # The failure says nothing of a process that has come since.
        if process == self.view.process:
            lost = self.view.record_absence if error.is_gone else self.view.record_failure
            lost(f"{error}{when}")


class Fleet:
    """All engines of the attempt."""

    def __init__(self, addresses: EngineAddresses, attempt: str) -> None:
        """Start to poll the engines; `attempt` is the value of the attempt header."""
        self.engines: list[Engine] = []
        self._loop = asyncio.new_event_loop()
        self._watches: list[asyncio.Task[None]] = []
        # A thread of its own, since the main thread blocks in collectives and training steps.
        threading.Thread(target=self._loop.run_forever, name="engines", daemon=True).start()
        self.call(self._open(addresses, attempt))

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the engines' thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engines' thread and return its result. Not to be called from that
        thread."""
        return self.start(work).result()

    def close(self) -> None:
        """Stop polling and close the connections."""
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def engines_message(self) -> str:
        """The names and states of all engines, for messages."""
        return engines_message(engine.view for engine in self.engines)

    def usable_engines(self) -> list[Engine]:
        """The engines that may be sent weights."""
        return [engine for engine in self.engines if engine.view.is_usable]

    async def await_engines(self, count: int, seconds: float) -> bool:
        """Wait until `count` engines are usable; return False if they are not within `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while len(self.usable_engines()) < count:
            if loop.time() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS / 4)
        return True

    def metrics(self, version: int | None) -> Mapping[str, float]:
        """The metrics of every engine; `version` is the newest."""
        values: dict[str, float] = {}
        for engine in self.engines:
            view, state, index = engine.view, engine.state, engine.view.index
            values[f"{ENGINE_UP.key}/{index}"] = float(view.is_serving(version))
            values[f"{ENGINE_LOSSES.key}/{index}"] = float(view.losses)
            if view.version is not None:
                values[f"{ENGINE_VERSION.key}/{index}"] = float(view.version)
            if state is not None:
                values[f"{ENGINE_WAITING.key}/{index}"] = float(state.waiting)
                values[f"{ENGINE_CACHE.key}/{index}"] = state.cache_used
        return values

    async def _open(self, addresses: EngineAddresses, attempt: str) -> None:
        # Every prompt is a request that stays open: aiohttp's limit of 100 connections would hold
        # prompts back.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        for index, host in enumerate(addresses.hosts):
            client = EngineClient(self._session, host, addresses.port, attempt)
            self.engines.append(Engine(EngineView(index, host), client))
        self._watches = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._session.close()

    async def _watch(self, engine: Engine) -> None:
        while True:
            await poll_engine(engine)
            await asyncio.sleep(POLL_SECONDS)


async def poll_engine(engine: Engine) -> None:
    """Poll an engine and update its view; send a condemned engine the request to end."""
    view, before, syncing = engine.view, engine.view.version, engine.is_syncing
    try:
        state = await engine.client.state()
        # An answer that was on its way during a sync may be of the weights before it.
        _note(
            engine, state, settled=not syncing and not engine.is_syncing and before == view.version
        )
        if view.is_condemned:
            await engine.client.end(view.last_message, state.incarnation)
    except EngineUnreachable as error:
        engine.misses += 1
        # A refused connection means that there is no process. A late answer may come from a busy
        # one.
        if error.is_gone or engine.misses >= MISSES:
            view.record_absence(str(error))
    except EngineFailed as error:
        view.record_absence(str(error))


def _note(engine: Engine, state: EngineState, *, settled: bool) -> None:
    """`settled`: nothing changed its version while the answer was on its way."""
    view = engine.view
    engine.misses = 0
    if engine.state is None or state.tokens != engine.state.tokens:
        engine.tokens_changed_at = asyncio.get_running_loop().time()
    engine.state = state
    view.record_answer(state.incarnation)
    if settled and view.version is not None and state.version != view.version:
        view.record_lost_weights(
            f"says that it has version {state.version}, where it was proven to have {view.version}"
        )
