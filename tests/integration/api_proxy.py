"""A proxy in front of the real API server that spoils some of its answers.

What an API server, a load balancer or a proxy does on a bad day can't be asked of a healthy one.
Everything else passes through untouched, watches included.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web

from harness.cluster import Cluster
from harness.controlplane import free_port
from tests.integration.web_server import in_a_thread, listening

Spoil = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""An answer of its own to a request, or None to let it pass."""
Lost = Callable[[web.Request], bool]
"""Whether the API server's answer to a request gets lost; what it asked for is done all the
same."""
Delay = Callable[[web.Request], Awaitable[None]]
"""Returns when a request may go on to the API server."""


async def at_once(_: web.Request) -> None:
    """A Delay of nothing."""


class ApiProxy:
    """Listens on loopback, without TLS, and asks the API server as an administrator, or as whose
    token a client has."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        """Writes the kubeconfig that leads here."""
        authority = cluster.control_plane.authority
        self._tls = ssl.create_default_context(cafile=str(authority.crt("ca")))
        self._tls.load_cert_chain(authority.crt("admin"), authority.key("admin"))
        # A certificate goes before a token.
        self._no_certificate = ssl.create_default_context(cafile=str(authority.crt("ca")))
        self._clients: dict[str, str] = {}
        self._target, self._port = cluster.url, free_port()
        self._folder = folder
        self.kubeconfig = self.kubeconfig_of("proxy")
        """For the administrator."""
        self.spoil: Spoil | None = None
        self.delay: Delay = at_once
        self.lost: Lost = lambda _: False
        self._watches: list[web.Request] = []
        self._cut: Callable[[], object] = str
        self.request_counts: Counter[str] = Counter()
        """Requests so far: `WATCH pods`, `LIST grpojobs`, and the methods of all others."""

    def kubeconfig_of(self, client: str, token: str = "") -> Path:
        """Writes a kubeconfig that leads here; the API server is asked with the token, if there is
        one."""
        self._clients[f"Bearer {token}"] = client
        file = self._folder / f"{client}.kubeconfig"
        file.write_text(_kubeconfig(f"http://127.0.0.1:{self._port}", token))
        return file

    def sender(self, request: web.Request) -> str:
        """The client whose token comes with this request."""
        return self._clients.get(request.headers.get("Authorization", ""), "")

    @contextmanager
    def running(self) -> Iterator["ApiProxy"]:
        """Serves while the block runs."""
        with in_a_thread(self._serving()):
            yield self

    def cut_watches(self) -> None:
        """Breaks the connections of all watches."""
        self._cut()

    def _hang_up_watches(self) -> None:
        for one in self._watches:
            hang_up(one)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def answer(request: web.Request) -> web.StreamResponse:
                self.request_counts[_name(request)] += 1
                spoiled = await self.spoil(request) if self.spoil else None
                if spoiled is None:
                    await self.delay(request)
                return spoiled or await self._pass(session, request)

            async with listening(["127.0.0.1"], self._port, answer):
                self._cut = lambda: loop.call_soon_threadsafe(self._hang_up_watches)
                yield

    async def _pass(
        self, session: aiohttp.ClientSession, request: web.Request
    ) -> web.StreamResponse:
        passed = ("Content-Type", "Accept", "Authorization")
        headers = {name: request.headers[name] for name in passed if name in request.headers}
        headers["Accept-Encoding"] = "identity"
        url, timeout = f"{self._target}{request.rel_url}", aiohttp.ClientTimeout(total=None)
        tls = self._no_certificate if "Authorization" in headers else self._tls
        answer = web.StreamResponse()
        try:
            body = await request.read() or None
            async with session.request(
                request.method, url, data=body, headers=headers, timeout=timeout, ssl=tls
            ) as upstream:
                if self.lost(request):
                    hang_up(request)
                answer = web.StreamResponse(
                    status=upstream.status, headers={"Content-Type": upstream.content_type}
                )
                with self._watched(request):
                    await answer.prepare(request)
                    async for chunk in upstream.content.iter_any():
                        await answer.write(chunk)
                    await answer.write_eof()
        except (
            aiohttp.ClientError,
            ConnectionError,
        ):  # either end is gone, so the other has nobody to talk to
            hang_up(request)
        return answer

    @contextmanager
    def _watched(self, request: web.Request) -> Iterator[None]:
        if not is_watch(request):
            yield
            return
        self._watches.append(request)
        try:
            yield
        finally:
            self._watches = [one for one in self._watches if one is not request]


def hang_up(request: web.Request) -> None:
    """Breaks the connection that a request came on."""
    if request.transport:
        request.transport.abort()


def is_watch(request: web.Request) -> bool:
    """Whether the request is a watch."""
    return request.query.get("watch") == "true"


def plural(request: web.Request) -> str:
    """The kind that a LIST or watch is about."""
    return request.path.rpartition("/")[2]


def _name(request: web.Request) -> str:
    if request.method != "GET":
        return request.method
    return f"{'WATCH' if is_watch(request) else 'LIST'} {plural(request)}"


def _kubeconfig(server: str, token: str) -> str:
    return yaml.safe_dump({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "nobody"}}],
        "clusters": [{"name": "proxy", "cluster": {"server": server}}],
        "users": [{"name": "nobody", "user": {"token": token} if token else {}}],
    })  # fmt: skip
