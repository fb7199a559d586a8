"""A reward service on loopback that fails as told, request by request.

The `http` reward meets real sockets: refused connections, half answers, silence.
"""

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Body = dict[str, Any]
Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]] | bytes | None
"""Status, body and headers; bytes: these instead of HTTP; None: say nothing until the service
ends."""
Script = Callable[[int, Body], Answer]
"""From the request's number (from 1) and body to the answer."""


@dataclass(kw_only=True)
class Service:
    """A running service and what it has seen."""

    url: str
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)


def lengths(body: Body) -> tuple[int, bytes]:
    """A good answer: each completion's length."""
    return 200, json.dumps({"rewards": [len(text) for text in body["completions"]]}).encode()


@contextmanager
def serving(script: Script, port: int = 0) -> Iterator[Service]:
    """A service that answers by the script; on any free port if none is given."""
    service = Service(url="")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                service.bodies.append(body)
                service.headers.append(dict(self.headers))
                service.at_once += 1
                service.most_at_once = max(service.most_at_once, service.at_once)
                number = len(service.bodies)
            answer = script(number, body)
            with service.lock:
                service.at_once -= 1
            if answer is None:
                service.ended.wait()
            elif isinstance(answer, bytes):
                self.wfile.write(answer)
            else:
                self._say(*answer)

        def _say(
            self, status: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
        ) -> None:
            self.send_response(status)
            for name, value in ({"Location": "/elsewhere"} | dict(headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests read what was seen from the Service."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}/score"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield service
    finally:
        service.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
