"""Remove a cluster when the process that asked for it dies, however it dies.

pytest may be killed with a signal that runs no cleanup. So `up` starts `python -m harness guard
FOLDER` as a process of its own with the read end of a pipe: end of file without the word to keep
the cluster means that the owner is gone.
"""

import signal
import subprocess
import sys

from .programs.cache import REPOSITORY
from .programs.processes import Processes

KEEP = b"keep"


class Guard:
    """The owner's end of the pipe; keep it referenced for as long as the cluster should live."""

    def __init__(self, processes: Processes) -> None:
        with processes.log("guard").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness", "guard", processes.directory],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env=processes.environment("guard"),
                start_new_session=True,
            )

    def release(self) -> None:
        """Let the cluster outlive this process."""
        self._process.communicate(KEEP)

    def reap(self) -> None:
        """Collect the guard after `down` killed it."""
        self._process.kill()
        self._process.communicate()


def is_kept() -> bool:
    """Wait for the owner's word or end; return True if the cluster shall outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return sys.stdin.buffer.read() == KEEP
