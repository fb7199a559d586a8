"""A file of lines that grows with a run, on a disk that may be full or gone for a while."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from ..runtime.durable_files import write_atomically

log = logging.getLogger(__name__)

MOST_SKIPPED = 64
"""Most lines between two tries on a disk that fails."""


class LinesFile:
    """Appends lines. After a write that failed the file is written anew, whole, because the failed
    one may have left a part of a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_whole = False
        """Whether the file has all lines."""
        self._failures = 0
        self._skipped = 0

    def append(self, line: str, all_lines: Callable[[], Iterable[str]]) -> None:
        """Append a line; where the file is not whole, write `all_lines`, which have it at the end.
        Where the disk fails training goes on, and a later line tries again."""
        if self.is_whole:
            self._write(lambda: self._append(line))
        else:
            self.write(all_lines)

    def write(self, all_lines: Callable[[], Iterable[str]]) -> None:
        """Replace the file, unless the disk fails or has failed a moment ago."""
        # Each failure doubles the lines until the next try, as with checkpoints.
        pause = min(MOST_SKIPPED, 2**self._failures - 1)
        if self._skipped < pause:
            self._skipped += 1
            return
        self._skipped = 0
        self._write(
            lambda: write_atomically(self._path, "".join(f"{line}\n" for line in all_lines()))
        )

    def _append(self, line: str) -> None:
        # A crash can tear the last line; readers skip it, and the next attempt has its own file.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._failures:
                log.warning(f"{self._path} is behind until it can be written: {error}")
            self.is_whole = False
            self._failures += 1
        else:
            self.is_whole = True
            self._failures = 0
