"""The API server: the only place from which the operator reads or changes anything in the cluster.

Exists so that everything else is pure or talks to the small Cluster protocol. HttpCluster speaks plain JSON over one
aiohttp session, set up from the kubernetes package's configuration: typed models would cost 50 MiB and half of the
burst's CPU. It adds time-outs, a retry budget, typed errors and a count of every request. Used by reconcile, watcher,
snapshot and events.
"""

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
from kubernetes.aio.client import Configuration
from pydantic_core import from_json

from grpo_api.contract import GROUP, PLURAL, VERSION

from ..errors import AlreadyExists, ClusterError, Conflict, Expired, NotFound, Refused, Unavailable
from ..names import MANAGER
from .credentials import authorization

Object = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
PAGE = 500
"""Objects per page of a LIST."""
TRIES = 4
REQUEST_SECONDS, LIST_SECONDS = 15.0, 60.0
SILENCE_SECONDS = 90.0
"""A watch without even a bookmark for this long is dead: the server sends one a minute."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object by its path: `base` such as `/apis/batch/v1`, `plural` such as `jobs`."""

    base: str
    plural: str

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The URL path of an object, of a namespace's objects, or of all."""
        middle = f"/namespaces/{namespace}" if namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{self.base}{middle}/{self.plural}{tail}"


GRPOJOBS = Resource(f"/apis/{GROUP}/{VERSION}", PLURAL)
JOBS = Resource("/apis/batch/v1", "jobs")
PODS = Resource("/api/v1", "pods")
SERVICES = Resource("/api/v1", "services")
CLAIMS = Resource("/api/v1", "persistentvolumeclaims")
EVENTS = Resource("/api/v1", "events")
NODES = Resource("/api/v1", "nodes")
PRIORITY_CLASSES = Resource("/apis/scheduling.k8s.io/v1", "priorityclasses")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a resource: of one namespace or all, by labels and fields."""

    resource: Resource
    namespace: str | None = None
    labels: str = ""
    fields: str = ""

    def query(self, **more: str | int) -> dict[str, str]:
        """The URL query."""
        given: Mapping[str, str | int] = {"labelSelector": self.labels, "fieldSelector": self.fields, **more}
        return {key: str(value) for key, value in given.items() if value}


class Cluster(Protocol):
    """What the operator may ask of a cluster. Every method raises ClusterError or one of its kinds."""

    def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """A LIST in pages, each with the list's resourceVersion."""
        ...

    def watch(self, selection: Selection, version: int, seconds: float) -> AsyncIterator[tuple[str, Object]]:
        """Events since a resourceVersion, as (type, object), for at most so long."""
        ...

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object."""
        ...

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """POST; returns the object as the server keeps it."""
        ...

    async def patch_status(self, namespace: str, name: str, patch: Object) -> Object:
        """Merge-patches a GRPOJob's status; the patch carries metadata.resourceVersion."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Deletes an object in the background, if it still has that uid; one that is gone is fine."""
        ...

    async def delete_all(self, selection: Selection) -> None:
        """Deletes what is selected."""
        ...


CountRequest = Callable[[str, str, int], None]
"""Called with verb, resource and HTTP status (0 without an answer) of every request."""


class HttpCluster:
    """A Cluster over HTTP; use it as an async context manager."""

    def __init__(self, configuration: Configuration, count: CountRequest = lambda *_: None) -> None:
        """Takes the connection's settings; `count` hears of every request."""
        self._configuration = configuration
        self._count = count
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens the connection pool."""
        connector = aiohttp.TCPConnector(ssl=_tls(self._configuration), limit=64)
        self._session = aiohttp.ClientSession(
            self._configuration.host,
            connector=connector,
            headers={"User-Agent": MANAGER, "Accept": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        if self._session:
            await self._session.close()

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """See Cluster."""
        token = ""
        while True:
            query = selection.query(limit=PAGE) | ({"continue": token} if token else {})
            path = selection.resource.path(selection.namespace)
            found = await self._call("LIST", selection.resource, path, query=query, seconds=LIST_SECONDS)
            yield found["items"], int(found["metadata"]["resourceVersion"])
            token = found["metadata"].get("continue", "")
            if not token:
                return

    async def watch(self, selection: Selection, version: int, seconds: float) -> AsyncIterator[tuple[str, Object]]:
        """See Cluster."""
        query = selection.query(
            watch="true", resourceVersion=version, allowWatchBookmarks="true", timeoutSeconds=max(1, int(seconds))
        )
        path = selection.resource.path(selection.namespace)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=SILENCE_SECONDS)
        headers = await authorization(self._configuration)
        try:
            async with self._open.get(path, params=query, headers=headers, timeout=timeout) as answer:
                self._count("WATCH", selection.resource.plural, answer.status)
                if answer.status >= 400:
                    raise _error("WATCH", path, answer.status, await answer.read())
                async for line in _lines(answer.content):
                    event = from_json(line)
                    if event["type"] == "ERROR":
                        raise _error("WATCH", path, event["object"].get("code", 0), line)
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"WATCH {path}: {error!r}") from error

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """See Cluster."""
        return await self._call("GET", resource, resource.path(namespace, name))

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """See Cluster."""
        return await self._call("POST", resource, resource.path(namespace), body=body)

    async def patch_status(self, namespace: str, name: str, patch: Object) -> Object:
        """See Cluster."""
        return await self._call("PATCH", GRPOJOBS, GRPOJOBS.path(namespace, name, "status"), body=patch)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """See Cluster."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", resource, resource.path(namespace, name), body=options)
        except (NotFound, Conflict):
            # gone already, or the name belongs to another object by now: either way ours is deleted
            return

    async def delete_all(self, selection: Selection) -> None:
        """See Cluster."""
        path = selection.resource.path(selection.namespace)
        await self._call("DELETE", selection.resource, path, query=selection.query(), seconds=LIST_SECONDS)

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("HttpCluster is used outside its `async with`")
        return self._session

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        seconds: float = REQUEST_SECONDS,
    ) -> Object:
        """One request with its tries. Every request of ours may be sent twice: creates fail on their name, patches on
        their resourceVersion, and both are then looked into."""
        for attempt in range(1, TRIES + 1):
            try:
                return await self._once(verb, resource, path, body=body, query=query, seconds=seconds)
            except Unavailable as error:
                if attempt == TRIES:
                    raise
                await asyncio.sleep(_pause(attempt, error))
        raise AssertionError("the last try returns or raises")

    async def _once(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        body: Object | None,
        query: Mapping[str, str] | None,
        seconds: float,
    ) -> Object:
        headers = await authorization(self._configuration)
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if verb == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        method, timeout = "GET" if verb == "LIST" else verb, aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._open.request(
                method, path, params=query, data=data, headers=headers, timeout=timeout
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._count(verb, resource.plural, 0)
            raise Unavailable(f"{verb} {path}: {error!r}") from error
        self._count(verb, resource.plural, answer.status)
        if answer.status >= 400:
            raise _error(verb, path, answer.status, text, answer.headers.get("Retry-After", ""))
        found: Object = from_json(text)
        return found


def _pause(attempt: int, error: Unavailable) -> float:
    """Seconds before the next try: what the server asks for, at most 5, else doubling with jitter."""
    return min(5.0, error.retry_after or 0.2 * 2.0**attempt * random.uniform(0.5, 1.0))


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The stream's lines, of any length: aiohttp's own line reader gives up at 64 KiB."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


_KINDS: dict[int, type[ClusterError]] = {404: NotFound, 410: Expired}


def _error(verb: str, path: str, code: int, text: bytes, retry_after: str = "") -> ClusterError:
    """The error that an answer stands for."""
    try:
        said = from_json(text)
        said = said.get("object", said).get("message") or said
    except (ValueError, AttributeError):
        said = text[:500].decode(errors="replace")
    message = f"{verb} {path}: {code} {said}"
    if code == 429 or code >= 500 or code == 0:
        return Unavailable(message, code, float(retry_after) if retry_after.isdecimal() else None)
    if code == 409:
        return (AlreadyExists if verb == "POST" else Conflict)(message, code)
    return _KINDS.get(code, Refused)(message, code)
