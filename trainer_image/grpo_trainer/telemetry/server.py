"""Rank 0's HTTP server: /progress and /samples (JSON), /metrics (Prometheus) and /healthz.

The operator pulls what it shows, so that training pods need no API credentials. A daemon thread with no part in
training. The first two are for those who show the attempt's token: samples are training data.
"""

import os
import socket
import threading
from collections.abc import Callable, Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Progress
from grpo_api.text.contract import HEADER, PROGRESS_BIND_ENV, PROGRESS_PORT, TOKEN_DIGEST_ENV, TRACE_QUERY, is_shown

from ..process.recorder import Recorder
from .collector import ProgressCollector, limits_of
from .listening import listening, split

Page = Callable[[str], tuple[str, bytes]]
"""Content type and body for the query of a request."""
JSON = "application/json"


def serve(plan: TrainingPlan, recorder: Recorder) -> None:
    """Answer on GRPO_PROGRESS_BIND (`host:port`), by default every address of the pod at PROGRESS_PORT.

    A port that is taken costs the telemetry, not the training.
    """
    address = os.environ.get(PROGRESS_BIND_ENV, f":{PROGRESS_PORT}")
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: recorder.progress, limits_of(plan)))
    ProcessCollector(registry=registry)
    wanted = os.environ.get(TOKEN_DIGEST_ENV, "")
    pages: dict[str, Page] = {
        "/progress": lambda query: (JSON, _progress(recorder, query).model_dump_json().encode()),
        "/samples": lambda _: (JSON, recorder.samples.model_dump_json().encode()),
        "/metrics": lambda _: (CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/healthz": lambda _: ("text/plain", b"ok\n"),
    }
    try:
        bound = listening(*split(address))
    except OSError as error:
        print(f"telemetry is off: {address} can't be bound: {error}", flush=True)
        return
    # Without a token, as on a laptop, no training data is served.
    closed = {"/samples", "/progress"} if wanted else {"/samples"}
    server = _on(bound, _handler(pages, closed, wanted))
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


def _handler(pages: dict[str, Page], closed: Collection[str], wanted: str) -> type[BaseHTTPRequestHandler]:
    """Answers with these pages, and with the `closed` ones to whom shows the token whose digest is `wanted`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            page = pages.get(path)
            if page is None:
                self.send_error(HTTPStatus.NOT_FOUND, f"try {', '.join(pages)}")
                return
            if path in closed and not is_shown(self.headers.get_all(HEADER, []), wanted):
                self.send_error(HTTPStatus.FORBIDDEN, f"show the attempt's token in {HEADER}")
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
