"""The first thing that rank 0 of an attempt does, whatever was checked before it.

Mistakes that can be seen at once end the attempt in seconds.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import Outcome, Result

from ..process.outcome import announce_outcome, last_success
from ..runtime.errors import BadInput
from ..runtime.paths import run_folder

log = logging.getLogger(__name__)


def require_passed(plan: TrainingPlan, *, is_supervisor: bool) -> None:
    """Check the job of a plan. What may pass by itself is left to training, which waits for it.

    Raises:
        BadInput: no attempt can train; with all problems.
    """
    folder = run_folder(plan.checkpoint_directory)
    if folder and last_success(folder):
        # An attempt of a run that has ended only says so, and needs no inputs.
        return
    check = partial(_run_checks, plan)
    with _ended_by_sigterm(plan.job.attempt):
        report = _fork(check) if is_supervisor else check()
    permanent = [problem for problem in report.problems if not problem.transient]
    if permanent:
        raise BadInput("; ".join(f"{problem.path}: {problem.message}" for problem in permanent))


@contextmanager
def _ended_by_sigterm(attempt: int) -> Iterator[None]:
    """Surrounds what runs before training listens: the first process of a container is not ended by
    a signal that it has no handler for."""

    def end(*_: object) -> None:
        message = "SIGTERM during the checks of stage Starting"
        outcome = Outcome(result=Result.PREEMPTED, attempt=attempt, message=message)
        os._exit(announce_outcome(outcome))

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run_checks(plan: TrainingPlan) -> PreflightReport:
    # Imported by the one process that checks: each of the others would load the libraries in vain.
    from .checks import run_checks
    from .findings import RANK_0

    return run_checks(plan, RANK_0)


def _fork(check: Callable[[], PreflightReport]) -> PreflightReport:
    """The checks in a process of their own: a supervisor lives as long as the training that it
    starts, and needs none of their libraries."""
    try:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(check).result()
    except BrokenProcessPool as error:
        log.warning(f"the preflight ended without a report: {error}")
        return PreflightReport()
