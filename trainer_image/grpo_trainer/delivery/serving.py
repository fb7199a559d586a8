"""Prepares the folder that a delivery's pod hands out, and stays as long as somebody asks for it.

What was exported is handed out as it is, with the hashes that the trainer wrote beside it: so a
byte that was lost on the volume or the store is found on the laptop. Only what has no recorded hash
is hashed here.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_api.report.artifacts import SUMS, FileEntry, Listing, parse_sums
from grpo_api.text.clock import Clock

from ..process.outcome import termination_log
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.durable_files import read_plan
from ..runtime.errors import BadInput
from .served_files import (
    FolderSource,
    Source,
    copy_history,
    exported_model,
    idle_seconds,
    publish_listing,
    record_request,
)

IDLE_SECONDS = 300.0
"""The pod ends when nobody has asked for anything for so long."""
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
    wait until nobody wants it any more.

    Raises:
        BadInput: there is no export or no history, or it lacks a file.
        OSError: the disk fails, or is full. StoreFailed: the store gave nothing for too long.
    """
    state.mkdir(parents=True, exist_ok=True)
    record_request(state)
    found = prepare_files(state, dtype, merge=merge, history=history, clock=clock)
    publish_listing(state, found, make_listing(found))
    record_request(state)
    while idle_seconds(state) < idle:
        clock.sleep(min(POLL_SECONDS, idle))
    return 0


def prepare_files(
    state: Path,
    dtype: str | None,
    *,
    merge: bool,
    history: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Source:
    """What is handed out: the export itself, or its conversion or the run's history below
    `state`."""
    plan = read_plan(os.environ)
    if history:
        return copy_history(
            plan.job, plan.checkpoint, plan.checkpoint_directory, state / "history", clock
        )
    export = exported_model(plan.job, plan.checkpoint, plan.checkpoint_directory, clock)
    if not (merge or dtype):
        return export
    from .converting import convert_export

    return FolderSource(
        convert_export(
            plan, export.local_folder(state / "brought"), state / "converted", dtype, merge=merge
        )
    )


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
    found = hashlib.sha256()
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


def refuse(why: str) -> int:
    """Say in the termination message why there is nothing to hand out; returns the exit code."""
    path = termination_log()
    if path.parent.is_dir():
        path.write_text(why[:2048], encoding="utf-8")
    return 1
