"""Prepares the files that a delivery's pod hands out, from a folder or the run's store, and stays
as long as somebody asks for them.

What was exported is handed out as it is, with the hashes that the trainer wrote beside it. So the
laptop finds a byte that was lost on the volume or the store. Only what has no recorded hash is
hashed here. What is on a store is passed on as it comes. So a node needs no room for it, and the
first byte needn't wait for the last.

The processes of the pod share their state as files of one folder: what is served, and when somebody
asked last. So no pod stays behind whose user has gone.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import SUMS, FileEntry, Listing, parse_sums
from grpo_api.report.history import HISTORY_FILES, METRICS_FILE, newest_history
from grpo_api.text.clock import Clock
from grpo_api.text.contract import EXPORT_FOLDER
from grpo_api.text.units import MIB

from ..checkpoints.hashing import list_files
from ..process.outcome import write_termination_message
from ..runtime.clock import SYSTEM_CLOCK, unix_time
from ..runtime.durable_files import write_atomically
from ..runtime.errors import BadInput
from ..runtime.paths import run_folder
from ..runtime.plan_file import read_plan
from ..stores.run_store import run_store
from ..stores.store_client import Store

T = TypeVar("T")

CHUNK = MIB
"""Bytes that are read at a time."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A model in a folder."""

    path: Path

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file by its path, sorted."""
        return list_files(self.path)

    def read(self, name: str, offset: int = 0) -> Iterator[bytes]:
        """A file's bytes from there to its end.

        Raises:
            OSError: it can't be read.
        """
        with (self.path / name).open("rb", buffering=0) as file:
            file.seek(offset)
            while chunk := file.read(CHUNK):
                yield chunk

    def local_folder(self, download_folder: Path) -> Path:  # noqa: ARG002
        """The folder itself: nothing is downloaded."""
        return self.path


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A model below a key of an object store."""

    store: Store
    key: str

    @property
    def location(self) -> str:
        """The store's URL."""
        return f"{self.store.url}/{self.key}"

    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file by its path, sorted."""
        sizes = self.store.object_sizes(self.key)
        return {name.removeprefix(f"{self.key}/"): sizes[name] for name in sorted(sizes)}

    def read(self, name: str, offset: int = 0) -> Iterator[bytes]:
        """A file's bytes from there to its end.

        Raises:
            StoreFailed: the store gave nothing for too long.
        """
        yield from self.store.stream(f"{self.key}/{name}", offset)

    def local_folder(self, download_folder: Path) -> Path:
        """The given folder, with all files downloaded.

        Raises:
            OSError: the disk fails, or is full. StoreFailed: as read.
        """
        self.store.bring(self.key, download_folder)
        return download_folder


Source = FolderSource | StoreSource


def exported_model(plan: TrainingPlan, clock: Clock = SYSTEM_CLOCK) -> Source:
    """The exported model of the plan's run, in its folder or on its store.

    Raises:
        BadInput: there is no exported model.
    """
    root = run_folder(plan.checkpoint_directory)
    run = run_store(plan, clock=clock)
    if run:
        key = run.export_folder()
        if key is None:
            raise BadInput(f"{run.store.url} has no exported model")
        return StoreSource(run.store, key)
    export = root and root / EXPORT_FOLDER
    if export is None or not export.is_dir():
        raise BadInput(
            f"{export or 'the job has no checkpoint volume, so its export'} does not exist"
        )
    return FolderSource(export)


def copy_history(plan: TrainingPlan, folder: Path, clock: Clock = SYSTEM_CLOCK) -> Source:
    """The history of the plan's run as it is now, copied into a folder: rank 0 may be writing on.

    Raises:
        BadInput: the run has no history.
        OSError: a file can't be read, or the disk is full. StoreFailed: the store gave nothing for
            too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = run_folder(plan.checkpoint_directory)
    run = run_store(plan, clock=clock)
    if run:
        _copy_newest(run.history_keys, partial(_copy_object, run.store), folder)
    elif root:
        _copy_newest(partial(_history_files, root), shutil.copyfile, folder)
    if not (folder / METRICS_FILE).exists():
        where = run.store.url if run else root
        raise BadInput(f"{where} has no history: no attempt has taken a step")
    return FolderSource(folder)


def _copy_newest(
    find_files: Callable[[], dict[str, T]], copy: Callable[[T, Path], object], folder: Path
) -> None:
    """Copy the newest attempt's files, and again where a newer attempt has begun meanwhile: it
    deletes the older ones."""
    newest = find_files()
    copied: dict[str, T] | None = None
    while newest != copied:
        for name in HISTORY_FILES:
            (folder / name).unlink(missing_ok=True)
        for name, file in newest.items():
            with suppress(FileNotFoundError):
                copy(file, folder / name)
        newest, copied = find_files(), newest


def _copy_object(store: Store, key: str, path: Path) -> None:
    if stored := store.get(key):
        path.write_bytes(stored[0])


def _history_files(root: Path) -> dict[str, Path]:
    """The newest attempt's files below a run's folder, by their names."""
    paths = [path.relative_to(root).as_posix() for path in root.glob("*/*.jsonl")]
    return {name: root / path for name, path in newest_history(paths).items()}


_LISTING = "listing.json"
_MODEL = "model"
_ASKED = "asked"


def publish_listing(state: Path, model: Source, listing: Listing) -> None:
    """The files can be had from now on."""
    if isinstance(model, FolderSource):
        (state / _MODEL).symlink_to(model.path)
    write_atomically(state / _LISTING, listing.model_dump_json())


def published_listing(state: Path) -> Listing | None:
    """What can be had; None until it is prepared."""
    try:
        return Listing.model_validate_json((state / _LISTING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def served_source(state: Path, clock: Clock = SYSTEM_CLOCK) -> Source:
    """Where the files are.

    Raises:
        BadInput: they are gone from the object store.
    """
    folder = state / _MODEL
    if folder.is_symlink():
        return FolderSource(folder)
    return exported_model(read_plan(), clock)


def record_request(state: Path) -> None:
    """Somebody is there."""
    (state / _ASKED).touch()


def idle_seconds(state: Path) -> float:
    """Seconds since the last request."""
    return unix_time() - (state / _ASKED).stat().st_mtime


IDLE_SECONDS = 300.0
"""Seconds without a request after which the pod ends."""
POLL_SECONDS = 1.0


def serve(
    state: Path,
    dtype: str | None,
    *,
    merge: bool,
    history: bool = False,
    idle: float = IDLE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Prepare the export of the plan's run, converted if that is asked for, or its history, and
    wait until no requests come any more.

    Raises:
        BadInput: there is no export or no history, or it lacks a file.
        OSError: the disk fails, or is full. StoreFailed: the store gave nothing for too long.
    """
    state.mkdir(parents=True, exist_ok=True)
    record_request(state)
    plan = read_plan()
    if history:
        files = copy_history(plan, state / "history", clock)
    else:
        files = exported_model(plan, clock)
        if merge or dtype:
            from .converting import convert_export

            folder = files.local_folder(state / "brought")
            converted = convert_export(plan, folder, state / "converted", dtype, merge=merge)
            files = FolderSource(converted)
    publish_listing(state, files, make_listing(files))
    record_request(state)
    while idle_seconds(state) < idle:
        clock.sleep(min(POLL_SECONDS, idle))
    return 0


def make_listing(model: Source) -> Listing:
    """The files of a model with their sizes and hashes: those that were recorded, and of other
    files those found now.

    Raises:
        BadInput: a recorded file is missing, or the record can't be read.
        OSError: a file can't be read. StoreFailed: the store gave nothing for too long.
    """
    sizes = model.sizes()
    try:
        sums = parse_sums(b"".join(model.read(SUMS)).decode()) if SUMS in sizes else {}
    except ValueError as error:
        raise BadInput(f"{model.location}/{SUMS}: {error}") from error
    if missing := sorted(sums.keys() - sizes.keys()):
        raise BadInput(f"{model.location} lacks {', '.join(missing)}, which {SUMS} names")
    entries: dict[str, FileEntry] = {}
    for name, size in sizes.items():
        digest = sums.get(name) or _sha256(model.read(name))
        entries[name] = FileEntry(bytes=size, sha256=digest)
    return Listing(files=entries)


def _sha256(chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def refuse(why: str) -> int:
    """Say in the termination message why there is nothing to hand out; returns the exit code."""
    write_termination_message(why[:2048])
    return 1
