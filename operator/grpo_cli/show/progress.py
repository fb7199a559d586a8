"""A bar for bytes that are on their way, beside what a command prints."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from grpo_api.report.artifacts import ReportBytes

from .terminal import console


@contextmanager
def byte_progress(what: str, total: int | None = None) -> Iterator[ReportBytes]:
    """Shows on stderr how many bytes are done, if that is a terminal; without a total it is erased
    at the end."""
    terminal = console(stderr=True)
    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden, transient = not terminal.is_terminal, total is None
    with Progress(*columns, console=terminal, transient=transient, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
