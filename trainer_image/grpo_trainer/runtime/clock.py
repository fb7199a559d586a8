"""The process' clock and the time limits of waiting.

This is the only module that asks the operating system for the time and sleeps. Everything that
waits takes a `grpo_api.text.clock.Clock`, whose default is SYSTEM_CLOCK. Tests pass a clock that
they move.

The hub and object stores share one set of limits. A service that is away for a minute must not end
a run of three days. One that is away for hours must not hold the run's GPUs.
"""

import time
from collections.abc import Callable

from grpo_api.text.clock import Clock


class SystemClock:
    """A Clock in real time."""

    def now(self) -> float:
        """Return the seconds of the kernel's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block this thread for this number of seconds."""
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()


def unix_time() -> float:
    """Return the seconds since 1970, for records that people and other processes read. Durations
    are never its differences: the clock of a node is set while it runs."""
    return time.time()


LONGEST_WAIT = 600.0
"""Seconds without getting any further, after which the attempt ends and its GPUs are given back."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two tries; each pause is twice the one before."""
POLL_SECONDS = 2.0
"""Seconds between two reports of progress during a wait."""

OnWait = Callable[[str], None]
"""Called with the reason why a service is asked again; with an empty one once it has answered."""


def ignore_wait(_problem: str) -> None:
    """An OnWait that does nothing."""
