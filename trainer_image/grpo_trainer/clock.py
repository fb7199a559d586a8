"""The process' own clock: the one module that asks the operating system for the time and sleeps.

Everything that waits takes a `grpo_api.text.clock.Clock`, whose default is SYSTEM_CLOCK. Tests hand in one that they
move.
"""

import time

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
    """Return the seconds since 1970, for records that people and other processes read. Durations are never its
    differences: the clock of a node is set while it runs."""
    return time.time()
