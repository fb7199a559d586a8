"""How every command prints: one terminal width for pipes, tables that lose nothing. Bytes that are
on their way have a bar."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from grpo_api.text.messages import printable_text

Item = TypeVar("Item")

_PIPE_SIZE = 80, 25
"""Columns and lines of output that no terminal takes, where COLUMNS says nothing."""
_ANY_WIDTH = 10_000
_INDENT = 2


class _Terminal(Console):
    """A console that leaves a closed pipe to `main`; rich would end the program by exit code 1,
    which says that a job failed."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(*, stderr: bool = False) -> Console:
    """Return the terminal; for a pipe or a file one of COLUMNS columns. `:x:` in a message stays
    text."""
    # rich would take the width of any terminal around, such as that of stdin, and ends by an error
    # where COLUMNS or LINES is a digit that is no number, such as ².
    width, height = shutil.get_terminal_size(_PIPE_SIZE)
    return _Terminal(width=width, height=height, stderr=stderr, highlight=False, emoji=False)


def terminal_text(text: str, style: str = "") -> Text:
    """A text from elsewhere, such as a pod's last words: it is no markup, and can't steer the
    terminal."""
    return Text(printable_text(text), style)


def make_table(*headings: str, right: Iterable[str] = ()) -> Table:
    """An empty table whose cells keep to one line; the columns named by `right` are set to the
    right."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in right else "left")
    return table


def add_row(table: Table, cells: Iterable[str], style: str = "") -> None:
    """Adds a row of plain texts: rich's `escape` loses the backslash of `\\[`."""
    table.add_row(*map(terminal_text, cells), style=style)


def show_table(
    out: Console,
    headings: Sequence[str],
    items: Sequence[Item],
    cells: Callable[[Item], Sequence[str]],
    stack: Callable[[Item], Sequence[Text]] | None = None,
    *,
    right: Iterable[str] = (),
    style: Callable[[Item], str] = lambda _: "",
) -> None:
    """Prints a table with a row of plain texts per item where it fits, else each item as a line
    with indented lines below, wrapped and whole.

    `stack` makes these lines; unset: the first cell, and below it the others by their headings,
    without those that are empty.
    """
    wide = make_table(*headings, right=right)
    for item in items:
        add_row(wide, cells(item), style(item))
    if Measurement.get(out, out.options.update(max_width=_ANY_WIDTH), wide).maximum <= out.width:
        out.print(wide)
        return
    for item in items:
        if stack:
            first, *below = stack(item)
        else:
            name, *values = cells(item)
            named = zip(headings[1:], values, strict=True)
            facts = ", ".join(f"{heading} {value}" for heading, value in named if value)
            first, below = terminal_text(name, "bold"), [terminal_text(facts)]
        print_entry(out, first, below)


def show_facts(out: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Print texts beside their labels; where that would break a word, such as a hash, each below
    the start of its label."""
    entries = [(terminal_text(label, "dim"), terminal_text(text)) for label, text in facts]
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for entry in entries:
        table.add_row(*entry)
    if Measurement.get(out, out.options.update(max_width=_ANY_WIDTH), table).minimum <= out.width:
        out.print(table)
        return
    for label, text in entries:
        print_entry(out, Text.assemble(label, "  ", text), [])


def print_entry(out: Console, first: Text, below: Iterable[Text]) -> None:
    """Prints a line and those that belong to it, wrapped and whole. All but the first line are
    indented: none of them looks like another entry."""
    wrapped = first.wrap(out, max(1, out.width - _INDENT), overflow="fold")
    out.print(*wrapped[:1])
    rest = Text("\n").join(wrapped[1:])
    for line in (rest, *below):
        if line:
            out.print(Padding(line, (0, 0, 0, _INDENT)), overflow="fold")


@contextmanager
def byte_progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many bytes are done, if that is a terminal; without a total it is erased
    at the end."""
    # Few commands have a bar, and its parts take long to import.
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    terminal = console(stderr=True)
    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden, transient = not terminal.is_terminal, total is None
    with Progress(*columns, console=terminal, transient=transient, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
