"""Defines Client, which sends requests to the API server, and how a LIST is read page by page.

It sends plain JSON, with time-outs, a retry budget, typed errors and a count of requests. The typed
models of the kubernetes package would cost 50 MiB and half of the CPU time of a burst. So only its
configuration is used.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from math import inf
from typing import Protocol, Self, TypeVar

import aiohttp
from kubernetes.aio.client import Configuration
from pydantic_core import from_json

from .objects.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    Expired,
    Forbidden,
    NotFound,
    Stale,
    Unavailable,
)
from .objects.json_reader import JsonObject, Unreadable
from .objects.resources import Object, Resource, Selection
from .pacing import yield_often
from .transport import USER_AGENT, open_session

T = TypeVar("T")
LIST_TRIES = 3


class ObservedObject(Protocol):
    """An object as it was observed: what is deleted must be that version of it."""

    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


MERGE_PATCH = "application/merge-patch+json"
PAGE = 100
"""Objects per page of a LIST. Decoding a page holds everybody up: 20 ms for GRPOJobs of 10 KB."""
TRIES = 4
REQUEST_SECONDS, LIST_SECONDS = 15.0, 60.0
SILENCE_SECONDS = 150.0
"""A watch that is silent for so long is dead: the server sends a bookmark a minute or later. A LIST
comes before the next one."""


CountRequest = Callable[[str, str, int], None]
"""Called with verb, resource and HTTP status (0 without an answer) of every request."""
Gate = Callable[[], float]
"""Returns the seconds that a write may take; raises NotLeading if none may be sent."""
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
TryAgain = Callable[[str], bool]
"""Called with an error's message: True if the same request may work later, whatever the status."""


class Client:
    """The requests that an operator sends to a cluster; use it as an async context manager.

    Every method raises ClusterError.
    """

    def __init__(
        self,
        configuration: Configuration,
        count: CountRequest = lambda *_: None,
        *,
        gate: Gate = lambda: inf,
        try_again: TryAgain = lambda _: False,
        user_agent: str = USER_AGENT,
        tries: int = TRIES,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Take the connection's settings.

        Args:
            configuration: address and credentials of the API server.
            count: called with each request's verb, resource and status.
            gate: asked before each write.
            try_again: called with the message of each error answer; True raises Unavailable,
                whatever the status.
            user_agent: how this client names itself.
            tries: how often a request about one object is sent at most.
            seconds: longest time of each try.
        """
        self._configuration = configuration
        self._count = count
        self._gate = gate
        self._try_again = try_again
        self._user_agent = user_agent
        self._tries = tries
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens the connection pool."""
        self._session = open_session(self._configuration, user_agent=self._user_agent)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        if self._session:
            await self._session.close()

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """A LIST in pages, each with its resourceVersion; Expired when its pages are gone."""
        # In pages: one LIST of ten thousand objects of 12 KB is 120 MB, which is decoded and held
        # at once.
        token = ""
        while True:
            query = selection.query(limit=PAGE) | ({"continue": token} if token else {})
            path = selection.resource.path(selection.namespace)
            response = await self._call(
                "LIST", selection.resource, path, query=query, seconds=LIST_SECONDS
            )
            items, version, token = _page(path, response)
            yield items, version
            if not token:
                return

    async def watch(
        self, selection: Selection, version: int, seconds: float
    ) -> AsyncIterator[tuple[str, Object]]:
        """Events since a resourceVersion, as (type, object), for at most so long."""
        query = selection.query(
            watch="true",
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=max(1, int(seconds)),
        )
        path = selection.resource.path(selection.namespace)
        # The server ends a watch after `timeoutSeconds`. A connection that died silently would
        # never end: a bookmark comes every minute, so a longer silence is an error.
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_SECONDS, sock_read=SILENCE_SECONDS
        )
        try:
            async with self._active_session.get(path, params=query, timeout=timeout) as answer:
                self._count("WATCH", selection.resource.plural, answer.status)
                if answer.status >= 400:
                    raise self._error("WATCH", path, answer.status, await answer.read())
                async for line in _lines(answer.content):
                    yield self._event(path, line)
        # It may never receive anything: after a restore from a backup the server waits until it
        # is at this version again, which takes hours. A LIST shows where it is.
        except aiohttp.SocketTimeoutError as error:
            message = f"WATCH {path}: nothing was received for {SILENCE_SECONDS:.0f} s"
            raise Stale(message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"WATCH {path}: {error!r}") from error

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object."""
        return await self._call("GET", resource, resource.path(namespace, name))

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """POST; returns the object as the server keeps it."""
        # without Strict the server drops fields that it doesn't know, and a user's typo would
        # change the pods silently
        return await self._call(
            "POST",
            resource,
            resource.path(namespace),
            body=body,
            query={"fieldValidation": "Strict"},
        )

    async def replace(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """PUT of a whole object, with the resourceVersion of what was read."""
        return await self._call("PUT", resource, resource.path(namespace, name), body=body)

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, subresource: str = ""
    ) -> Object:
        """Merge-patches an object, or a subresource of it."""
        return await self._call(
            "PATCH", resource, resource.path(namespace, name, subresource), body=patch
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, observed_object: ObservedObject
    ) -> None:
        """Delete an object in the background if it has this uid and version; do nothing if it is
        gone.

        Conflict if it has changed since it was read, or another object has its name.
        """
        # Between the look and this request the object may have changed, or its name may have gone
        # to another one.
        preconditions = {
            "uid": observed_object.uid,
            "resourceVersion": str(observed_object.version),
        }
        options = {"propagationPolicy": "Background", "preconditions": preconditions}
        with contextlib.suppress(NotFound):
            await self._call("DELETE", resource, resource.path(namespace, name), body=options)

    async def delete_all(self, selection: Selection) -> None:
        """Delete the selected objects. It selects by uid and attempt, as it may come late."""
        path = selection.resource.path(selection.namespace)
        await self._call(
            "DELETE", selection.resource, path, query=selection.query(), seconds=LIST_SECONDS
        )

    async def is_discovered(self, resource: Resource) -> bool:
        """True if the API server's discovery lists the resource of an API group. Discovery is the
        last to show a new resource.

        Raises:
            ClusterError: it can't be asked.
        """
        group, _, _ = resource.base.removeprefix("/apis/").partition("/")
        groups = await self._call("GET", resource, "/apis")
        if group not in _names("/apis", groups, "groups"):
            return False
        try:
            response = await self._call("GET", resource, resource.base)
        except NotFound:
            return False
        return resource.plural in _names(resource.base, response, "resources")

    @property
    def _active_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Client is used outside its `async with`")
        return self._session

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Object:
        """Send a request, at most `tries` times while Unavailable; return the JSON object."""
        # Every request may be sent twice, so a try whose answer got lost does no harm: a second
        # create fails on its name, a second patch on its resourceVersion, and the caller looks at
        # what is there.
        for attempt in range(1, self._tries + 1):
            try:
                return await self._send_once(
                    verb, resource, path, body=body, query=query, seconds=seconds or self._seconds
                )
            except Unavailable as error:
                if attempt == self._tries:
                    raise
                await asyncio.sleep(_retry_delay(attempt, error))
        raise AssertionError("the last try returns or raises")

    async def _send_once(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        body: Object | None,
        query: Mapping[str, str] | None,
        seconds: float,
    ) -> Object:
        headers: dict[str, str] = {}
        data: bytes | None = None
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if verb == "PATCH" else "application/json"
            data = json.dumps(body, separators=(",", ":")).encode()
        if verb in WRITES:
            # A write must have arrived before another operator may lead; the gate raises if this
            # one leads no more.
            seconds = min(seconds, self._gate())
        method, timeout = "GET" if verb == "LIST" else verb, aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._active_session.request(
                method, path, params=query, data=data, headers=headers, timeout=timeout
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._count(verb, resource.plural, 0)
            raise Unavailable(f"{verb} {path}: {error!r}") from error
        self._count(verb, resource.plural, answer.status)
        if answer.status >= 400:
            raise self._error(
                verb, path, answer.status, text, answer.headers.get("Retry-After", "")
            )
        # A proxy may answer 200 with a page of its own. That is no answer of the API server, so it
        # is tried again.
        try:
            return dict(from_json(text))
        except (ValueError, TypeError) as error:
            raise Unavailable(
                f"{verb} {path}: {answer.status} with no JSON object: {text[:200]!r}"
            ) from error

    def _event(self, path: str, line: bytes) -> tuple[str, Object]:
        """Type and object of one line of a watch; ClusterError for an error or a proxy's page."""
        try:
            event = from_json(line)
            kind, item = str(event["type"]), dict(event["object"])
        except (ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"WATCH {path}: no event: {line[:200]!r}") from error
        if kind == "ERROR":
            code = item.get("code")
            raise self._error("WATCH", path, code if isinstance(code, int) else 0, line)
        return kind, item

    def _error(
        self, verb: str, path: str, code: int, text: bytes, retry_after: str = ""
    ) -> ClusterError:
        """Return the error of an answer's status code."""
        # Usually a Status object, or within an event one below `object`; a proxy's page is quoted
        # as it is.
        try:
            reason = from_json(text)
            reason = reason.get("object", reason).get("message") or reason
        except (ValueError, AttributeError):
            reason = text[:500].decode(errors="replace")
        message = f"{verb} {path}: {code} {reason}"
        # 401 passes by itself: a token that has just run out is renewed before the next try.
        if code in (0, 401, 429) or code >= 500 or self._try_again(message):
            return Unavailable(
                message, code, float(retry_after) if retry_after.isdecimal() else None
            )
        if code == 409:
            return (AlreadyExists if verb == "POST" else Conflict)(message, code)
        return _KINDS.get(code, Denied)(message, code)


async def each_listed(
    cluster: Client,
    selection: Selection,
    begin: Callable[[], None],
    take: Callable[[Object], None],
) -> int:
    """Pass every object of a full LIST to `take`, page by page, pausing for other tasks; return the
    resourceVersion.

    A LIST whose pages expire under way is started again. `begin` is called before each start, so
    that half a list never passes for a whole one.

    Raises:
        ClusterError: the API server does not give a whole list.
    """
    for attempt in range(1, LIST_TRIES + 1):
        version = 0
        begin()
        try:
            async for items, listed_at in cluster.pages(selection):
                async for item in yield_often(_drain(items)):
                    take(item)
                version = listed_at
        except Expired:
            if attempt == LIST_TRIES:
                raise
        else:
            return version
    raise AssertionError("the last try returns or raises")


def _drain(items: list[Object]) -> Iterator[Object]:
    """Yield the items and remove each from the list."""
    # Popped from the end, so that each object is freed once it was read: a page of objects is kept
    # nowhere else.
    items.reverse()
    while items:
        yield items.pop()


async def list_and_parse(
    cluster: Client, selection: Selection, parse_item: Callable[[Object], T | None]
) -> tuple[list[T], int]:
    """List all objects and parse each with `parse_item`, which returns None for one to leave out.
    Return the parsed objects and the list's resourceVersion.

    Raises:
        ClusterError: the API server does not give a whole list.
    """
    records: list[T] = []

    def take(item: Object) -> None:
        record = parse_item(item)
        if record is not None:
            records.append(record)

    version = await each_listed(cluster, selection, records.clear, take)
    return records, version


def _retry_delay(attempt: int, error: Unavailable) -> float:
    """Seconds before the next try: what the server asks for, at most 5, else doubling pauses."""
    return min(5.0, error.retry_after or 0.2 * 2.0**attempt * random.uniform(0.5, 1.0))


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The stream's lines, of any length: aiohttp's own line reader gives up at 64 KiB."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    # The API server ends each event with a newline: this is a proxy's page, which is no event.
    if rest:
        yield rest


def _names(path: str, response: Object, field: str) -> set[str]:
    """Names of what a document of the discovery lists; Unavailable if it is a proxy's page."""
    try:
        return {part.text("name") for part in JsonObject(response).parts(field)}
    except Unreadable as error:
        raise Unavailable(f"GET {path}: no discovery document: {error}") from error


def _page(path: str, response: Object) -> tuple[list[Object], int, str]:
    """Items, version and continue token of a LIST's page; Unavailable if it is a proxy's page."""
    try:
        meta = response["metadata"]
        items = list(response.get("items") or ())
        token = meta.get("continue") or ""
        return items, int(meta["resourceVersion"]), token
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Unavailable(f"LIST {path}: no list: {str(response)[:200]}") from error


_KINDS: dict[int, type[ClusterError]] = {403: Forbidden, 404: NotFound, 410: Expired}
