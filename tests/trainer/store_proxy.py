"""A proxy in front of an object store that fails some requests: before they are carried out, or after.

A store that is down, slow, or whose answers get lost can't be asked of a healthy one. Signatures hold, since they are
of the name that the client called.
"""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("503", "cut before", "cut after")
"""What may befall a request: a refusal that passes, a connection that is cut, an answer that is lost. There is also
`ignores HEADER`: the store seems to have taken what it refused because of this condition."""
Fault = Callable[[int, str], str]
"""From the request's number, from 0, and its words (`PUT /bucket/key`) to its fault; empty to let it pass."""


class StoreProxy(ThreadingHTTPServer):
    """Passes requests to the endpoint, or fails them."""

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(endpoint)
        self.fault: Fault = lambda *_: ""
        self.asked: list[str] = []
        """`METHOD /path` of every request, without queries."""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The endpoint for clients."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reset(self, fault: Fault = lambda *_: "") -> None:
        """Forget what was asked; from now on these faults."""
        with self._lock:
            self.asked, self.fault = [], fault

    def noted(self, words: str) -> str:
        """Takes note of a request; its fault."""
        with self._lock:
            self.asked.append(words)
            return self.fault(len(self.asked) - 1, words)

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StoreProxy

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.server.noted(f"{self.command} {urlsplit(self.path).path}")
        if fault == "503":
            self._send(503, {}, b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "cut before":
            self._hang_up()
        else:
            status, headers, answer = self._passed(body)
            if status == 412 and fault.removeprefix("ignores ") in self.headers:
                status, headers, answer = 200, {"ETag": '"taken"'}, b""
            if fault == "cut after":
                self._hang_up()
            else:
                self._send(status, headers, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _passed(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        hop = ("connection", "transfer-encoding", "content-length", "keep-alive")
        for name, value in headers.items():
            if name.lower() not in hop:
                self.send_header(name, value)
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), str(len(body)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy_to(endpoint: str) -> Iterator[StoreProxy]:
    """A proxy that serves while the body runs."""
    server = StoreProxy(endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
