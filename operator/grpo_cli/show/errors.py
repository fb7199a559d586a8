"""What ends a command with a sentence on stderr, and with which exit code.

CliError
├── ManifestError   2 a file that is no YAML, or holds no GRPOJob that can be read
├── InventoryError  2 an inventory or a config.json that can't be read, or none where one is needed
├── OptionError     2 an option whose value means nothing, or asks for what can't be done here
├── KubectlError    4 kubectl is missing, or printed what is no answer
│   └── KubectlExitError  it ended with an error, such as a cluster that does not answer
└── NotYet          5 what the command shows is not there: no plan, no pod

`grpo plan` has 3 for a job that fits nowhere, `grpo diagnose` for a run with findings. Commands
that wait for a job's end have 1 where it fails, and 6 where their timeout comes first.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

ENDED_BADLY, WRONG, CLUSTER, MISSING, NOT_ENDED = 1, 2, 4, 5, 6
"""Exit codes: a job that failed; wrong arguments or files; a cluster that does not answer, or not
as asked; an object that has not come so far; a job that has not ended within the timeout."""
EXIT_CODES = (
    "Exit codes: 0 done; 1 the job failed, or a check found something; 2 wrong arguments or files; "
    "3 nothing fits, or the run has findings; 4 the cluster refuses, does not answer or lacks the "
    "job; 5 there is no plan, pod or model yet; 6 the timeout came first. `run` and `logs` end as "
    "what they start."
)
"""Printed below the list of commands."""


class CliError(Exception):
    """Every error that a user can cause; its arguments are sentences, one per problem."""

    exit_code: ClassVar[int] = WRONG

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, each a line of its own."""
        return self.args

    def __str__(self) -> str:
        """All problems in one line."""
        return "; ".join(self.problems)


class ManifestError(CliError):
    """A file that is no YAML, or holds no GRPOJob that can be read; the message says where."""


class KubectlError(CliError):
    """kubectl is missing, ended with an error, or printed what is no answer; the message quotes
    it."""

    exit_code = CLUSTER


class KubectlExitError(KubectlError):
    """kubectl ended with an error; the message is what it printed."""

    def __init__(self, message: str, output: str = "") -> None:
        """Take what it printed on stderr, and what it had printed on stdout before."""
        super().__init__(message)
        self.output = output


class NotYet(CliError):
    """What the command shows is not there; the message says what is."""

    exit_code = MISSING


class InventoryError(CliError):
    """An inventory or a config.json that can't be read, or none where one is needed."""


class OptionError(CliError):
    """An option whose value means nothing, or asks for what can't be done here."""


ENDING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that end a command; Windows has no SIGHUP."""


@contextmanager
def ending_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does: they would end this process
    at once and leave behind what it has started."""
    # Handlers are the main thread's; others, as of a notebook's server, get no signals.
    is_main = threading.current_thread() is threading.main_thread()
    handled = ENDING_SIGNALS if is_main else ()
    # A signal that is ignored, as under nohup, stays so.
    numbers = [number for number in handled if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
