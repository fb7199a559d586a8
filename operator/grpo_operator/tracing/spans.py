"""A span, and the trace of one attempt that spans are made in.

Ids follow from the job's uid, the attempt, the span's name and its number alone: who sends a span again, after a
restart of the operator, sends the same one, and no trace is split. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from grpo_api import traces
from grpo_api.traces import Attribute, SpanName

from ..names import child_job
from ..records import GRPOJobRecord

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
    def of(cls, job: GRPOJobRecord, attempt: int, version: str) -> "Trace":
        """Return the trace of a job's attempt, with this version of the operator as an attribute."""
        resource: dict[Attribute, Value] = {
            traces.SERVICE_NAME: "grpo-operator",
            traces.SERVICE_VERSION: version,
            traces.NAMESPACE: job.key.namespace,
            traces.K8S_JOB: child_job(job.name, attempt),
            traces.JOB_NAME: job.name,
            traces.JOB_UID: job.uid,
            traces.ATTEMPT_NUMBER: attempt,
        }
        return cls(job.uid, attempt, {attribute.key: value for attribute, value in resource.items()})

    @property
    def id(self) -> str:
        """32 hex digits."""
        return _digits(TRACE_ID_BYTES, self.job_uid, self.attempt)

    @property
    def before(self) -> "Trace | None":
        """The trace of the attempt before; None for the first."""
        return Trace(self.job_uid, self.attempt - 1, self.resource) if self.attempt > 1 else None

    def span_id(self, name: SpanName, number: int = 0) -> str:
        """16 hex digits; `number` tells spans of one name apart."""
        return _digits(SPAN_ID_BYTES, self.id, name.name, number)

    def span(
        self,
        name: SpanName,
        begin: float,
        end: float,
        *,
        number: int = 0,
        parent: str | None = None,
        attributes: Iterable[tuple[Attribute, Value]] = (),
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
            attributes={attribute.key: value for attribute, value in attributes},
        )


def _digits(size: int, *parts: str | int) -> str:
    """Hex digits of so many bytes, never all 0, which OTLP forbids (2^-64 is never)."""
    return sha256("/".join(map(str, parts)).encode(errors="replace")).hexdigest()[: 2 * size]
