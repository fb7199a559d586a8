"""How every command prints: one terminal width for pipes, one spelling of memory sizes."""

import sys

from rich.console import Console

from grpo_api.quantity import GIB

_PIPE_WIDTH = 240


def console() -> Console:
    """The terminal; wide where there is none, so that pipes get whole lines."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def gib(count: float) -> float:
    """A number of bytes in GiB."""
    return count / GIB
