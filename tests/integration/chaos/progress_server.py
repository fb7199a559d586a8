"""What rank 0 says while it trains, for pods that only pretend: at addresses of this machine anything can be said.

Each address of the loopback network can be some pod's; what is asked there answers as a fault has chosen.
"""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from aiohttp import web

from grpo_api.contract import PROGRESS_PORT

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
        """Serves in a thread of its own while the block runs."""
        started: Future[Callable[[], object]] = Future()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        thread.start()
        stop = started.result(30)
        try:
            yield self
        finally:
            stop()
            thread.join(30)

    async def _serve(self, started: "Future[Callable[[], object]]") -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            say = self.says.get(str(request.url.host))
            return await say() if say else web.Response(status=404)

        pages = web.Application()
        pages.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(pages, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        # of this process alone: others on this machine may do the same
        network = f"127.{random.randint(16, 250)}.{random.randint(0, 250)}"
        self.addresses = tuple(f"{network}.{number}" for number in range(1, ADDRESSES + 1))
        for address in self.addresses:
            await web.TCPSite(runner, address, PROGRESS_PORT).start()
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        started.set_result(lambda: loop.call_soon_threadsafe(stop.set))
        await stop.wait()
        await runner.cleanup()
