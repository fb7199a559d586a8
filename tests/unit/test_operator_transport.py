"""Watches that end at once wait for each other, as client-go's do; all else passes untouched."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from grpo_operator.cluster.transport import FIRST_PAUSE, LAST_PAUSE, SHORT_WATCH, WatchPace


class World:
    """A clock, and watches of which each lasts so long and delivers so many bytes."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.0, list[float]()
        self.pace = WatchPace(lambda: self.now, self._sleep, lambda: 1.0)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def ask(self, url: str, lasts: float = 0.0, size: int = 0) -> float:
        """Sends a request that then lasts; returns the pause before it, in seconds."""

        async def send(_: Any) -> Any:
            return type("Answer", (), {"content": type("Content", (), {"total_bytes": size})})

        before = self.now
        asyncio.run(self.pace(type("Request", (), {"url": URL(url)}), send))  # type: ignore[arg-type]
        pause = self.now - before
        self.now += lasts
        return pause


PODS, JOBS = "http://a/api/v1/pods?watch=true", "http://a/apis/batch/v1/jobs?watch=true"


def test_short_watches_wait_longer_and_longer() -> None:
    world = World()
    pauses = [world.ask(PODS) for _ in range(9)]
    assert pauses == pytest.approx([0, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])


def test_only_the_same_watch_waits() -> None:
    world = World()
    world.ask(PODS)
    assert (world.ask(JOBS), world.ask("http://a/api/v1/pods")) == (0, 0)
    assert world.ask(PODS) == pytest.approx(FIRST_PAUSE)


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 1)), max_size=40))
def test_a_watch_that_told_something_or_lasted_is_followed_at_once(watches: list[tuple[float, int]]) -> None:
    world, short = World(), 0
    for lasts, size in watches:
        pause = world.ask(PODS, lasts, size)
        assert pause == pytest.approx(min(LAST_PAUSE, FIRST_PAUSE * 2 ** (short - 1)) if short else 0)
        short = short + 1 if lasts < SHORT_WATCH and not size else 0
