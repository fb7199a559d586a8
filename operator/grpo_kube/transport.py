"""Makes HTTP sessions for the API server, with credentials of the pod's service account or of a
kubeconfig.

Our own client and kopf's watch use the same kind of session. It adds TLS from the kubeconfig and an
Authorization header, and both follow renewed credentials. It also pauses before a watch whose
predecessors ended at once. The kubernetes package loads credentials and runs plug-ins for them.
"""

import asyncio
import os
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from yarl import URL

from .objects.errors import ConfigurationError, Stale
from .objects.times import doubled_pause

Send = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]

USER_AGENT = "grpo-kube"
"""What a session calls itself unless its owner has a name."""
SHORT_WATCH = 1.0
"""A watch that ends sooner, without a byte, is followed by a pause: the next one would end so, too.
In seconds."""
FIRST_PAUSE, LAST_PAUSE = 0.8, 30.0
"""Seconds before the next watch after one and after many short ones, as in client-go."""
NOTHING = "metadata.name=-"
"""Field selector that no object can meet: names begin with a letter or digit."""


@dataclass(slots=True)
class _Watch:
    began: float
    answer: aiohttp.ClientResponse
    short: int
    """Watches in a row that ended at once, up to the one before this."""

    @property
    def has_ended_at_once(self) -> bool:
        """True if the next watch is asked for so soon, and this one has brought nothing."""
        age = asyncio.get_running_loop().time() - self.began
        return age < SHORT_WATCH and not self.answer.content.total_bytes


class WatchPace:
    """A middleware that makes watches wait when those before them ended at once.

    A proxy or an overloaded server may close every watch cleanly as soon as it is opened. Nothing
    fails then, so nothing else would keep a client from asking thousands of times a second.
    """

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2)) -> None:
        """`jitter` is a factor around 1."""
        self._jitter = jitter
        self._last: dict[tuple[str | None, ...], _Watch] = {}

    async def __call__(self, request: aiohttp.ClientRequest, send: Send) -> aiohttp.ClientResponse:
        """Sends the request, after a pause if it is a watch that would only end at once."""
        if request.url.query.get("watch") != "true":
            return await send(request)
        # Two selections of one kind are watched at the same time, each from its resourceVersion on.
        query = request.url.query
        selection = request.url.path, query.get("labelSelector"), query.get("fieldSelector")
        last = self._last.get(selection)
        short = last.short + 1 if last and last.has_ended_at_once else 0
        if short:
            await asyncio.sleep(doubled_pause(FIRST_PAUSE, LAST_PAUSE, short) * self._jitter())
        began = asyncio.get_running_loop().time()
        answer = await send(request)
        self._last[selection] = _Watch(began, answer, short)
        return answer


class EmptyLists:
    """A middleware that empties the LISTs of a client, which then only watches; our informers list
    the objects.

    kopf asks for all objects in one LIST: ten thousand of 12 KB are 120 MB, held in memory and
    decoded at once. With this middleware its LIST selects no object, so kopf gets only the
    resourceVersion from which its watch begins. Then the informer lists on its own: that LIST is
    newer, so nothing is missed in between.

    After a restore of the API server from a backup a watch would wait for hours until the server is
    at its resourceVersion again, so the client has to begin again.
    """

    def __init__(
        self, listed: Mapping[str, Callable[[], None]], restores: Callable[[], int] = lambda: 0
    ) -> None:
        """`listed` has callbacks by the objects' URL path, called after each answered LIST;
        `restores` gives the number of restores that the informers have seen."""
        self._listed = listed
        self._restores = restores
        self._known_restores = restores()

    async def __call__(self, request: aiohttp.ClientRequest, send: Send) -> aiohttp.ClientResponse:
        """Sends the request, selecting nothing if it is a LIST of these objects.

        Raises:
            Stale: it is a watch, and the API server was restored since this client began.
        """
        # the API server may be served below a path of its own
        paths = (path for path in self._listed if request.url.path.endswith(path))
        on_list = self._listed.get(next(paths, ""))
        if on_list is None or request.method != "GET":
            return await send(request)
        if request.url.query.get("watch") == "true":
            if self._restores() != self._known_restores:
                raise Stale(f"WATCH {request.url.path}: the API server was restored from a backup")
            return await send(request)
        request.url = request.url.update_query(fieldSelector=NOTHING)
        answer = await send(request)
        if answer.ok:
            on_list()
        return answer


async def json_only(request: aiohttp.ClientRequest, send: Send) -> aiohttp.ClientResponse:
    """A middleware for a client that parses every success as JSON.

    A proxy in between may answer with an HTML page. kopf's watch would end with tracebacks on that,
    but it retries after a broken connection, so the answer is turned into one.

    Raises:
        aiohttp.ClientConnectionError: the answer is a success, and no JSON.
    """
    answer = await send(request)
    if answer.ok and answer.content_type != "application/json":
        answer.close()
        raise aiohttp.ClientConnectionError(
            f"{request.url.path} was answered with {answer.content_type}, not JSON"
        )
    return answer


def open_session(
    configuration: Configuration,
    *middlewares: aiohttp.ClientMiddlewareType,
    user_agent: str = USER_AGENT,
) -> aiohttp.ClientSession:
    """A session with the API server; the caller closes it.

    `middlewares` come before those of every session. Connections have no limit: each watch holds
    one for ever, and an operator of fifty namespaces has hundreds.
    """

    certificate, tls = configuration.cert_file, _tls(configuration)

    class Request(aiohttp.ClientRequest):
        """A request with the present client certificate, whose connections no earlier one has."""

        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal certificate, tls
            if configuration.cert_file != certificate:
                try:
                    tls = _tls(configuration)
                except ConfigurationError as error:
                    raise aiohttp.ClientConnectionError(str(error)) from error
                certificate = configuration.cert_file
            super().__init__(*args, **options | {"ssl": tls})

    async def authorize(request: aiohttp.ClientRequest, send: Send) -> aiohttp.ClientResponse:
        # A proxy may redirect to a login page elsewhere, which must not get the token, nor answer.
        if request.url.origin() != URL(configuration.host).origin():
            raise aiohttp.ClientConnectionError(f"redirected to {request.url.origin()}")
        request.headers.update(await authorization(configuration))
        request.server_hostname = configuration.tls_server_name
        credentials = _credentials(configuration)
        answer = await send(request)
        renewal = configuration.refresh_api_key_hook
        if answer.status == 401 and isinstance(renewal, CredentialRenewal):
            await renewal.replace(credentials, configuration)
        return answer

    return aiohttp.ClientSession(
        configuration.host,
        connector=aiohttp.TCPConnector(limit=0),
        headers={"User-Agent": user_agent, "Accept": "application/json"},
        middlewares=(*middlewares, authorize, WatchPace()),
        proxy=configuration.proxy,
        request_class=Request,
    )


async def read_beginning(stream: aiohttp.StreamReader, most: int) -> bytes:
    """Read an answer to its end, or to this number of bytes."""
    text = b""
    async for chunk in stream.iter_any():
        text += chunk
        if len(text) >= most:
            break
    return text[:most]


def _tls(configuration: Configuration) -> ssl.SSLContext:
    field = "certificate-authority"
    try:
        context = ssl.create_default_context(
            cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data
        )
        field = "client-certificate"
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    # ssl.SSLError is an OSError; text that is no ASCII is a ValueError
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{field} or {field}-data: {error}") from error
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _require_http_proxy(proxy: str | None) -> None:
    if proxy and URL(proxy).scheme not in ("http", "https"):
        raise ConfigurationError("proxy-url: the proxy is neither http:// nor https://")


_BEARER = "BearerToken"
_Credentials = tuple[str | None, str | None]
"""Token, and file of the client certificate."""


def _credentials(configuration: Configuration) -> _Credentials:
    return configuration.api_key.get(_BEARER), configuration.cert_file


class CredentialRenewal:
    """Loads the credentials of a kubeconfig again, once they expire or are refused.

    A plug-in need not say when a token expires, and never says it of a certificate.
    """

    def __init__(self, loader: Any) -> None:
        """`loader` is the kubernetes package's. It runs a plug-in again only once the token has
        expired, if the plug-in says when."""
        self._loader = loader
        self._lock = asyncio.Lock()

    async def __call__(self, configuration: Configuration) -> None:
        """Load a new token into the configuration if the present one has expired."""
        if hasattr(self._loader, "exec_plugin_expiry"):
            await self._loader.load_and_set(configuration)

    async def replace(self, refused: _Credentials, configuration: Configuration) -> None:
        """Load others than these into the configuration, unless somebody has already done so."""
        async with self._lock:
            if _credentials(configuration) == refused:
                await self._loader.load_and_set(configuration)


async def load(kubeconfig: str | None = None) -> Configuration:
    """The connection's settings: the given kubeconfig, else the service account, else the user's
    kubeconfig.

    Raises:
        ConfigurationError: none of them is there, or one can't be read.
    """
    configuration = Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        # Every pod has this variable. A kubeconfig that is named goes before it, for an operator
        # that is run by hand.
        if path or "KUBERNETES_SERVICE_HOST" not in os.environ:
            loader = await load_kube_config(config_file=path, client_configuration=configuration)
            configuration.refresh_api_key_hook = CredentialRenewal(loader)
        else:
            load_incluster_config(client_configuration=configuration)
        _tls(configuration)
        _require_http_proxy(configuration.proxy)
    # A file may hold anything, and the kubernetes package raises whatever it stumbles over.
    except Exception as error:
        where = path or str(Path("~/.kube/config"))
        raise ConfigurationError(
            f"no way to the API server: no service account and no usable {where}: {error}"
        ) from error
    return configuration


async def authorization(configuration: Configuration) -> dict[str, str]:
    """The Authorization header with a renewed token; empty for client certificates."""
    value = await configuration.get_api_key_with_prefix(_BEARER)
    return {"Authorization": value} if value else {}
