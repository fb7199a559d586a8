"""Reads how a run of this machine is: from its trainer while that lives, then from its outcome."""

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome, Progress, Result
from grpo_api.status.status import GRPOJobStatus, Phase
from grpo_api.text.contract import ATTEMPT_PREFIX
from grpo_operator.report.pod_reports import final_progress, metrics_status, progress_status

from ..cluster.clock import SYSTEM_CLOCK
from ..show.errors import ENDING_SIGNALS
from .local_pod import LOCAL_ADDRESS

LOCK_FILE = "lock"
"""In a run's folder; locked for as long as its trainer lives."""
PLAN_FILE, PROCESS_FILE, LOG_FILE, OUTCOME_FILE = (
    "plan.json",
    "process.json",
    "log.txt",
    "outcome.json",
)
"""In an attempt's folder."""
PROGRESS_SECONDS = 2.0
"""Longest wait for the trainer's report of its progress."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Reaches this machine itself, whatever proxy its variables name."""
LOCK_SECONDS = 0.5
"""Longest wait for another process's look at the lock."""


def read_status(home: Path) -> GRPOJobStatus:
    """The status of a run, from its trainer's report or its outcome."""
    number = newest_attempt(home)
    folder = home / f"{ATTEMPT_PREFIX}{number}"
    plan = TrainingPlan.model_validate_json((folder / PLAN_FILE).read_bytes()).execution
    fields: dict[str, Any] = {"attempt": number, "plan": plan}
    is_running = is_running_in(home)
    outcome = None if is_running else read_outcome(folder)
    progress = _progress(folder) if is_running else None
    if progress:
        fields["progress"] = progress_status(progress).model_copy(update={"stage": progress.stage})
        fields["metrics"] = metrics_status(progress.metrics)
    if outcome:
        fields |= {"outcome": outcome, "export": outcome.export}
        fields["progress"] = final_progress(None, outcome)
        fields["metrics"] = metrics_status(outcome.metrics)
    fields["phase"] = _phase(is_running, progress, outcome)
    return GRPOJobStatus(**fields)


def _phase(is_running: bool, progress: Progress | None, outcome: Outcome | None) -> Phase:
    if is_running:
        return Phase.RUNNING if progress and progress.step else Phase.STARTING
    if outcome is None:
        return Phase.FAILED
    ended = {Result.SUCCEEDED: Phase.SUCCEEDED, Result.PREEMPTED: Phase.SUSPENDED}
    return ended.get(outcome.result, Phase.FAILED)


def newest_attempt(home: Path) -> int:
    """Number of a run's last attempt. One that was cut off before it had a plan does not count."""
    is_running = is_running_in(home)
    numbers = [
        path.name.removeprefix(ATTEMPT_PREFIX)
        for path in home.glob(f"{ATTEMPT_PREFIX}*")
        if is_running or (path / PLAN_FILE).exists()
    ]
    return max(map(int, filter(str.isdecimal, numbers)), default=1)


def is_running_in(home: Path) -> bool:
    """True as long as the trainer lives."""
    import fcntl  # Windows has none, where the client is a cluster's

    try:
        with (home / LOCK_FILE).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def take_lock(lock: IO[str]) -> None:
    """Lock a run's open lock file.

    Raises:
        BlockingIOError: a trainer, or who starts one, has it.
    """
    import fcntl

    deadline = SYSTEM_CLOCK.now() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another process's look at the lock takes a moment only.
            if SYSTEM_CLOCK.now() >= deadline:
                raise
        SYSTEM_CLOCK.sleep(LOCK_SECONDS / 10)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let a signal that ends this process act after the block: between the start of a trainer and
    the file that names it, nobody could end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in ENDING_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def write_whole(file: Path, text: str) -> None:
    """Write a file that others read, which is whole or absent."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def read_process(folder: Path) -> dict[str, int]:
    """`pid` of an attempt's trainer, and `port` of its report."""
    about: dict[str, int] = json.loads((folder / PROCESS_FILE).read_bytes())
    return about


def _progress(folder: Path) -> Progress | None:
    """The report of rank 0; None while it does not answer."""
    try:
        port = read_process(folder)["port"]
        url = f"http://{LOCAL_ADDRESS}:{port}/progress"
        with _DIRECT.open(url, timeout=PROGRESS_SECONDS) as answer:
            return Progress.model_validate_json(answer.read())
    # The file is being written, or the report is another version's.
    except (OSError, ValueError):
        return None


def read_outcome(folder: Path) -> Outcome | None:
    """How the attempt ended; None where it has not said so."""
    try:
        return Outcome.model_validate_json((folder / OUTCOME_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
