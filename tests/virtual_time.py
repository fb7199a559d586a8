"""An event loop whose clock jumps to the next timer, so that a test waits for minutes in no time
and never for luck."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """A selector that never waits: it moves the clock on by the time that it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        events = super().select(0)
        if timeout is None and not events:
            # In real time this would be a test that never ends.
            raise RuntimeError("every task waits for another one, and no timer is left")
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Jump) -> None:
        super().__init__(clock)
        self._clock = clock

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, _: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        """Call the function at once: a thread takes real time, in which this clock would jump over
        every time-out."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def advance(self, seconds: float) -> None:
        """Move the clock on."""
        self._clock.now += seconds


def block(seconds: float) -> None:
    """Let time pass in the running virtual loop without letting it run, as code that computes for
    long does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.advance(seconds)


def virtual_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose time starts at 0 and jumps from timer to timer."""
    return _Loop(_Jump())


def virtually(test: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that meets nothing outside the process; its loop's time starts at 0."""
    with asyncio.Runner(loop_factory=virtual_loop) as runner:
        return runner.run(test)
