"""Defines a span and the trace of one attempt, and encodes spans as an OTLP
ExportTraceServiceRequest in JSON.

Ids depend only on the job's uid, the attempt, the span's name and its number. So an operator that
sends a span again after a restart sends the same ids, and no trace is split.

In JSON, ids are hex digits, times are nanoseconds as text, and 64-bit numbers are text, too:
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from grpo_api.report import traces
from grpo_api.report.traces import ATTEMPT, SpanName

from ..records.names import child_job
from ..records.records import GRPOJobRecord

Value = str | int | float
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of an attempt."""

    trace: "Trace"
    id: str
    parent: str
    """Id of the span that it is a part of; empty for the root."""
    name: str
    begin: float
    end: float
    """Unix seconds of the operator's own clock, no earlier than `begin`."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: bool = False
    message: str = ""
    """Why, if it failed."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one attempt."""

    job_uid: str
    attempt: int
    resource: Mapping[str, Value]
    """What all of its spans are about."""

    @classmethod
    def of_attempt(cls, job: GRPOJobRecord, attempt: int, version: str) -> "Trace":
        """The trace of a job's attempt, with this version of the operator as an attribute."""
        resource: dict[str, Value] = {
            traces.SERVICE_NAME.key: "grpo-operator",
            traces.SERVICE_VERSION.key: version,
            traces.NAMESPACE.key: job.key.namespace,
            traces.K8S_JOB.key: child_job(job.name, attempt),
            traces.JOB_NAME.key: job.name,
            traces.JOB_UID.key: job.uid,
            traces.ATTEMPT_NUMBER.key: attempt,
        }
        return cls(job.uid, attempt, resource)

    @property
    def id(self) -> str:
        """32 hex digits."""
        return _digits(TRACE_ID_BYTES, self.job_uid, self.attempt)

    @property
    def before(self) -> "Trace | None":
        """The trace of the attempt before; None for the first."""
        if self.attempt <= 1:
            return None
        return Trace(self.job_uid, self.attempt - 1, self.resource)

    def span_id(self, name: SpanName, number: int = 0) -> str:
        """16 hex digits; `number` distinguishes spans of one name."""
        return _digits(SPAN_ID_BYTES, self.id, name.name, number)

    def span(
        self,
        name: SpanName,
        begin: float,
        end: float,
        *,
        number: int = 0,
        parent: str | None = None,
        attributes: Mapping[str, Value] = MappingProxyType({}),
    ) -> Span:
        """A span, by default a child of the root."""
        if parent is None:
            parent = self.span_id(traces.ATTEMPT)
        return Span(
            trace=self,
            id=self.span_id(name, number),
            parent=parent,
            name=name.name,
            begin=begin,
            end=max(begin, end),
            attributes=attributes,
        )


def _digits(size: int, *parts: str | int) -> str:
    """Hex digits of `size` bytes, never all 0, which OTLP forbids (2^-64 is never)."""
    text = "/".join(map(str, parts))
    digest = sha256(text.encode(errors="replace")).hexdigest()
    return digest[: 2 * size]


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
        trace = span.trace
        resource = resources.setdefault(trace.id, _resource(trace.resource))
        spans_of_scope = resource["scopeSpans"][0]["spans"]
        spans_of_scope.append(_span(span))
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
        root_before = before.span_id(ATTEMPT)
        body["links"] = [{"traceId": before.id, "spanId": root_before}]
    if span.failed:
        body["status"] = {"code": ERROR, "message": _text(span.message)}
    return body


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": _text(value)}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value}


def _text(text: str) -> str:
    """As much of the text as is sent; what is not Unicode would cost the whole request."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def _nanoseconds(unix: float) -> str:
    nanoseconds = round(unix * 1e9)
    return str(min(max(0, nanoseconds), LAST))
