"""The command line's own clock: its one module that asks the operating system for the time and
sleeps."""

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
