"""Files of an exported folder onto a laptop: every byte checked, and what has arrived is never
asked for again.

A file arrives under a name of its own, made of its hash. What has arrived of this version is
continued, however the connection was cut. What has arrived of another version is not. It gets its
name once its hash is right.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from grpo_api.report.artifacts import FileEntry, Listing, ReportBytes
from grpo_api.text.clock import Clock
from grpo_api.text.quantity import format_bytes

from ..show.errors import KubectlError, OptionError
from .clock import SYSTEM_CLOCK

ReadFile = Callable[[str, int], Iterable[bytes]]
"""The bytes of a file, by its name in the listing, from an offset on; KubectlError where the
connection breaks."""

PAUSES: tuple[float, ...] = (0, 1, 2, 4, 8, 15, 30)
"""Seconds between tries without a byte; then it is given up, and the same command goes on later."""
_PART = re.compile(r"\.[0-9a-f]{32}\.part", re.ASCII)
_SHOWN = 3


def require_safe(listing: Listing) -> None:
    """Make sure that every file stays inside the folder.

    Raises:
        KubectlError: a name leads out of the folder, or is not a file name.
    """
    for name in listing.files:
        path = PurePosixPath(name)
        unsafe = path.is_absolute() or ".." in path.parts or not path.parts or str(path) != name
        if unsafe or not name.isprintable() or "\\" in name or _PART.fullmatch(path.name):
            raise KubectlError(
                f"the pod names a file {name!r:.100}, which can't be a file of a model; nothing "
                "was written"
            )


def require_folder(folder: Path) -> None:
    """Make sure that the folder is one, or can become one.

    Raises:
        OptionError: there is something else of that name.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--to {folder}: is no folder")


def missing_files(folder: Path, listing: Listing) -> dict[str, FileEntry]:
    """The files that are not there yet; those that are, were hashed and are the same.

    Raises:
        OptionError: the folder has files of something else, or can't be read.
    """
    try:
        there = {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
        }
        strangers = sorted(name for name in there if _is_strange(folder, name, listing))
    except OSError as error:
        raise OptionError(f"--to {folder}: {error}") from error
    if strangers:
        shown = ", ".join(strangers[:_SHOWN])
        if strangers[_SHOWN:]:
            shown += f" and {len(strangers) - _SHOWN} more"
        raise OptionError(
            f"--to {folder}: has files that are not of this export: {shown}; name a new folder"
        )
    return {name: entry for name, entry in listing.files.items() if name not in there}


def _is_strange(folder: Path, name: str, listing: Listing) -> bool:
    if name in listing.files:
        return not _is_same(folder / name, listing.files[name])
    return not _PART.fullmatch(PurePosixPath(name).name)


def _is_same(path: Path, entry: FileEntry) -> bool:
    if path.stat().st_size != entry.bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def require_room(folder: Path, wanted: dict[str, FileEntry]) -> None:
    """Make the folder, and make sure that what is missing fits on its disk.

    Raises:
        OptionError: it can't be made, or the disk has less room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parts = {path.name: path.stat().st_size for path in folder.rglob("*.part")}
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OptionError(f"--to {folder}: {error.strerror}") from error
    needed = 0
    for entry in wanted.values():
        arrived = parts.get(_part_name(entry), 0)
        needed += max(0, entry.bytes - arrived)
    if needed > free:
        raise OptionError(
            f"--to {folder}: {format_bytes(needed)} are to come, its disk has "
            f"{format_bytes(free)} free"
        )


def _part_name(entry: FileEntry) -> str:
    return f".{entry.sha256[:32]}.part"


def download_files(
    folder: Path,
    wanted: dict[str, FileEntry],
    read_file: ReadFile,
    report_bytes: ReportBytes,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Bring the files into the folder, one after the other, and clear away parts of other versions.

    Raises:
        KubectlError: the connection gave nothing for too long, or a file is not what its hash says.
        OptionError: the disk is full, or takes no more.
    """
    try:
        for name, entry in wanted.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch(path, name, entry, read_file, report_bytes, clock=clock)
        for part in folder.rglob("*.part"):
            if _PART.fullmatch(part.name):
                part.unlink()
    except OSError as error:
        raise OptionError(
            f"--to {folder}: {error.strerror}; what has arrived stays, and the same command goes "
            "on from there"
        ) from error


def _fetch(
    path: Path,
    name: str,
    entry: FileEntry,
    read_file: ReadFile,
    report_bytes: ReportBytes,
    *,
    clock: Clock,
) -> None:
    part = path.with_name(_part_name(entry))
    part.touch()
    report_bytes(part.stat().st_size)
    for _ in range(2):
        _complete(part, name, entry, read_file, report_bytes, clock=clock)
        if _is_same(part, entry):
            _publish(part, path)
            return
        report_bytes(-part.stat().st_size)
        part.write_bytes(b"")
    raise KubectlError(
        f"{name} came twice with another sha256 than the recorded {entry.sha256}: what is there "
        "is damaged"
    )


def _complete(
    part: Path,
    name: str,
    entry: FileEntry,
    read_file: ReadFile,
    report_bytes: ReportBytes,
    *,
    clock: Clock,
) -> None:
    """Ask for what is missing until nothing is, with growing pauses while nothing comes."""
    failed, why = 0, ""
    while (before := part.stat().st_size) < entry.bytes:
        if failed == len(PAUSES):
            raise KubectlError(
                f"{name}: nothing came for a minute{why}; the same command goes on from there"
            )
        clock.sleep(PAUSES[failed])
        why = _append(part, entry, read_file(name, before), report_bytes)
        failed = 0 if part.stat().st_size > before else failed + 1


def _append(
    part: Path, entry: FileEntry, chunks: Iterable[bytes], report_bytes: ReportBytes
) -> str:
    """Write what comes until it ends; returns why it broke off, if it did."""
    with part.open("ab") as file:
        bytes_left = entry.bytes - file.tell()
        try:
            for chunk in chunks:
                trimmed_chunk = chunk[:bytes_left]
                file.write(trimmed_chunk)
                bytes_left -= len(trimmed_chunk)
                report_bytes(len(trimmed_chunk))
        except KubectlError as error:
            return f": {error}"
    return ""


def _publish(part: Path, path: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
