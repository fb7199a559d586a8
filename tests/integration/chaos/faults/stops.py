"""A leader that stands still in the middle of a write, as its node may, and goes on when another
leads."""

import asyncio
import random
import threading

from aiohttp import web

from grpo_api.text.contract import LEADER_PLURAL
from harness.programs.patience import wait_for_event
from harness.programs.processes import ClusterError, until

from ...api_proxy import at_once
from ..operator_process import OperatorProcess
from ..world import World
from . import ends, wishes
from .base import Fault

CAUSES = (*ends.FAULTS, *wishes.FAULTS)
"""What an operator answers with a write."""
WRITE_SECONDS = 10.0
"""Longest time until it does."""
TAKEOVER_SECONDS = 60.0
HELD_SHARE = 0.7
"""Share of the writes that reach the API server only when the leader goes on, as if it had stopped
just before it sent them. All others have been sent, and their answers wait."""
UNHELD = ("/leases", f"/{LEADER_PLURAL}", "/events")
"""Parts of the paths of writes that decide nothing about a job."""


class StoppedLeader:
    """Stops the leader when its next write comes to the proxy, and lets it go on when another
    leads."""

    def __init__(self, world: World, *, hold: bool) -> None:
        """`hold`: what it wrote reaches the API server only when it goes on."""
        self._world, self._hold = world, hold
        self.process: OperatorProcess | None = None
        """The one that was stopped."""
        self.stopped = threading.Event()
        self.writes: list[str] = []
        """What it had under way."""
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        world.proxy.delay = self._delay

    async def _delay(self, request: web.Request) -> None:
        if request.method == "GET" or any(part in request.path for part in UNHELD):
            return
        # the whole of it is here before its sender stands still
        await request.read()
        if self._over.is_set():
            return
        if self.process is None:
            self._loop = asyncio.get_running_loop()
            self.process = self._world.operators.named(self._world.proxy.sender(request))
            self.process.stop()
            self.stopped.set()
        if self._world.proxy.sender(request) == self.process.name:
            self.writes.append(f"{request.method} {request.path}")
            if self._hold:
                await self._over.wait()

    def go_on(self) -> None:
        """Lets it go on, and what it wrote with it, once another leads."""
        process = self.process
        # one that was killed meanwhile does not stand still any more
        if process and process.stopped:
            try:
                until("another to lead", self._another_leads, TAKEOVER_SECONDS)
            except ClusterError as error:
                process.unexpected.append(str(error))
        self._world.proxy.delay = at_once
        if self._loop:
            self._loop.call_soon_threadsafe(self._over.set)
        if process and process.stopped:
            process.go_on()

    def _another_leads(self) -> bool:
        self._world.operators.revive()
        return self._world.operators.leader() is not None


def leader_stopped(world: World, chance: random.Random) -> str:
    """SIGSTOP while it writes, and SIGCONT some faults later, when another leads."""
    if any(one.stopped for one in world.operators.all) or not world.operators.leader():
        return ""
    held, cause = chance.random() < HELD_SHARE, chance.choice(CAUSES)
    fault = StoppedLeader(world, hold=held)
    world.undo_after(chance.randint(3, 10), fault.go_on)
    cause.strike(world, chance)
    if not wait_for_event(fault.stopped, WRITE_SECONDS):
        return ""
    assert fault.process
    return f"{fault.process.name} in {' and '.join(fault.writes)}{', held' if held else ''}"


FAULTS = (Fault("leader stopped", 5, leader_stopped, disturbs=True),)
