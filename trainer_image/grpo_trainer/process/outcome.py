"""How a process says its end: in the termination message, and in a file beside the checkpoints.

An exit code alone is ambiguous, since a process can abort after success, and a termination message
goes with its pod.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import Export
from grpo_api.report.report import (
    EXIT_CODES,
    EngineCause,
    MemoryShortage,
    Outcome,
    Progress,
    Result,
)
from grpo_api.report.revisions import Generations
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.report.training_metrics import OUTCOME_KEYS
from grpo_api.text.contract import TERMINATION_LOG, TERMINATION_LOG_ENV

from ..runtime.durable_files import write_atomically
from ..runtime.errors import TrainingError
from ..runtime.first_sigterm import ignore_sigterm
from ..runtime.paths import ATTEMPTS, attempt_folder, glob_run
from ..stores.run_store import run_store

log = logging.getLogger(__name__)

_OUTCOME = "outcome-rank-{}.json"
_STACKS = "stacks-rank-{}.txt"
KEEP_SECONDS = 5.0
KEEP_ON_STORE_SECONDS = 60.0
"""A run that has succeeded holds its pods no longer for a store that doesn't answer."""


def make_outcome(
    rank: int,
    result: Result,
    message: str,
    progress: Progress,
    *,
    diverged_on: Generations | None = None,
    shortage: MemoryShortage | None = None,
    engine_cause: EngineCause | None = None,
    checkpoint_step: int | None = None,
    export: Export | None = None,
) -> Outcome:
    """The Outcome of a process that came as far as `progress`, with what else it knows for that
    result."""
    metrics = {key: progress.metrics[key] for key in OUTCOME_KEYS if key in progress.metrics}
    outcome = Outcome(
        result=result,
        rank=rank,
        step=progress.step,
        total_steps=progress.total_steps,
        attempt=progress.attempt,
        diverged_on=diverged_on,
        shortage=shortage,
        engine_cause=engine_cause,
        checkpoint_step=checkpoint_step if result is Result.OUT_OF_MEMORY else None,
        metrics=metrics,
        revisions=progress.revisions,
        account=progress.account,
        export=export,
        checkpoint=progress.checkpoint,
    )
    return truncate_to_fit(outcome, message)


def announce_outcome(outcome: Outcome) -> int:
    """Write the termination message, which a later SIGTERM does not replace; return the exit
    code."""
    ignore_sigterm()
    try:
        write_termination_message(outcome.model_dump_json())
    # A node's full disk must not keep the watchdog from ending the process.
    except OSError as error:
        log.warning(f"the termination message can't be written: {error}")
    is_failure = outcome.result not in (Result.SUCCEEDED, Result.PREEMPTED)
    level = logging.ERROR if is_failure else logging.INFO
    log.log(level, f"{outcome.result}: {outcome.message}")
    return EXIT_CODES[outcome.result]


def write_termination_message(text: str) -> None:
    """Write the file that the kubelet reads, a bind mount, which can't be renamed over: it is
    written in place."""
    path = Path(os.environ.get(TERMINATION_LOG_ENV, TERMINATION_LOG))
    if path.parent.is_dir():
        path.write_text(text, encoding="utf-8")


def keep_outcome(
    plan: TrainingPlan, outcome: Outcome, stacks: str = "", *, replaces: bool = True
) -> None:
    """Write the durable outcome of a rank into the attempt's folder; beside it the stacks of all
    its threads, of which the outcome has room for a few frames. A disk that fails costs these files
    only. An object store gets the success alone, for a run that is started again although it has
    ended. `replaces`: what the rank itself has written gives way to it."""
    is_success = outcome.rank == 0 and outcome.result is Result.SUCCEEDED
    if is_success and (run := run_store(plan)):
        try:
            replace(run, store=run.store.within(KEEP_ON_STORE_SECONDS)).finish(outcome)
        except TrainingError as error:
            log.warning(f"the outcome is in the termination message only: {error}")
    folder = attempt_folder(plan.checkpoint_directory, plan.job.attempt)
    if folder is None:
        return
    try:
        # It asks the volume, too.
        if not folder.is_dir():
            return
        if replaces or not kept_outcomes(folder, outcome.rank):
            write_atomically(folder / _OUTCOME.format(outcome.rank), outcome.model_dump_json())
        if stacks:
            write_atomically(folder / _STACKS.format(outcome.rank), stacks)
    except OSError as error:
        log.warning(f"the outcome is in the termination message only: {error}")


def write_in_time(write: Callable[[], None]) -> None:
    """Run what writes to the volume for no longer than KEEP_SECONDS: it may be what the process is
    stuck in."""
    writing = threading.Thread(target=write, name="outcome", daemon=True)
    try:
        writing.start()
    # Of a pod at its limit of processes; the announced outcome counts all the same.
    except RuntimeError as error:
        log.warning(f"the outcome is in the termination message only: {error}")
        return
    writing.join(KEEP_SECONDS)


class ProcessEnd:
    """Ends a process with one outcome: the first that the main thread or the watchdog has.

    A success whose trackers or volume are still waited for stays one, although SIGTERM comes then
    or the wait looks like a hang.
    """

    def __init__(self, plan: TrainingPlan, end_tracking: Callable[[Result], None]) -> None:
        """`end_tracking` does nothing when it is called twice."""
        self._plan = plan
        self._end_tracking = end_tracking
        self._announcing = threading.Lock()
        self._outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> int:
        """The main thread's way out; returns the exit code."""
        outcome = self._announce(outcome)
        if outcome.result is Result.SUCCEEDED:
            keep_outcome(self._plan, outcome)
        else:
            # The volume may hang, and its peers wait for the end of this process.
            write_in_time(lambda: keep_outcome(self._plan, outcome))
        self._end_tracking(outcome.result)
        return EXIT_CODES[outcome.result]

    def abort(self, outcome: Outcome, stacks: str) -> None:
        """The watchdog's way out, past a main thread that may be stuck for good."""
        outcome = self._announce(outcome)
        write_in_time(lambda: keep_outcome(self._plan, outcome, stacks))
        write_in_time(lambda: self._end_tracking(outcome.result))
        os._exit(EXIT_CODES[outcome.result])

    def _announce(self, outcome: Outcome) -> Outcome:
        """Return the outcome that counts. The kubelet's file comes first: it is local, while the
        volume may be what failed."""
        with self._announcing:
            if self._outcome is None:
                self._outcome = outcome
                announce_outcome(outcome)
            return self._outcome


def kept_outcomes(attempt: Path, rank: int | str = "*") -> list[Outcome]:
    """The Outcomes that processes of an attempt wrote into its folder. Unreadable ones are left
    out."""
    outcomes = []
    for path in sorted(attempt.glob(_OUTCOME.format(rank))):
        with suppress(OSError, ValueError):
            # A newer image may say more.
            outcomes.append(Outcome.model_validate_json(path.read_bytes(), extra="ignore"))
    return outcomes


def last_success(folder: Path) -> Outcome | None:
    """The durable success of an attempt of the run in the folder."""
    for attempt in sorted(glob_run(folder, ATTEMPTS)):
        for outcome in kept_outcomes(attempt, rank=0):
            if outcome.result is Result.SUCCEEDED:
                return outcome
    return None
