"""Rank 0's HTTP server: /progress (JSON), /metrics (Prometheus) and /healthz.

The operator pulls what it shows, so that training pods need no API credentials. A daemon thread
with no part in training. The pages have numbers, stages and names; no text of prompts, completions
or rewards.

Prometheus samples are made from Progress and the plan at the time of the scrape. So an absent key
is absent there too, and NaN stays what it is.
"""

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report import training_metrics
from grpo_api.report.metrics import Metric
from grpo_api.report.report import Progress
from grpo_api.text.contract import (
    PROGRESS_BIND_ENV,
    PROGRESS_PORT,
    TRACE_QUERY,
)

from ..engine_pod.engine_metrics import EngineMetrics
from ..gang.interfaces import open_listening_socket, split_address
from ..process.recorder import Recorder

log = logging.getLogger(__name__)

Value = float | None
Values = Mapping[tuple[str, ...], float]
"""Values of a family by the values of its labels."""
_DISTRIBUTIONS = ("grpo-operator", "torch", "trl")
"""Whose versions are the labels of BUILD_INFO, in their order."""


class ProgressCollector:
    """Samples of a run as it is now, beside the limits that its plan sets."""

    def __init__(
        self, read_progress: Callable[[], Progress], limits: Mapping[Metric, Values]
    ) -> None:
        """`limits`: see `limits_of`."""
        self._read_progress = read_progress
        self._limits = limits
        self._versions = [version(name) for name in _DISTRIBUTIONS]

    def collect(self) -> Iterable[Family]:
        """The samples of one scrape."""
        progress = self._read_progress()
        for metric, value in _single_values(progress):
            if value is not None:
                yield _family(metric, {(): value})
        for metric, values in self._limits.items():
            yield _family(metric, values)
        by_phase: Values = {
            (name,): float(size)
            for name, size in progress.memory.items()
            if name not in training_metrics.MEMORY_BESIDE
        }
        yield _family(training_metrics.MEMORY, by_phase)
        for metric in training_metrics.LABELLED:
            prefix = f"{metric.key}/"
            names = [key for key in progress.metrics if key.startswith(prefix)]
            by_name: Values = {(key.removeprefix(prefix),): progress.metrics[key] for key in names}
            yield _family(metric, by_name)
        yield _family(training_metrics.STRAGGLER, _stragglers(progress))
        lost: Values = {(tracker.name,): float(tracker.lost_rows) for tracker in progress.trackers}
        yield _family(training_metrics.TRACKING_LOST, lost)
        yield _family(training_metrics.STAGE, {(progress.stage,): progress.stage_seconds})
        yield _family(training_metrics.BUILD_INFO, {tuple(self._versions): 1.0})


def _single_values(progress: Progress) -> Iterator[tuple[Metric, Value]]:
    """The families of one value each."""
    yield training_metrics.STEP, progress.step
    yield training_metrics.TOTAL_STEPS, progress.total_steps
    yield training_metrics.ETA, progress.eta_seconds
    for metric in training_metrics.TRAINING:
        if metric not in training_metrics.COUNTED:
            yield metric, progress.metrics.get(metric.key)
    for key, metric in training_metrics.MEMORY_BESIDE.items():
        yield metric, progress.memory.get(key)


def limits_of(plan: TrainingPlan) -> dict[Metric, Values]:
    """The limits that the plan sets, by metric. Unset limits are left out."""
    engine = plan.execution.engine
    execution, sync, memory = plan.execution, plan.reference.sync, plan.execution.memory
    save_every = execution.save_every_steps if plan.checkpoint_directory else None
    reference_every = sync.every_steps if sync else None
    usable_memory = memory.usable_bytes if memory else None
    single = {
        training_metrics.MAX_KL: plan.guard.max_kl,
        training_metrics.MAX_ENGINE_MISMATCH: engine.max_mismatch if engine else None,
        training_metrics.ALLREDUCE_ASSUMED: execution.link_bytes_per_second,
        training_metrics.MAX_COMPLETION: plan.training.max_completion_length,
        training_metrics.SAVE_EVERY: save_every,
        training_metrics.REFERENCE_EVERY: reference_every,
        training_metrics.USABLE_MEMORY: usable_memory,
    }
    values_by_metric: dict[Metric, Values] = {
        metric: {(): value} for metric, value in single.items() if value is not None
    }
    if memory:
        phases = memory.phases.model_dump(by_alias=False)
        values_by_metric[training_metrics.PREDICTED_MEMORY] = {
            (name,): float(size) for name, size in phases.items()
        }
    return values_by_metric


def _stragglers(progress: Progress) -> Values:
    """How slow the rank is that a finding names, by its place."""
    ratios: dict[tuple[str, ...], float] = {}
    for finding in progress.findings:
        ratio = finding.evidence.get("timesMedian")
        if ratio is not None:
            rank = f"{finding.evidence['rank']:.0f}"
            ratios[rank, finding.pod or "", finding.node or ""] = ratio
    return ratios


def _family(metric: Metric, values: Values) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


Page = Callable[[str], tuple[str, bytes]]
"""Content type and body for the query of a request."""
JSON = "application/json"


def serve(limits: Mapping[Metric, Values], recorder: Recorder) -> None:
    """Answer on GRPO_PROGRESS_BIND (`host:port`), by default every address of the pod at
    PROGRESS_PORT.

    `limits` are the plan's, published as metrics. A port that is taken costs the telemetry, not the
    training.
    """
    address = os.environ.get(PROGRESS_BIND_ENV, f":{PROGRESS_PORT}")
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: recorder.progress, limits))
    registry.register(recorder.counters)
    registry.register(EngineMetrics())
    ProcessCollector(registry=registry)
    pages: dict[str, Page] = {
        "/progress": lambda query: (JSON, _progress(recorder, query).model_dump_json().encode()),
        "/metrics": lambda _: (CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/healthz": lambda _: ("text/plain", b"ok\n"),
    }
    try:
        bound = open_listening_socket(*split_address(address))
    except OSError as error:
        log.warning(f"telemetry is off: {address} can't be bound: {error}")
        return
    server = _server_on_socket(bound, _handler(pages))
    threading.Thread(target=server.serve_forever, name="telemetry", daemon=True).start()


def _progress(recorder: Recorder, query: str) -> Progress:
    """The progress, with the times of as many steps as the query asks for."""
    traced_steps = parse_qs(query).get(TRACE_QUERY, [""])[-1]
    if not re.fullmatch("[1-9][0-9]{0,8}", traced_steps):
        return recorder.progress
    return recorder.progress.model_copy(update={"steps": recorder.step_times(int(traced_steps))})


def _server_on_socket(
    bound: socket.socket, handler: type[BaseHTTPRequestHandler]
) -> ThreadingHTTPServer:
    """A server on a socket that listens already; its own would know one address family."""
    server = ThreadingHTTPServer(bound.getsockname()[:2], handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.daemon_threads = True
    return server


def _handler(pages: dict[str, Page]) -> type[BaseHTTPRequestHandler]:
    """Answers with these pages."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def handle(self) -> None:
            # Who asks a busy process may give up. The server would print a traceback into the log
            # of the job, which looks like a failure.
            with suppress(ConnectionError, TimeoutError):
                super().handle()

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
