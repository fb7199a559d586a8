"""FunctionProcess: a function that runs in a process of its own, so that a time-out can end it.

For `python` rewards and for math-verify, whose run time nobody knows. The program at the other end is child.py. Not
`multiprocessing`: fork copies the locks of torch's threads, spawn imports the trainer again.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import BadInput
from . import child as reward_child

START_SECONDS = 120.0
"""Time for a function's module to be imported."""
LOCATE_SECONDS = 10.0
"""Time to find the completion on which a function failed."""
_STOP_SECONDS = 5.0


class FunctionFailed(Exception):
    """The function raised, or its process ended; `sample` is the completion on which it failed, if that was found."""

    def __init__(self, problem: str, sample: int | None = None) -> None:
        super().__init__(problem)
        self.sample = sample


class FunctionProcess:
    """`module:function`, imported in a process of its own from `folder` first."""

    def __init__(self, function: str, folder: Path | None = None, start_seconds: float = START_SECONDS) -> None:
        """Starts the process and imports the function, which may take `start_seconds`.

        Raises:
            BadInput: the function can't be imported, with Python's reason.
        """
        self._function = function
        self._start_seconds = start_seconds
        self._path = [*([str(folder)] if folder else []), *sys.path]
        self._start()
        self.is_async = self._finish_start()

    def call(self, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the function returned: `scores`, and what it logged as `metrics` and `extra`.

        Raises:
            TimeoutError: no answer within `seconds`; the process was ended and a new one is starting.
            FunctionFailed: the function raised, or its process ended or could not be started again.
        """
        if self._starting:
            self._start_again()
        try:
            self._connection.send(arguments)
            answer = self._receive(seconds)
            if "problem" in answer:
                raise FunctionFailed(answer["problem"], self._sample())
        except TimeoutError:
            self._restart()
            raise
        except (EOFError, ConnectionError) as error:
            raise FunctionFailed(f"the function's process ended with status {self._status()}") from error
        return answer

    def close(self) -> None:
        """End the process and everything that it started. Harmless when called twice."""
        if self._connection.closed:
            return
        self._connection.close()
        with suppress(ProcessLookupError):  # it ended by itself and left no children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # a session of its own: one kill ends the function's own children too; prints go to the log, on fd 2
            self._process = subprocess.Popen(
                [sys.executable, "-P", reward_child.__file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._connection.send({"path": self._path, "function": self._function})
        self._starting = True

    def _finish_start(self) -> bool:
        """Waits until the function is imported; returns whether it is async."""
        try:
            answer = self._receive(self._start_seconds)
            problem = answer.get("problem")
        except TimeoutError:
            problem = f"the import took more than {self._start_seconds:.0f} s"
        except (EOFError, ConnectionError):
            problem = f"the process ended with status {self._status()} during the import"
        if problem is not None:
            self.close()
            raise BadInput(f"{self._function} can't be imported: {problem}")
        self._starting = False
        return bool(answer["async"])

    def _start_again(self) -> None:
        """Waits for the process that follows one that was ended. The function was imported before: it is there."""
        try:
            self._finish_start()
        except BadInput as error:
            raise FunctionFailed(f"its process could not be started again: {error}") from error

    def _status(self) -> int:
        """How the process ended, after its end of the socket closed."""
        with suppress(subprocess.TimeoutExpired):  # user code closed the socket and lives on
            self._process.wait(_STOP_SECONDS)
        self.close()
        return int(self._process.returncode)

    def _restart(self) -> None:
        self.close()
        self._start()

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next message.

        Raises:
            TimeoutError: none came.
            EOFError, ConnectionError: the process ended.
        """
        if not self._connection.poll(seconds):
            raise TimeoutError
        answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return answer

    def _sample(self) -> int | None:
        """The completion on which the function failed; None if that took too long to find."""
        try:
            return self._receive(LOCATE_SECONDS).get("sample")
        except (TimeoutError, EOFError, ConnectionError):
            return None
