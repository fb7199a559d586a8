"""Long work on the event loop in slices of time, so that watches and probes wait for none of it."""

import asyncio

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
