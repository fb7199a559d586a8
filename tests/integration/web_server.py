"""Web servers in threads of their own, for what has to answer while a test waits or an operator
runs beside it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def in_a_thread(server: AbstractAsyncContextManager[None]) -> Iterator[None]:
    """The server serves in an event loop of its own while the block runs.

    Raises:
        OSError: it can't listen there.
    """
    started: Future[Callable[[], object]] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_until_stopped(server, started)), daemon=True
    )
    thread.start()
    stop = started.result(30)
    try:
        yield
    finally:
        stop()
        thread.join(30)


async def _until_stopped(
    server: AbstractAsyncContextManager[None], started: "Future[Callable[[], object]]"
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    try:
        async with server:
            started.set_result(lambda: loop.call_soon_threadsafe(stop.set))
            await stop.wait()
    except OSError as error:
        if started.done():
            raise
        started.set_exception(error)


@asynccontextmanager
async def listening(addresses: Sequence[str], port: int, answer: Answer) -> AsyncIterator[None]:
    """Answers every path at the addresses."""
    pages = web.Application(client_max_size=0)
    pages.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(pages, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        for address in addresses:
            await web.TCPSite(runner, address, port).start()
        yield
    finally:
        await runner.cleanup()
