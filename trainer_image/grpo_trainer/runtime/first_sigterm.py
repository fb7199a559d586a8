"""Ends a process at SIGTERM from its first moment on, until training listens.

The kernel ignores SIGTERM for the first process of a container, as long as it has no handler. Then
the pod would hold its GPUs until the end of the grace period. Nothing heavy is imported here: the
handler is set before the trainer's other imports, which take a second.
"""

import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from grpo_api.text.contract import TERMINATION_LOG, TERMINATION_LOG_ENV

PREEMPTED = 143
"""The exit code of the result Preempted."""


def end_on_sigterm(attempt: int = 0, rank: int = 0) -> None:
    """End at SIGTERM with the outcome of a preemption; attempt and rank as far as they are
    known."""

    def end(*_: object) -> None:
        message = "SIGTERM during stage Starting"
        outcome = {"result": "Preempted", "attempt": attempt, "rank": rank, "message": message}
        path = Path(os.environ.get(TERMINATION_LOG_ENV, TERMINATION_LOG))
        with suppress(OSError):
            path.write_text(json.dumps(outcome), encoding="utf-8")
        os._exit(PREEMPTED)

    signal.signal(signal.SIGTERM, end)


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on, so that it does not replace the outcome that is announced next. A
    watchdog has its own thread, which gets the signal and knows of that outcome."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, lambda *_: None)
