"""The time that waiting code takes from its caller, so that a test moves it instead of waiting for
it."""

from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow, and pauses in them."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment; they never go back."""

    def sleep(self, seconds: float) -> None:
        """Return after this number of seconds."""
