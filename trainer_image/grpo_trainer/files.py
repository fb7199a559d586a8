"""Writes that a crash can't tear: a temporary name, fsync, rename, fsync of the folder.

Manifests, owner files and outcomes must be whole or absent.
"""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, so that every reader sees the old file or the new one.

    Raises:
        OSError: the disk is full or the folder can't be written; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
