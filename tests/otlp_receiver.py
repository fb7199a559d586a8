"""An OTLP/HTTP receiver that takes only what OpenTelemetry's own schema allows, and keeps it."""

import base64
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

IDS = {"traceId": 32, "spanId": 16, "parentSpanId": 16}


@dataclass(frozen=True)
class Received:
    """A span and its resource, as the schema's own types."""

    span: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        """The span's own."""
        return values(self.span.attributes)

    @property
    def key(self) -> tuple[bytes, bytes]:
        """What tells it from all others."""
        return self.span.trace_id, self.span.span_id


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a dict; a key occurs once."""
    values_by_key = {
        one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes
    }
    assert len(values_by_key) == len(attributes)
    assert all(values_by_key)
    return values_by_key


def parsed(body: bytes | str) -> list[Received]:
    """The spans of a request, by the official protobuf schema.

    Raises:
        json_format.ParseError: the body is no ExportTraceServiceRequest.
    """
    request = json_format.ParseDict(
        json.loads(body, object_pairs_hook=_ids), ExportTraceServiceRequest()
    )
    return [
        Received(span, values(resource.resource.attributes))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _ids(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """OTLP's JSON has ids in hex where protobuf's has base64."""
    ids = dict(pairs)
    assert len(ids) == len(pairs), "a key twice"
    for key in IDS.keys() & ids.keys():
        assert re.fullmatch(f"[0-9a-f]{{{IDS[key]}}}", ids[key])
        ids[key] = base64.b64encode(bytes.fromhex(ids[key])).decode()
    return ids


class Receiver:
    """Keeps the spans that it was sent. `answer` says how it answers them; by default it takes
    all."""

    def __init__(self, answer: Callable[[], web.Response] = lambda: web.json_response({})) -> None:
        self.requests: list[Mapping[str, str]] = []
        """Headers of all requests."""
        self.spans: list[Received] = []
        """Of those that it has answered with success."""
        self._answer = answer
        self._lock = threading.Lock()

    async def handle(self, request: web.Request) -> web.Response:
        """A request."""
        assert (request.method, request.path) == ("POST", "/v1/traces")
        assert request.headers["Content-Type"] == "application/json"
        spans = parsed(await request.read())
        answer = self._answer()
        with self._lock:
            self.requests.append(request.headers)
            if answer.status == 200:
                self.spans += spans
        return answer

    def named(self, name: str) -> list[Received]:
        """Its spans of a name, oldest first."""
        with self._lock:
            spans = [one for one in self.spans if one.span.name == name]
        return sorted(spans, key=lambda one: one.span.end_time_unix_nano)
