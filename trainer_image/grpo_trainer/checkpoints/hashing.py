"""Hashes of a checkpoint's files, cut into parts, so that every rank hashes as many bytes as the
others.

The largest file of a checkpoint is often most of it (optimizer.pt). Shares by file would leave one
rank to hash it while all others wait. So every file is cut into chunks with a hash each, and a
share is a run of chunks.

XXH3-128 runs as fast as memory and finds every accident; forgery is no threat to a checkpoint that
lies beside its own hashes.
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from grpo_api.report.artifacts import SUMS, ReportBytes, parse_sums, sha256_digests
from grpo_api.text.units import MIB

from ..runtime.durable_files import READ_PAUSES, read_again
from ..runtime.errors import BadInput
from ..runtime.paths import MANIFEST
from .manifest import FileRecord

CHUNK_BYTES = 64 * MIB
"""Bytes of a file under one hash; the last chunk of a file is shorter."""
UNREADABLE = "can't be read"
"""What is said of a file that the disk fails to give."""
READ_BYTES = 2 * MIB
"""Bytes read at a time: few calls, and still in the processor's cache when they are hashed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of bytes of a file that has one hash: `begin` to `end`, exclusive."""

    name: str
    """The file's path inside the checkpoint."""
    begin: int
    end: int


def split_into_parts(sizes: Mapping[str, int], chunk: int = CHUNK_BYTES) -> list[Part]:
    """The parts of files of these sizes in bytes, in order; an empty file is one empty part."""
    return [part for name, size in sizes.items() for part in _cut_one(name, size, chunk)]


def recorded_parts(files: Mapping[str, FileRecord]) -> list[tuple[Part, str]]:
    """The parts that a manifest has hashes of, in order, each with its hash."""
    pairs: list[tuple[Part, str]] = []
    for name, file in files.items():
        parts = _cut_one(name, file.bytes, file.chunk_bytes)
        pairs += zip(parts, file.hashes, strict=True)
    return pairs


def _cut_one(name: str, size: int, chunk: int) -> list[Part]:
    # An empty file is one empty part, so that it has a hash too.
    begins = range(0, max(size, 1), chunk)
    return [Part(name, begin, min(begin + chunk, size)) for begin in begins]


def share(parts: Sequence[Part], rank: int, world_size: int) -> list[Part]:
    """This rank's run of the parts; those of all ranks, one after the other, are all parts.

    A part belongs to the rank into whose equal range of all bytes its first byte falls. So no share
    differs from the mean by more than the largest part.
    """
    total, before, own_parts = sum(part.end - part.begin for part in parts), 0, []
    for part in parts:
        # empty files at the end begin where all bytes end
        if min(before * world_size // max(total, 1), world_size - 1) == rank:
            own_parts.append(part)
        before += part.end - part.begin
    return own_parts


def digests(folder: Path, parts: Iterable[Part]) -> list[str]:
    """The hash of each part, in hex, its file made durable (fsync) first.

    Raises:
        OSError: a file can't be read or made durable, or is shorter than the part says.
    """
    hashes, durable = [], set()
    for part in parts:
        # A manifest that outlives a power cut must not vouch for bytes that were in the page cache
        # only. A file has many parts, but one fsync makes all of them durable.
        if part.name not in durable:
            with (folder / part.name).open("rb") as file:
                os.fsync(file.fileno())
            durable.add(part.name)
        hashes.append(_digest(folder, part))
    return hashes


def read_part(folder: Path, part: Part) -> bytes:
    """The bytes of a part.

    Raises:
        OSError: the file can't be read, or is shorter than the part says.
    """
    with (folder / part.name).open("rb") as file:
        file.seek(part.begin)
        content = file.read(part.end - part.begin)
    if len(content) < part.end - part.begin:
        raise OSError(errno.EIO, f"ends before byte {part.end}", str(folder / part.name))
    return content


def _digest(folder: Path, part: Part) -> str:
    digest, bytes_left = xxhash.xxh3_128(), part.end - part.begin
    buffer = memoryview(bytearray(min(READ_BYTES, bytes_left)))
    # Unbuffered and into one buffer: nothing is copied, and what is hashed is still in the
    # processor's cache.
    with (folder / part.name).open("rb", buffering=0) as file:
        file.seek(part.begin)
        while bytes_left:
            count = file.readinto(buffer[:bytes_left])
            if not count:
                raise OSError(
                    errno.EIO,
                    f"ends {bytes_left} bytes before byte {part.end}",
                    str(folder / part.name),
                )
            digest.update(buffer[:count])
            bytes_left -= count
    return digest.hexdigest()


def sha256_sums(
    folder: Path, names: Iterable[str], report_bytes: ReportBytes = lambda _: None
) -> dict[str, str]:
    """Name → sha256 in hex of whole files, several at a time: what others can check, too.

    Raises:
        OSError: a file can't be read.
    """
    return sha256_digests({name: folder / name for name in names}, report_bytes)


def read_sums(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file of an exported folder by name, as recorded at the export;
    empty without a record.

    Raises:
        BadInput: the list can't be read.
    """
    path = folder / SUMS
    try:
        return parse_sums(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error


def records(
    sizes: Mapping[str, int], hashes: Sequence[str], chunk: int = CHUNK_BYTES
) -> dict[str, FileRecord]:
    """A manifest's entries for files of these sizes and the hashes of all their parts, in order."""
    remaining = iter(hashes)
    entries: dict[str, FileRecord] = {}
    for name, size in sizes.items():
        own_hashes = [next(remaining) for _ in _cut_one(name, size, chunk)]
        entries[name] = FileRecord(bytes=size, chunk_bytes=chunk, hashes=own_hashes)
    return entries


def list_files(checkpoint: Path) -> dict[str, int]:
    """Size in bytes of every file inside a checkpoint by its path there, sorted, without the
    manifest."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if name != MANIFEST}


def damage(
    folder: Path, files: Mapping[str, FileRecord], rank: int = 0, world_size: int = 1
) -> list[str]:
    """Return the damages of this rank's share of a checkpoint's files as sentences; empty if all
    hashes match.

    What a volume fails to give is read again, within READ_PAUSES for all files together.
    """
    pauses = iter(READ_PAUSES)
    expected = dict(recorded_parts(files))
    problems: dict[str, None] = {}  # a missing file is named once, however many parts it has
    for part in share(list(expected), rank, world_size):
        check = partial(_problem, folder, part, files[part.name].bytes, expected[part])
        try:
            problem = read_again(check, pauses)
        except OSError as error:
            problem = f"{part.name} {UNREADABLE}: {error.strerror}"
        if problem:
            problems[problem] = None
    return list(problems)


def difference_message(part: Part) -> str:
    """What is wrong with a part whose bytes have another hash."""
    return f"{part.name} differs from its recorded hash in bytes {part.begin} to {part.end}"


def _problem(folder: Path, part: Part, size: int, expected: str) -> str | None:
    path = folder / part.name
    if not path.is_file():
        return f"{part.name} is missing"
    if path.stat().st_size != size:
        return f"{part.name} has {path.stat().st_size} bytes instead of {size}"
    return difference_message(part) if _digest(folder, part) != expected else None
