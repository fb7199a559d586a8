"""Answers of a delivery's pod to one question each: which files there are, and the bytes of one from an offset on."""

from pathlib import Path
from typing import BinaryIO

from grpo_api.text.clock import Clock

from ..clock import SYSTEM_CLOCK
from .state import asked, published, source

BEAT_SECONDS = 5.0
"""Between two empty lines while the folder is being prepared: proxies cut connections on which nothing moves."""


def tell(state: Path, out: BinaryIO, clock: Clock = SYSTEM_CLOCK) -> int:
    """Print the listing as one line of JSON as soon as there is one; empty lines until then."""
    while (listing := published(state)) is None:
        asked(state)
        out.write(b"\n")
        out.flush()
        clock.sleep(BEAT_SECONDS)
    asked(state)
    out.write(f"{listing.model_dump_json()}\n".encode())
    out.flush()
    return 0


def send(state: Path, name: str, offset: int, out: BinaryIO, clock: Clock = SYSTEM_CLOCK) -> None:
    """Print a file's bytes from that offset to its end.

    Raises:
        OSError: it can't be read, or nobody reads what is printed. StoreFailed: its store gave nothing for too long.
    """
    for chunk in source(state, clock).read(name, offset):
        asked(state)
        out.write(chunk)
    out.flush()
