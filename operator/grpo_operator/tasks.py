"""Tasks that live and die together."""

import asyncio
from typing import Any


async def until_one_ends(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first task to end, cancel the others, and raise the error of the first."""
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in done:
        task.result()
