"""Waits for a job's end, as long as it takes: a run of days outlives restarts of the API server."""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.job_object import GRPOJob
from grpo_api.status.status import GRPOJobStatus, Phase
from grpo_api.text.clock import Clock
from grpo_api.text.messages import printable_text

from ..show.errors import ENDED_BADLY, NOT_ENDED, KubectlExitError, OptionError
from . import kubectl
from .clock import SYSTEM_CLOCK

POLL_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
"""How long a cluster may fail to answer: longer than an API server's restart."""
_REFUSALS = ("(NotFound)", "(Forbidden)", "does not exist")
"""In answers that no waiting changes; kubectl says the last one of a context."""
J = TypeVar("J")


def add_timeout(parser: ArgumentParser) -> None:
    """Adds the flag that limits the wait."""
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="longest wait; unset: until the end"
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        seconds = float(text)
        if seconds >= 0:  # `nan` is not
            return seconds
    raise OptionError(f"--timeout {text}: write seconds, such as 3600")


def wait_for_end(
    options: Namespace, name: str, clock: Clock = SYSTEM_CLOCK, began_at: float | None = None
) -> int:
    """Wait until the job has succeeded or failed, print what changes, and return the exit code: 0
    after success, 1 after failure, 6 where the timeout came first.

    The timeout counts since `began_at`, or since now.

    Raises:
        KubectlError: there is no such job any more, or the cluster does not answer for too long.
    """
    timeout = math.inf if options.timeout is None else options.timeout
    deadline = (clock.now() if began_at is None else began_at) + timeout
    shown = ""

    def show(line: str) -> None:
        nonlocal shown
        if line != shown:
            print(f"{name}: {printable_text(line)}", file=sys.stderr, flush=True)
        shown = line

    def show_silence(problem: str) -> None:
        show(f"the cluster is asked again for {PATIENCE_SECONDS:.0f} s: {problem}")

    polled = poll_job(lambda: kubectl.get_job(options, name), POLL_SECONDS, clock, show_silence)
    for answer in polled:
        if answer is not None:
            metadata, job = answer
            show(progress_line(job, metadata))
            if job.status.phase == Phase.SUCCEEDED:
                return 0
            if job.status.phase == Phase.FAILED and not is_retry_pending(job.spec, job.status):
                return ENDED_BADLY
        if not clock.now() < deadline:
            show(f"it has not ended within {timeout:g} s; `grpo why {name}` says why")
            return NOT_ENDED
    raise AssertionError("polling has no end")


def is_retry_pending(spec: GRPOJobSpec, status: GRPOJobStatus) -> bool:
    """True of a failed job from the raise of spec.retry until the operator acts on it."""
    return status.phase == Phase.FAILED and spec.retry > status.retry


def poll_job(
    fetch_job: Callable[[], J],
    seconds: float,
    clock: Clock,
    report_silence: Callable[[str], None] = lambda _: None,
) -> Iterator[J | None]:
    """Yield the job that `fetch_job` returns, again and again with these pauses; None where the
    cluster does not answer and may still do so, with the reason for `report_silence`.

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
            report_silence(str(error))
        yield job
        clock.sleep(seconds)


def progress_line(job: GRPOJob, metadata: Mapping[str, Any]) -> str:
    """`Running, step 140/1868`, `Queued: WaitingForGPUs`, or `Failed, being deleted`."""
    status = job.status
    phase = str(status.phase or Phase.PENDING)
    if status.progress and status.progress.summary and status.phase == Phase.RUNNING:
        phase += f", step {status.progress.summary}"
    if is_retry_pending(job.spec, status):
        phase += ", to be tried again"
    if metadata.get("deletionTimestamp"):
        phase += ", being deleted"
    return f"{phase}: {status.reason}" if status.reason else phase


def readable_job(item: dict[str, Any]) -> GRPOJob | None:
    """The typed form; None of a job that another version wrote."""
    try:
        return GRPOJob.model_validate(item, extra="ignore")
    except ValidationError:
        return None
