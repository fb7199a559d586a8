"""Checks the job again on rank 0 of each attempt, before anything else, whatever was checked before
it.

Mistakes that can be seen at once end the attempt in seconds.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport

from ..process.outcome import last_success
from ..runtime.errors import BadInput
from ..runtime.paths import run_folder

log = logging.getLogger(__name__)


def require_passed(plan: TrainingPlan, *, is_supervisor: bool) -> None:
    """Check the job of a plan. What may pass by itself is left to training, which waits for it.

    Raises:
        BadInput: no attempt can train; with all problems.
    """
    folder = run_folder(plan.checkpoint_directory)
    if folder and _has_ended(folder):
        # An attempt of a run that has ended only says so, and needs no inputs.
        return
    check = partial(_run_checks, plan)
    report = _fork(check) if is_supervisor else check()
    permanent = [problem for problem in report.problems if not problem.transient]
    if permanent:
        raise BadInput("; ".join(f"{problem.path}: {problem.message}" for problem in permanent))


def _has_ended(folder: Path) -> bool:
    try:
        return last_success(folder) is not None
    except OSError:
        # The checks name what is wrong with the volume.
        return False


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
