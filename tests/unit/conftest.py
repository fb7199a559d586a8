"""Async tests of this folder run in virtual time, except those that meet the real world."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from tests.virtual_time import virtual_loop

# What pure tests leave are small objects, most of which are freed without it.
gc.set_threshold(20_000)

LoopFactories = dict[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(item: pytest.Item) -> LoopFactories:
    """Return the loop of an async test; a single one adds nothing to the test's id."""
    if item.get_closest_marker("realtime"):
        return {"real": asyncio.new_event_loop}
    return {"virtual": virtual_loop}
