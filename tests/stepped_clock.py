"""A clock that moves only by its own sleeps, so that a test of minutes takes no time and no busy
machine fails it."""

import threading
from collections.abc import Callable


class SteppedClock:
    """A grpo_api.text.clock.Clock that ignores real time. Several threads may sleep on it."""

    def __init__(self, after_sleep: Callable[[], None] = lambda: None) -> None:
        """`after_sleep` is what the world does while somebody sleeps; it is called once per
        sleep."""
        self.after_sleep = after_sleep
        self.sleeps: list[float] = []
        """Seconds of each sleep so far."""
        self._now = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds that were slept, and those that the test has let pass."""
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Return at once, so many seconds later."""
        with self._lock:
            self.sleeps.append(seconds)
            self._now += seconds
        self.after_sleep()

    def advance(self, seconds: float) -> None:
        """Let time pass while nobody sleeps."""
        with self._lock:
            self._now += seconds
