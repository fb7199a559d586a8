"""Spans as an ExportTraceServiceRequest in OTLP's JSON encoding.

Ids are hex digits, times are nanoseconds as text, and 64-bit numbers are text too, as
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding says. Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_api.traces import ATTEMPT

from .spans import Span, Value

SCOPE = "grpo_operator"
INTERNAL, ERROR = 1, 2
"""Values of the enumerations SpanKind and StatusCode."""
LAST = 2**63 - 1
"""The last unix time in nanoseconds that fits into 64 signed bits, in the year 2262."""
MAX_TEXT = 1024
"""Longest text that is sent, in characters."""


def export_request(spans: Iterable[Span]) -> dict[str, Any]:
    """The body of a POST to /v1/traces: the spans of each attempt under a resource of its own."""
    resources: dict[str, dict[str, Any]] = {}
    for span in spans:
        found = resources.setdefault(span.trace.id, _resource(span.trace.resource))
        found["scopeSpans"][0]["spans"].append(_span(span))
    return {"resourceSpans": list(resources.values())}


def _resource(attributes: Mapping[str, Value]) -> dict[str, Any]:
    scope = {"scope": {"name": SCOPE}, "spans": []}
    return {"resource": {"attributes": _attributes(attributes)}, "scopeSpans": [scope]}


def _span(span: Span) -> dict[str, Any]:
    body: dict[str, Any] = {
        "traceId": span.trace.id,
        "spanId": span.id,
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": _nanoseconds(span.begin),
        "endTimeUnixNano": _nanoseconds(span.end),
        "attributes": _attributes(span.attributes),
    }
    if span.parent:
        body["parentSpanId"] = span.parent
    elif before := span.trace.before:
        body["links"] = [{"traceId": before.id, "spanId": before.span_id(ATTEMPT)}]
    if span.failed:
        body["status"] = {"code": ERROR, "message": _text(span.message)}
    return body


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": _text(value)}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def _text(text: str) -> str:
    """As much of the text as is sent; what is not Unicode would cost the whole request."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def _nanoseconds(unix: float) -> str:
    return str(min(max(0, round(unix * 1e9)), LAST))
