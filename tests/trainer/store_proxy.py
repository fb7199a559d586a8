"""A proxy in front of an object store that fails some requests, before they are carried out or
after, or is slow.

A store that is down, slow, or whose answers get lost can't be asked of a healthy one. Signatures
hold, since they are of the name that the client called.
"""

import http.client
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.trainer.hub import serving

FAULTS = ("503", "cut before", "cut amid", "cut after")
"""What may befall a request: a refusal that passes, a connection that is cut, half an answer, an
answer that is lost. There are also `403`: a refusal for good; `ignores HEADER`: the store seems to
have taken what it refused because of this condition; `dies before` and `dies after`:
StoreProxy.struck is called, and nobody gets an answer; `held`: it waits for
StoreProxy.released."""
CHUNK = 64 * 1024
Fault = Callable[[int, str], str]
"""From the request's number, from 0, and its words (`PUT /bucket/key`) to its fault; empty to let
it pass."""


class Pace:
    """How slow a store is: what all its connections together carry, and how long each answer takes
    to begin."""

    def __init__(self, latency: float = 0.0, bytes_per_second: float = 0.0) -> None:
        """0 bytes per second: as many as there are."""
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._busy_until = 0.0

    def answer(self) -> None:
        """Takes the time until an answer begins."""
        time.sleep(self.latency)

    def carry(self, count: int) -> None:
        """Takes the time of so many bytes, after those of other connections."""
        if not self.bytes_per_second:
            return
        with self._lock:
            now = time.monotonic()
            self._busy_until = max(self._busy_until, now) + count / self.bytes_per_second
            wait = self._busy_until - now
        time.sleep(wait)


class StoreProxy(ThreadingHTTPServer):
    """Passes requests to the endpoint, or fails them."""

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(endpoint)
        self.fault: Fault = lambda *_: ""
        self.requests: list[str] = []
        """`METHOD /path` of every request, without queries."""
        self.struck: Callable[[], None] = lambda: None
        self.passed: Callable[[str, int], None] = lambda *_: None
        """Hears the words of each request that was carried out, and its status."""
        self.released = threading.Event()
        self.pace = Pace()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The endpoint for clients."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reset(self, fault: Fault = lambda *_: "") -> None:
        """Forget what was asked; from now on these faults."""
        with self._lock:
            self.requests, self.fault = [], fault

    def noted(self, words: str) -> str:
        """Takes note of a request; its fault."""
        with self._lock:
            self.requests.append(words)
            return self.fault(len(self.requests) - 1, words)

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StoreProxy

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _answer(self) -> None:
        body, words = self._body(), f"{self.command} {urlsplit(self.path).path}"
        fault = self.server.noted(words)
        if fault == "503":
            self._send(503, {}, b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "403":
            self._send(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        elif fault in ("cut before", "dies before"):
            self._hang_up(fault)
        else:
            if fault == "held":
                self.server.released.wait()
            status, headers, answer = self._passed(body)
            self.server.passed(words, status)
            if status == 412 and fault.removeprefix("ignores ") in self.headers:
                status, headers, answer = 200, {"ETag": '"taken"'}, b""
            if fault in ("cut after", "dies after"):
                self._hang_up(fault)
            else:
                self.server.pace.answer()
                self._send(status, headers, answer, cut=fault == "cut amid")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _body(self) -> bytes:
        parts, left = [], int(self.headers.get("content-length", 0))
        while left:
            parts.append(self.rfile.read(min(left, CHUNK)))
            self.server.pace.carry(len(parts[-1]))
            left -= len(parts[-1]) or left
        return b"".join(parts)

    def _passed(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _send(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        hop = ("connection", "transfer-encoding", "content-length", "keep-alive")
        for name, value in headers.items():
            if name.lower() not in hop:
                self.send_header(name, value)
        length = next(
            (value for name, value in headers.items() if name.lower() == "content-length"),
            str(len(body)),
        )
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            sent = body[: len(body) // 2] if cut else body
            for chunk in (sent[begin : begin + CHUNK] for begin in range(0, len(sent), CHUNK)):
                self.server.pace.carry(len(chunk))
                self.wfile.write(chunk)
        if cut:
            self.wfile.flush()
            self._hang_up("")

    def _hang_up(self, fault: str) -> None:
        if fault.startswith("dies"):
            self.server.struck()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def proxy_to(endpoint: str) -> AbstractContextManager[StoreProxy]:
    """A proxy that serves while the body runs."""
    return serving(StoreProxy(endpoint))
