"""Writes files that a crash can't tear, waits for disks that fail for a while, and says why a file
can't be read.

A write goes to a temporary name, then fsync, rename and fsync of the folder: manifests, owner files
and outcomes must be whole or absent.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from grpo_api.text.clock import Clock

from .clock import SYSTEM_CLOCK
from .errors import BadInput, DiskFailed, is_disk_error

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES: tuple[float, ...] = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)
"""Seconds between tries of what a run can't go on without: five minutes, which a full disk is often
given room in."""
READ_PAUSES: tuple[float, ...] = (1, 2, 4)
"""Seconds between tries of a read that a volume fails, which is often back by then."""


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, so that every reader sees the old file or the new one.

    Raises:
        OSError: the disk is full or the folder can't be written; the old file is untouched.
    """
    # Processes of all pods have the same few numbers, and two attempts may claim a folder at once.
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (new names, renames) durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make all that is below a folder durable, and its own name.

    Raises:
        OSError: the disk is full, or takes no more.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folders(folder)


def sync_folders(folder: Path) -> None:
    """Make the entries of a folder, of all folders below it and its own name durable."""
    for path in (*filter(Path.is_dir, folder.rglob("*")), folder, folder.parent):
        sync_folder(path)


_LFS_POINTER = b"version https://git-lfs"
POINTER_REMEDY = "is a pointer of Git LFS, and not the file: run `git lfs pull` in its folder"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a clone without Git LFS left this in the place of a file."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


@contextmanager
def name_unreadable() -> Iterator[None]:
    """Raises BadInput where the body may not read a file, or look into its folder."""
    try:
        yield
    except PermissionError as error:
        raise BadInput(
            f"{error.filename} can't be read by user {os.geteuid()}; `chmod -R a+rX` its folder"
        ) from error


@contextmanager
def disk_errors() -> Iterator[None]:
    """Surrounds reading and writing of files, also by libraries.

    Raises:
        DiskFailed: instead of what they raise of a disk.
    """
    try:
        yield
    except Exception as error:
        if not is_disk_error(error):
            raise
        raise DiskFailed(f"{type(error).__name__}: {error}") from error


def retry_disk_errors(action: Callable[[], T], clock: Clock = SYSTEM_CLOCK) -> T:
    """Run an action again, after growing PAUSES, as long as a disk fails it.

    A collective must be failed on all ranks alike (ranks.run_on_all), for then all of them try
    again together.

    Raises:
        DiskFailed: the last try failed, too.
    """
    for pause in PAUSES:
        try:
            return action()
        except DiskFailed as error:
            log.warning(f"tried again in {pause} s: {error}")
        clock.sleep(pause)
    return action()


def read_again(action: Callable[[], T], pauses: Iterator[float], clock: Clock = SYSTEM_CLOCK) -> T:
    """Run an action that reads, again after each of the pauses that are left, as long as a volume
    fails it.

    Raises:
        OSError: the last try failed, too, or the file is gone.
    """
    while True:
        try:
            return action()
        except OSError as error:
            pause = next(pauses, None)
            if pause is None or isinstance(error, FileNotFoundError):
                raise
            log.warning(f"read again in {pause} s: {error}")
        clock.sleep(pause)
