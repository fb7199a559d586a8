"""Defines what the client returns: a job with its status, and an event."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from grpo_api.job import GRPOJobSpec
from grpo_api.job_object import GRPOJob
from grpo_api.status.status import GRPOJobStatus, Phase
from grpo_cli.show.errors import CliError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A GRPOJob as it was when it was read."""

    name: str
    namespace: str
    uid: str
    spec: GRPOJobSpec
    """What to train."""
    status: GRPOJobStatus
    """How it goes."""

    @property
    def phase(self) -> Phase:
        """The status in one word."""
        return self.status.phase or Phase.PENDING

    @property
    def message(self) -> str:
        """How the last attempt ended; empty while nothing has ended."""
        return self.status.outcome.message if self.status.outcome else ""


class Event(NamedTuple):
    """Something that happened to a job."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str
    time: str
    """When it happened last, RFC 3339."""


def job_of(metadata: dict[str, Any], job: GRPOJob) -> Job:
    """The job with this metadata."""
    return Job(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=job.spec,
        status=job.status,
    )


def readable_jobs(
    items: Iterable[T], read: Callable[[T], tuple[dict[str, Any], GRPOJob]]
) -> list[Job]:
    """The jobs that can be read; a warning says why another can't, such as that of a newer
    operator."""
    jobs: list[Job] = []
    for item in items:
        try:
            jobs.append(job_of(*read(item)))
        except CliError as error:
            warnings.warn(str(error), stacklevel=4)
    return jobs
