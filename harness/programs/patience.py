"""How long a test waits for something: counted in time in which the machine was idle.

The wall clock measures the machine, not the program under test: beside builds and other tests a
process may get a tenth of a processor, and a limit in seconds of that clock fails without a
defect. A processor that is idle says that nobody has anything to do, so that what has not happened
by then will not happen.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

BUSY_FACTOR = 10.0
"""A wait on a machine that is never idle ends after this multiple of its seconds by the wall clock:
a program that spins for ever has to fail, too."""
LOOK_SECONDS = 0.05
_IDLE_FIELD = 4  # of the line `cpu user nice system idle …` of /proc/stat (proc_stat(5))
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def idle_seconds(
    statistics: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic
) -> float:
    """Return the seconds that a processor of this machine has been idle since its start, as a mean
    over all processors.

    Never faster than the wall clock, which is the answer where the kernel does not count, as in
    gVisor.
    """
    lines = [line.split() for line in statistics.read_text().splitlines() if line[:3] == "cpu"]
    total, processors = lines[0], lines[1:]
    idle_ticks = int(total[_IDLE_FIELD])
    if not idle_ticks:
        return clock()
    return idle_ticks / _TICKS_PER_SECOND / max(1, len(processors))


class Patience:
    """A limit of `seconds` of idle time, which begins now; by the wall clock, of `busy_factor`
    times as long."""

    def __init__(
        self,
        seconds: float,
        busy_factor: float = BUSY_FACTOR,
        *,
        idle: Callable[[], float] = idle_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._longest = busy_factor * seconds
        self._idle, self._clock = idle, clock
        self._idle_at_start, self._began = idle(), clock()

    @property
    def is_over(self) -> bool:
        """True once the machine has been idle for so long, or busy for the longest time."""
        passed = self._clock() - self._began
        if passed < self.seconds:
            return False
        if passed >= self._longest:
            return True
        return self._idle() - self._idle_at_start >= self.seconds


class RunningProcess(Protocol):
    """What can be waited for as for a subprocess.Popen."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired while it runs."""


def wait_for_exit(process: RunningProcess, seconds: float) -> int:
    """Wait for the end of a process and return its exit code.

    Raises subprocess.TimeoutExpired when patience of `seconds` ends before.
    """
    patience = Patience(seconds)
    while True:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            if patience.is_over:
                raise


def run_to_end(
    command: Sequence[object], seconds: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output; `options` are those of subprocess.Popen.

    Raises subprocess.TimeoutExpired when patience of `seconds` ends before; the process is killed.
    """
    line = [str(part) for part in command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    patience = Patience(seconds)
    with subprocess.Popen(line, **pipes | options) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                if patience.is_over:
                    process.kill()
                    raise
            else:
                return subprocess.CompletedProcess(line, process.returncode, output, errors)


def wait_for_event(event: threading.Event, seconds: float) -> bool:
    """Wait until the event is set; False when patience of `seconds` ends before."""
    patience = Patience(seconds)
    while not event.wait(LOOK_SECONDS):
        if patience.is_over:
            return event.is_set()
    return True


def rest(seconds: float) -> None:
    """Wait until the machine has been idle for `seconds`, or busy for three times as long: what is
    under way has been done then."""
    patience = Patience(seconds, busy_factor=3.0)
    while not patience.is_over:
        time.sleep(min(seconds, LOOK_SECONDS))
