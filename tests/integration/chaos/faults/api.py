"""An API server on a bad day, by the proxy on the operator's way: for some seconds, while all else
goes on."""

import asyncio
import random
import threading

from aiohttp import web

from ...api_proxy import Spoil, is_watch
from ..world import World
from .base import Fault

LONGEST = 3.0
"""Seconds."""
SHARE = 0.5
"""Share of the requests that are spoiled meanwhile."""


def _for_some_seconds(world: World, chance: random.Random, answer: Spoil, what: str) -> str:
    """Spoils answers until the time is up or another such fault takes over."""
    seconds, proxy, dice = chance.uniform(0.5, LONGEST), world.proxy, random.Random(chance.random())

    async def spoil(request: web.Request) -> web.StreamResponse | None:
        return await answer(request) if dice.random() < SHARE else None

    def over() -> None:
        if proxy.spoil is spoil:
            proxy.spoil = None

    proxy.spoil = spoil
    timer = threading.Timer(seconds, over)
    timer.daemon = True
    timer.start()
    return f"{what} for {seconds:.1f} s"


class Answer:
    """A status for every request that it is asked about."""

    def __init__(
        self,
        code: int,
        text: str = "",
        kind: str = "application/json",
        after: float = 0,
        **headers: str,
    ) -> None:
        self._code, self._text, self._kind, self._after, self._headers = (
            code,
            text,
            kind,
            after,
            headers,
        )

    async def __call__(self, _: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(self._after)
        if not self._code:
            return None
        headers = {name.replace("_", "-"): value for name, value in self._headers.items()}
        return web.Response(
            status=self._code, text=self._text, content_type=self._kind, headers=headers
        )


def _status(code: int, reason: str) -> str:
    return (
        f'{{"kind": "Status", "status": "Failure", "code": {code}, "reason": "{reason}", '
        f'"message": "chaos"}}'
    )


def too_many_requests(world: World, chance: random.Random) -> str:
    """429 with Retry-After."""
    return _for_some_seconds(
        world, chance, Answer(429, _status(429, "TooManyRequests"), Retry_After="1"), "429"
    )


def server_errors(world: World, chance: random.Random) -> str:
    """500 or 503."""
    code = chance.choice((500, 503))
    return _for_some_seconds(world, chance, Answer(code, _status(code, "InternalError")), str(code))


def html_answers(world: World, chance: random.Random) -> str:
    """The page of a proxy in between, with an error's status or without."""
    code = chance.choice((200, 502, 403))
    return _for_some_seconds(
        world, chance, Answer(code, "<html>Gateway</html>", "text/html"), f"HTML {code}"
    )


def slow_answers(world: World, chance: random.Random) -> str:
    """Each takes a second more or less."""
    return _for_some_seconds(world, chance, Answer(0, after=chance.choice((0.3, 1.0, 2.5))), "slow")


def lost_answers(world: World, chance: random.Random) -> str:
    """Writes are done, and the connection breaks before the answer."""
    seconds, dice = chance.uniform(0.5, LONGEST), random.Random(chance.random())

    def lost(request: web.Request) -> bool:
        return request.method != "GET" and dice.random() < SHARE

    def over() -> None:
        if world.proxy.lost is lost:
            world.proxy.lost = lambda _: False

    world.proxy.lost = lost
    timer = threading.Timer(seconds, over)
    timer.daemon = True
    timer.start()
    return f"for {seconds:.1f} s"


def cut_watches(world: World, chance: random.Random) -> str:
    """All watches break, and for a while each new one at once."""
    if chance.random() < 0.5:
        world.proxy.cut_watches()
        return "once"

    async def close(request: web.Request) -> web.StreamResponse | None:
        return web.Response() if is_watch(request) else None

    told = _for_some_seconds(world, chance, close, "closed at once")
    world.proxy.cut_watches()
    return told


FAULTS = (
    Fault("API: 429", 2, too_many_requests, disturbs=True),
    Fault("API: 500 or 503", 2, server_errors, disturbs=True),
    Fault("API: HTML", 2, html_answers, disturbs=True),
    Fault("API: slow", 2, slow_answers, disturbs=True),
    Fault("API: lost answers", 3, lost_answers, disturbs=True),
    Fault("API: cut watches", 3, cut_watches, disturbs=True),
)
