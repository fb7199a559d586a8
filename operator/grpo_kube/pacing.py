"""Paces loops: growing pauses between retries, and pauses for the event loop during long work.

Long work on the event loop lets other tasks run every LOOP_BUDGET seconds, so that watches and
probes do not wait for its end.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar


class Backoff:
    """A pause that doubles from the first to the last, in seconds, with jitter, until reset."""

    def __init__(self, first: float = 1.0, last: float = 30.0) -> None:
        """Start with the first pause."""
        self._first = self._next = first
        self._last = last

    async def wait(self) -> None:
        """Sleeps for the pause that is due."""
        pause, self._next = self._next, min(self._last, 2.0 * self._next)
        # With jitter: what failed together, such as all watches of a server that restarts, must not
        # retry together.
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next = self._first


LOOP_BUDGET = 0.01
"""Seconds of work after which other tasks run."""
T = TypeVar("T")


async def yield_often(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let other tasks run every LOOP_BUDGET seconds of work on them."""
    clock = asyncio.get_running_loop().time
    began = clock()
    for item in items:
        yield item
        if clock() - began > LOOP_BUDGET:
            await asyncio.sleep(0)
            began = clock()
