"""A program of ours in a process of its own, with a socket to talk to it.

It does not use `multiprocessing`: fork copies the locks of torch's threads, spawn imports the
trainer again. The program is given the socket's file descriptor and this process's id as its last
two arguments.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

_STOP_SECONDS = 5.0


class ChildProcess:
    """The process and our end of the socket."""

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the program; without an environment it inherits this process's."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            # a session of its own: one kill ends the child's own children too; prints go to the
            # log, on fd 2
            self._process = subprocess.Popen(
                [*program, str(descriptor), str(os.getpid())],
                env=environment,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def close(self) -> None:
        """End the process and everything that it started. Harmless when called twice."""
        if self.connection.closed:
            return
        self.connection.close()
        with suppress(ProcessLookupError):  # it ended by itself and left no children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def status(self) -> int:
        """How the process ended, after its end of the socket closed."""
        with suppress(subprocess.TimeoutExpired):  # it closed the socket and lives on
            self._process.wait(_STOP_SECONDS)
        self.close()
        return int(self._process.returncode)
