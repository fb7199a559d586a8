"""An event loop with real I/O whose time a test moves on, so that no product limit has to be short
or waited for."""

import asyncio
import contextlib
import time

STEP = 1.0
"""Seconds of one move. No request takes that long here, so that none meets its time-out by a
move."""
SETTLE = 0.02
"""Real seconds after each move, in which what became due is done."""


class SteeredClock:
    """Real time and what a test has added to it; for one operator's event loop and wall clock."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._loops: list[_SteeredLoop] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return a new event loop by this clock."""
        made = _SteeredLoop(self)
        self._loops.append(made)
        return made

    @property
    def ahead(self) -> float:
        """Seconds that tests have added."""
        return self._ahead

    def wall(self) -> float:
        """Return unix seconds."""
        return time.time() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once, from any other thread; timers fire in their order."""
        running = [loop for loop in self._loops if not loop.is_closed()]
        if not running:
            self._ahead += seconds
            return
        while seconds > 0:
            step = min(STEP, seconds)
            self._ahead += step
            seconds -= step
            for loop in running:
                loop.wake()
            time.sleep(SETTLE)


class _SteeredLoop(asyncio.SelectorEventLoop):
    """A real loop whose time is the clock's."""

    def __init__(self, clock: SteeredClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return super().time() + self._clock.ahead

    def wake(self) -> None:
        """Have the loop look at its timers now."""
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile
            self.call_soon_threadsafe(lambda: None)
