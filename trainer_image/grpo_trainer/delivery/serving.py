"""Prepares the folder that a delivery's pod hands out, and stays as long as somebody asks for it.

What was exported is handed out as it is, with the hashes that the trainer wrote beside it: so a byte that was lost on
the volume is found on the laptop. Only what has no recorded hash is hashed here.
"""

import os
import time
from pathlib import Path

from grpo_api.artifacts import SUMS, FileEntry, Listing
from grpo_api.contract import EXPORT_FOLDER

from ..__main__ import read_plan
from ..checkpoints.hashing import read_sums, sha256_sums
from ..checkpoints.volume import list_files
from ..errors import BadInput
from ..paths import run_folder
from ..process.outcome import termination_log
from .state import asked, idle_seconds, publish

IDLE_SECONDS = 300.0
"""The pod ends when nobody has asked for anything for so long."""
POLL_SECONDS = 1.0


def serve(state: Path, dtype: str | None, *, merge: bool, idle: float = IDLE_SECONDS) -> int:
    """Prepare the export of the plan's run, converted if that is asked for, and wait until nobody wants it any more.

    Raises:
        BadInput: there is no export, or it lacks a file.
        OSError: the disk fails, or is full.
    """
    state.mkdir(parents=True, exist_ok=True)
    asked(state)
    folder = prepare(state, dtype, merge=merge)
    publish(state, folder, listing(folder))
    asked(state)
    while idle_seconds(state) < idle:
        time.sleep(min(POLL_SECONDS, idle))
    return 0


def prepare(state: Path, dtype: str | None, *, merge: bool) -> Path:
    """The folder to hand out: the export itself, or its conversion below `state`."""
    plan = read_plan(os.environ)
    root = run_folder(plan)
    export = root and root / EXPORT_FOLDER
    if export is None or not export.is_dir():
        raise BadInput(f"{export or 'the job has no checkpoint volume, so its export'} does not exist")
    if not (merge or dtype):
        return export
    from .converting import convert

    return convert(plan, export, state / "converted", dtype, merge=merge)


def listing(folder: Path) -> Listing:
    """The files of a folder with their sizes and hashes: those that were recorded, and of other files those found now.

    Raises:
        BadInput: a recorded file is missing.
        OSError: a file can't be read.
    """
    sizes, sums = list_files(folder), read_sums(folder)
    if missing := sorted(sums.keys() - sizes.keys()):
        raise BadInput(f"{folder} lacks {', '.join(missing)}, which {SUMS} names")
    found = {**sha256_sums(folder, {name: size for name, size in sizes.items() if name not in sums}), **sums}
    return Listing(files={name: FileEntry(bytes=sizes[name], sha256=found[name]) for name in sizes})


def refuse(why: str) -> int:
    """Say in the termination message why there is nothing to hand out; returns the exit code."""
    path = termination_log()
    if path.parent.is_dir():
        path.write_text(why[:2048], encoding="utf-8")
    return 1
