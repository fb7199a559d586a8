"""What rank 0 says while it trains, for pods that only pretend: at addresses of this machine
anything can be said.

Each address of the loopback network can be some pod's; what is asked there answers as a fault has
chosen.
"""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from grpo_api.text.contract import PROGRESS_PORT
from tests.integration.web_server import in_a_thread, listening

ADDRESSES = 16
Say = Callable[[], Awaitable[web.StreamResponse]]


class ProgressServer:
    """Serves at some addresses what `says` has for each; 404 where it has nothing."""

    def __init__(self) -> None:
        """Nobody listens yet."""
        self.addresses: tuple[str, ...] = ()
        self.says: dict[str, Say] = {}

    @contextmanager
    def running(self) -> Iterator["ProgressServer"]:
        """Serves while the block runs."""
        # of this process alone: others on this machine may do the same
        network = f"127.{random.randint(16, 250)}.{random.randint(0, 250)}"
        self.addresses = tuple(f"{network}.{number}" for number in range(1, ADDRESSES + 1))
        with in_a_thread(listening(self.addresses, PROGRESS_PORT, self._answer)):
            yield self

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        say = self.says.get(str(request.url.host))
        return await say() if say else web.Response(status=404)
