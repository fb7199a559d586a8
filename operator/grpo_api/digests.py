"""Computes the sha256 of every file of a folder.

The trainer records these hashes of an export, and `grpo` compares a download with them. Both must mean the same by
"every file", so the definition is here once. An export may have 65 GB in a few files. Files are read in pieces, and
several at a time, since hashlib releases Python's lock. Each piece is reported to the caller, so that the hang watchdog
counts the work as progress.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 4 * 2**20
"""Bytes read at a time: few calls, and little memory for all threads together."""
THREADS = 8
"""Files read at a time; a volume is read no faster with more, and a file by one only."""

Read = Callable[[int], None]
"""Called, from any thread, with the bytes of each piece that was read."""


def files_of(folder: Path) -> dict[str, Path]:
    """Everything below a folder that is no folder, by its path inside with slashes, sorted.

    Links are not followed and are in it, as is what is no regular file: see `regular`.

    Raises:
        OSError: a folder can't be read.
    """
    files, folders = {}, [folder]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir() and not path.is_symlink():
                folders.append(path)
            else:
                files[path.relative_to(folder).as_posix()] = path
    return dict(sorted(files.items()))


def regular(path: Path) -> bool:
    """Whether it is a file with content of its own: no link, which may point elsewhere tomorrow, and no pipe."""
    return path.is_file() and not path.is_symlink()


def digests(paths: Sequence[Path], read: Read = lambda _: None) -> list[str]:
    """The sha256 of each file, in hex and in order.

    Raises:
        OSError: a file can't be read.
    """
    with ThreadPoolExecutor(THREADS, "digests") as pool:
        return list(pool.map(lambda path: _digest(path, read), paths))


def _digest(path: Path, read: Read) -> str:
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha256.update(buffer[:count])
            read(count)
    return sha256.hexdigest()
