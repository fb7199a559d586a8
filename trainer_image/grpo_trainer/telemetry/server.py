"""Rank 0's HTTP server: /progress (JSON), /metrics (Prometheus) and /healthz.

The operator pulls what it shows, so that training pods need no API credentials. A daemon thread with no part in
training.
"""

import os
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from grpo_api import metrics as catalogue
from grpo_api.contract import PROGRESS_BIND_ENV, PROGRESS_PORT
from grpo_api.report import Progress

from ..process.recorder import Recorder


class ProgressCollector:
    """Prometheus samples made from Progress at the time of the scrape, so that an absent key is absent there too."""

    def __init__(self, read: Callable[[], Progress]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The samples of one scrape."""
        progress = self._read()
        plain = [
            (catalogue.STEP, progress.step),
            (catalogue.TOTAL_STEPS, progress.total_steps),
            (catalogue.ATTEMPT, progress.attempt),
            (catalogue.LAST_STEP_TIME, progress.last_step_time),
            *((metric, progress.metrics.get(metric.key)) for metric in catalogue.TRAINING),
        ]
        for metric, value in plain:
            if value is not None:
                yield GaugeMetricFamily(metric.name, metric.help, value=value)
        yield _labelled(catalogue.MEMORY, {name: float(size) for name, size in progress.memory.items()})
        for metric in catalogue.LABELLED:
            yield _labelled(metric, with_prefix(progress.metrics, metric.key))


def with_prefix(values: dict[str, float], prefix: str) -> dict[str, float]:
    """The entries `<prefix>/<name>` by name."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in values.items() if key.startswith(f"{prefix}/")}


def _labelled(metric: catalogue.Metric, values: dict[str, float]) -> Metric:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def serve(recorder: Recorder) -> None:
    """Answer on GRPO_PROGRESS_BIND (`host:port`), by default every address of the pod at PROGRESS_PORT.

    A port that is taken costs the telemetry, not the training.
    """
    host, _, port = os.environ.get(PROGRESS_BIND_ENV, f":{PROGRESS_PORT}").rpartition(":")
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: recorder.progress))
    pages: dict[str, Callable[[], tuple[str, bytes]]] = {
        "/progress": lambda: ("application/json", recorder.progress.model_dump_json().encode()),
        "/metrics": lambda: (CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/healthz": lambda: ("text/plain", b"ok\n"),
    }
    try:
        server = ThreadingHTTPServer((host, int(port)), _handler(pages))
    except OSError as error:
        print(f"telemetry is off: {host}:{port} can't be bound: {error}", flush=True)
        return
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="telemetry", daemon=True).start()


def _handler(pages: dict[str, Callable[[], tuple[str, bytes]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            if page is None:
                self.send_error(HTTPStatus.NOT_FOUND, f"try {', '.join(pages)}")
                return
            content_type, body = page()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent: a pull every few seconds would fill the job's log."""

    return Handler
