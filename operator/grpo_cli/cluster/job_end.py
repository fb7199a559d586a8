"""Waits for a job's end, as long as it takes: a run of days outlives restarts of the API server."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_api.job_object import GRPOJob
from grpo_api.status.status import Phase
from grpo_api.text.clock import Clock

from ..show.errors import ENDED_BADLY, NOT_ENDED, KubectlExitError
from . import kubectl
from .clock import SYSTEM_CLOCK

POLL_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
"""How long a cluster may fail to answer: longer than an API server's restart."""
_REFUSALS = ("(NotFound)", "(Forbidden)")
J = TypeVar("J")


def add_timeout(parser: ArgumentParser) -> None:
    """Adds the flag that limits the wait."""
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="longest wait; unset: until the end"
    )


def wait_for_end(options: Namespace, name: str, clock: Clock = SYSTEM_CLOCK) -> int:
    """Wait until the job has succeeded or failed, print what changes, and return the exit code.

    Returns:
        0 after success, 1 after failure, 6 where the timeout came first.

    Raises:
        KubectlError: there is no such job any more, or the cluster does not answer for too long.
    """
    deadline = None if options.timeout is None else clock.now() + options.timeout
    shown = ""
    for job in poll_job(lambda: kubectl.get_job(options, name)[1], POLL_SECONDS, clock):
        if job is not None:
            line = progress_line(job)
            if line != shown:
                print(f"{name}: {line}", file=sys.stderr, flush=True)
            shown = line
            if job.status.phase == Phase.SUCCEEDED:
                return 0
            if job.status.phase == Phase.FAILED:
                return ENDED_BADLY
        if deadline is not None and clock.now() >= deadline:
            return NOT_ENDED
    raise AssertionError("polling has no end")


def poll_job(fetch_job: Callable[[], J], seconds: float, clock: Clock) -> Iterator[J | None]:
    """Yield the job that `fetch_job` returns, again and again with these pauses; None where the
    cluster does not answer and may still do so.

    Raises:
        KubectlError: there is no such job any more, it can't be read, or the cluster does not
            answer for too long.
    """
    answered_at = clock.now()
    while True:
        job = None
        try:
            job = fetch_job()
            answered_at = clock.now()
        except KubectlExitError as error:
            is_refused = any(reason in str(error) for reason in _REFUSALS)
            if is_refused or clock.now() - answered_at >= PATIENCE_SECONDS:
                raise
        yield job
        clock.sleep(seconds)


def progress_line(job: GRPOJob) -> str:
    """`Running, step 140/1868`, or `Queued: WaitingForGPUs`."""
    status = job.status
    phase = str(status.phase or Phase.PENDING)
    if status.progress and status.progress.summary and status.phase == Phase.RUNNING:
        phase += f", step {status.progress.summary}"
    return f"{phase}: {status.reason}" if status.reason else phase


def readable_job(item: dict[str, Any]) -> GRPOJob | None:
    """The typed form; None of a job that another version wrote."""
    try:
        return GRPOJob.model_validate(item, extra="ignore")
    except ValidationError:
        return None
