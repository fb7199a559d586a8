"""The loop of virtual time: minutes take no time, and a test in which nothing can happen any more
fails."""

import asyncio

import pytest

from tests.virtual_time import virtually


def test_a_pause_of_an_hour_takes_an_hour_of_the_loops_time() -> None:
    async def pause() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert virtually(pause()) == 3600.0


def test_a_test_that_waits_for_ever_fails() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits for another one"):
        virtually(wait())
