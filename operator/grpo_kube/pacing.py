"""Paces loops: growing pauses between retries, and pauses for the event loop during long work.

Long work on the event loop is divided into slices of time, so that watches and probes do not wait for its end.
"""

import asyncio
import random


class Backoff:
    """A pause that doubles from the first to the last, in seconds, with jitter, until it is reset."""

    def __init__(self, first: float = 1.0, last: float = 30.0) -> None:
        """Start with the first pause."""
        self._first = self._next = first
        self._last = last

    async def wait(self) -> None:
        """Sleeps for the pause that is due."""
        pause, self._next = self._next, min(self._last, 2.0 * self._next)
        # With jitter: what failed together, such as all watches of a server that restarts, must not retry together.
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next = self._first


SLICE = 0.01
"""Longest time until others run, in seconds."""


class Slices:
    """Paces one piece of work; made when it begins."""

    def __init__(self) -> None:
        """The first slice begins."""
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()

    async def pause(self) -> None:
        """Lets everybody else run if the slice is over."""
        if self._clock() - self._began > SLICE:
            await asyncio.sleep(0)
            self._began = self._clock()
