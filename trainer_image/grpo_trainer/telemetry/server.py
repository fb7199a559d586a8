"""Rank 0's HTTP server: /progress (JSON), /metrics (Prometheus) and /healthz.

The operator pulls what it shows, so that training pods need no API credentials. A daemon thread with no part in
training.
"""

import os
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from grpo_api.contract import PROGRESS_BIND_ENV, PROGRESS_PORT, TRACE_QUERY
from grpo_api.plan import TrainingPlan
from grpo_api.report import Progress

from ..process.recorder import Recorder
from .collector import ProgressCollector, limits_of
from .listening import listening, split

Page = Callable[[str], tuple[str, bytes]]
"""Content type and body for the query of a request."""


def serve(plan: TrainingPlan, recorder: Recorder) -> None:
    """Answer on GRPO_PROGRESS_BIND (`host:port`), by default every address of the pod at PROGRESS_PORT.

    A port that is taken costs the telemetry, not the training.
    """
    address = os.environ.get(PROGRESS_BIND_ENV, f":{PROGRESS_PORT}")
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: recorder.progress, limits_of(plan)))
    ProcessCollector(registry=registry)
    pages: dict[str, Page] = {
        "/progress": lambda query: ("application/json", _progress(recorder, query).model_dump_json().encode()),
        "/metrics": lambda _: (CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/healthz": lambda _: ("text/plain", b"ok\n"),
    }
    try:
        bound = listening(*split(address))
    except OSError as error:
        print(f"telemetry is off: {address} can't be bound: {error}", flush=True)
        return
    server = _on(bound, _handler(pages))
    threading.Thread(target=server.serve_forever, name="telemetry", daemon=True).start()


def _progress(recorder: Recorder, query: str) -> Progress:
    """The progress, with the times of as many steps as the query asks for."""
    asked = parse_qs(query).get(TRACE_QUERY, [""])[-1]
    if not (asked.isascii() and asked.isdecimal() and 0 < len(asked) < 10 and int(asked)):
        return recorder.progress
    return recorder.progress.model_copy(update={"steps": recorder.steps(int(asked))})


def _on(bound: socket.socket, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """A server on a socket that listens already; its own would know one address family."""
    server = ThreadingHTTPServer(bound.getsockname()[:2], handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.daemon_threads = True
    return server


def _handler(pages: dict[str, Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            page = pages.get(path)
            if page is None:
                self.send_error(HTTPStatus.NOT_FOUND, f"try {', '.join(pages)}")
                return
            content_type, body = page(query)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent: a pull every few seconds would fill the job's log."""

    return Handler
