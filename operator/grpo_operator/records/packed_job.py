"""Spec and status of a GRPOJob: typed while the job lives, packed into two kilobytes once it has
ended.

The typed models take forty kilobytes, and a cluster keeps ten thousand ended jobs, which are hardly
ever read. They are unpacked for a look and dropped again.
"""

import json
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from grpo_api.effective_spec import resolve
from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.status.status import AppliedJobClass, ConditionType, GRPOJobStatus

from .reasons import Reason

Fields = dict[str, Any]
UNPACKED = 64
"""How many ended jobs stay unpacked: a reconcile reads the same one many times."""
TYPED, SHORT = 256, 8192
"""How many specs stay typed, and the longest that do, in characters of JSON: a job comes again with
each write of its status, and its spec is the same."""


@dataclass(frozen=True, slots=True)
class JobContent:
    """Typed spec and status of a GRPOJob. A rejected spec is None; `problems` says why."""

    spec: GRPOJobSpec | None
    """With the class of the job."""
    problems: tuple[str, ...]
    status: GRPOJobStatus
    declared: GRPOJobSpec | None = None
    """The spec without the class."""
    job_class: AppliedJobClass | None = None
    """The class that `spec` was resolved with."""
    class_problem: tuple[Reason, str] | None = None
    """Why the job can't have its class; `spec` is then the declared one."""


def with_queue_name(content: JobContent, queue: str) -> JobContent:
    """The content with the LocalQueue of the label, where the spec names none."""
    spec = content.spec
    if spec is None or not queue or spec.placement.queue_name:
        return content
    declared = content.declared or spec
    return replace(content, spec=_with_queue(spec, queue), declared=_with_queue(declared, queue))


def _with_queue(spec: GRPOJobSpec, queue: str) -> GRPOJobSpec:
    placement = spec.placement.model_copy(update={"queue_name": queue})
    return spec.model_copy(update={"placement": placement})


def typed_status(status: Fields) -> GRPOJobStatus:
    """The typed status; unknown fields are ignored.

    Raises:
        pydantic.ValidationError: it has values that this version doesn't know.
    """
    return GRPOJobStatus.model_validate(status, extra="ignore")


def job_content(spec: Fields, status: GRPOJobStatus) -> JobContent:
    """The content of an object with this spec and status.

    An attempt that is under way keeps the class that it was committed with.
    """
    text = json.dumps(spec)
    typed, problems = _typed_spec(text) if len(text) <= SHORT else _parse_fields(spec)
    content = JobContent(typed, problems, status, typed)
    if typed is None or status.job_class is None or not is_under_way(status):
        return content
    effective = resolve(typed, status.job_class, {})
    if effective.spec is None:
        return replace(content, spec=None, problems=effective.problems)
    return replace(content, spec=effective.spec, job_class=status.job_class)


@lru_cache(TYPED)
def _typed_spec(text: str) -> tuple[GRPOJobSpec | None, tuple[str, ...]]:
    """The types' answer to a spec of that JSON; by its text, since `1` and `1.0` differ."""
    return _parse_fields(json.loads(text))


def _parse_fields(spec: Fields) -> tuple[GRPOJobSpec | None, tuple[str, ...]]:
    """The typed spec, or why its types reject it."""
    try:
        return parse_spec(spec), ()
    except SpecInvalid as error:
        return None, tuple(error.problems)


def has_ended(status: GRPOJobStatus) -> bool:
    """True if the status says that the job has succeeded or failed."""
    return status.is_true(ConditionType.SUCCEEDED) or status.is_true(ConditionType.FAILED)


def is_under_way(status: GRPOJobStatus) -> bool:
    """True if the attempt that the status counts was admitted and has not ended."""
    return bool(status.attempt) and not has_ended(status) and status.is_true(ConditionType.ADMITTED)


def pack_job(spec: Fields, status: Fields) -> bytes:
    """Spec and status as they are, in few bytes."""
    text = json.dumps((spec, status), separators=(",", ":"))
    return zlib.compress(text.encode(), 1)


def unpack_fields(packed: bytes) -> tuple[Fields, Fields]:
    """Spec and status as they were packed."""
    spec, status = json.loads(zlib.decompress(packed))
    return spec, status


@lru_cache(UNPACKED)
def unpack_job(packed: bytes) -> JobContent:
    """The content of what was packed; it was typed before, so its status can be."""
    spec, status = unpack_fields(packed)
    return job_content(spec, typed_status(status))
