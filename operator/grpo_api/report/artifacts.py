"""Describes what a run leaves behind, its exported model and newest checkpoint, and hashes the
files of an export.

The trainer writes and reports these artifacts, the operator copies them into the status, and `grpo`
checks a download by them.

The trainer records the sha256 of each file of an export, and `grpo` compares a download with these
hashes. Both must mean the same by "every file", so it is defined here once. An export may have 65
GB in a few files. So files are read in pieces, and several at a time, since hashlib releases
Python's lock. Each piece is reported to the caller, so that the hang watchdog counts the work as
progress.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..text.base import Model
from ..text.quantity import Count, format_bytes
from ..text.timing import Seconds

SUMS = "SHA256SUMS"
"""File of an exported folder with the hashes of the model's files, in the form that `sha256sum
--check` reads."""
WEIGHTS = ".safetensors"
"""What the names of weight files end with."""
_LINE = re.compile(r"([0-9a-f]{64})  (.+)", re.ASCII)

MAX_WHERE = 1024
Where = Annotated[str, Field(min_length=1, max_length=MAX_WHERE, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A folder or an address, in one line."""
WeightsHash = Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]


class Export(Model):
    """The exported model of a run."""

    to: Literal["Volume", "ObjectStore", "Hub"]
    """What it was put on (spec.export.to)."""
    path: Where
    """Where it is. In an outcome the folder as the pod sees it; in the status, on a volume,
    `pvc://CLAIM/FOLDER`."""
    format: Literal["Model", "Adapter"]
    """Model: a whole model that transformers' from_pretrained loads. Adapter: a PEFT adapter, which
    needs its base."""
    bytes: Count
    """Size of all its files."""
    weights_hash: WeightsHash
    """One hash of its weight files, as `sha256sum *.safetensors | sha256sum` prints it."""

    @property
    def description(self) -> str:
        """What and where it is, in a sentence for people."""
        return f"{self.format.lower()} of {format_bytes(self.bytes)} at {self.path}"


class FileEntry(Model):
    """A file of an exported folder, as the pod that hands it out lists it."""

    bytes: Count
    """Its size."""
    sha256: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{64}$")]
    """Its hash."""


class Listing(Model):
    """All files of an exported folder."""

    files: Annotated[dict[str, FileEntry], Field(max_length=10_000)]
    """By their path inside the folder."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def weights_hash(self) -> str:
        """The one hash of the weight files."""
        return weights_hash({name: file.sha256 for name, file in self.files.items()})


class Checkpoint(Model):
    """A complete checkpoint of a run."""

    step: Count
    """Finished optimizer steps."""
    time: Seconds
    """Unix time at which it was sealed, by the trainer's or the volume's clock."""
    bytes: Count
    """Size of all its files."""
    where: Where
    """Its folder as the pod sees it."""


def sums_text(sums: Mapping[str, str]) -> str:
    """The lines of a list of hashes (name → sha256 in hex), in the order of the names' bytes."""
    ordered = sorted(sums.items(), key=lambda item: item[0].encode())
    return "".join(f"{digest}  {name}\n" for name, digest in ordered)


def parse_sums(text: str) -> dict[str, str]:
    """Return name → sha256 (hex) of the lines of a SHA256SUMS file.

    Raises:
        ValueError: a line does not have the form `HASH  NAME`.
    """
    sums = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if not match:
            raise ValueError(f"{line!r:.100} is no line of {SUMS}")
        sums[match[2]] = match[1]
    return sums


def weights_hash(sums: Mapping[str, str]) -> str:
    """The one hash of the weight files among these (name → sha256): of their lines in the list of
    hashes."""
    weights = {name: digest for name, digest in sums.items() if name.endswith(WEIGHTS)}
    return f"sha256:{hashlib.sha256(sums_text(weights).encode()).hexdigest()}"


PIECE_BYTES = 4 * 2**20
"""Bytes read at a time: few calls, and little memory for all threads together."""
THREADS = 8
"""Files read at a time; a volume is read no faster with more, and a file by one only."""

ReportBytes = Callable[[int], None]
"""Called, from any thread, with the bytes of each piece that was read or has arrived."""


def files_of(folder: Path) -> dict[str, Path]:
    """Everything below a folder that is no folder, by its path inside with slashes, sorted.

    Links are not followed and are in it, as is what is no regular file: see `is_regular_file`.

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


def is_regular_file(path: Path) -> bool:
    """Return True for a regular file. A link may point elsewhere tomorrow, and a pipe has no
    content of its own."""
    return path.is_file() and not path.is_symlink()


def sha256_digests(
    files: Mapping[str, Path], report_bytes: ReportBytes = lambda _: None
) -> dict[str, str]:
    """The sha256 of each file, in hex, by the file's name.

    Raises:
        OSError: a file can't be read.
    """
    with ThreadPoolExecutor(THREADS, "digests") as pool:
        hashes = pool.map(lambda path: _digest(path, report_bytes), files.values())
        return dict(zip(files, hashes, strict=True))


def _digest(path: Path, report_bytes: ReportBytes) -> str:
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha256.update(buffer[:count])
            report_bytes(count)
    return sha256.hexdigest()
