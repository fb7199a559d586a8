"""Archives whose bytes follow from their content: nothing of when, where and by whom they were made
is in them.

As reproducible-builds.org asks: entries in the order of their names, times no later than
SOURCE_DATE_EPOCH, numeric owners. setuptools and helm write archives that differ with every run.
"""

import gzip
import hashlib
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

KEPT_HEADERS = "SCHILY.xattr."
"""Extended attributes, such as capabilities of a program. Every other extra header repeats a
field."""
EXECUTABLE, PLAIN = 0o755, 0o644


class Hashed:
    """A stream that hashes and counts what it passes on."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Passes the data on."""
        self._hash.update(data)
        self.size += len(data)
        return self._target.write(data)

    def flush(self) -> None:
        """For callers that flush; what is behind it is flushed when it is closed."""

    @property
    def digest(self) -> str:
        """`sha256:` and hex digits of all that was written."""
        return f"sha256:{self._hash.hexdigest()}"


@contextmanager
def tar_stream(target: IO[bytes] | Hashed) -> Iterator[tarfile.TarFile]:
    """An uncompressed tar that is written to the target."""
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        yield tar


@contextmanager
def gzip_stream(target: IO[bytes] | Hashed) -> Iterator[IO[bytes]]:
    """What is written to it arrives compressed, without a name or a time."""
    with gzip.GzipFile(filename="", mode="wb", fileobj=target, mtime=0, compresslevel=6) as stream:
        yield stream  # type: ignore[misc]


def copy_entries(
    source: tarfile.TarFile, target: tarfile.TarFile, change: Callable[[tarfile.TarInfo], bool]
) -> None:
    """Copy what `change` keeps, after its edits, by name; hard links last, for they need what they
    name."""
    for entry in sorted(source.getmembers(), key=lambda entry: (entry.islnk(), entry.name)):
        if change(entry):
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)


def settle(entry: tarfile.TarInfo, epoch: int) -> None:
    """Take out of an entry what differs from build to build; the owner's number stays."""
    entry.name = entry.name.removeprefix("./")
    entry.mtime = min(int(entry.mtime), epoch)
    entry.uname = entry.gname = ""
    entry.pax_headers = {
        name: text for name, text in entry.pax_headers.items() if name.startswith(KEPT_HEADERS)
    }


def settle_package(archive: Path, epoch: int) -> None:
    """Rewrite a .tar.gz so that its entries have fixed times, modes and the owner 0."""

    def change(entry: tarfile.TarInfo) -> bool:
        settle(entry, epoch)
        entry.mtime = epoch
        entry.uid = entry.gid = 0
        entry.mode = EXECUTABLE if entry.isdir() or entry.mode & 0o100 else PLAIN
        return True

    part = archive.with_suffix(".part")
    with (
        tarfile.open(archive) as source,
        part.open("wb") as file,
        gzip_stream(file) as packed,
        tar_stream(packed) as tar,
    ):
        copy_entries(source, tar, change)
    part.replace(archive)


def pack(folder: Path, archive: Path, epoch: int) -> None:
    """Write the content of a folder as a settled .tar.gz."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    settle_package(archive, epoch)


def sha256(file: Path) -> str:
    """Hex digits of a file's hash."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_checksums(folder: Path) -> Path:
    """Write SHA256SUMS over all other files of the folder, as sha256sum does."""
    sums = folder / "SHA256SUMS"
    files = sorted(path for path in folder.iterdir() if path != sums)
    sums.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))
    return sums


def empty(folder: Path) -> None:
    """Make the folder, without anything in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
