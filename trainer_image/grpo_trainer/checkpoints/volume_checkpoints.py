"""Checkpoints as facts on a shared volume: who owns the folder, which checkpoints are complete, which one to resume.

Neither a crash in the middle of a write nor an old pod that lives on can damage a run, by two rules. A checkpoint
counts only with its manifest, which is written last and disappears first. And an attempt commits only while it owns the
folder: owner.json names the newest attempt that claimed it.

Plain file access without collectives; when it happens and on which rank is decided elsewhere (seal.py, resume.py).
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import Checkpoint

from ..runtime.durable_files import sync_folder, sync_folders, write_atomically
from ..runtime.errors import BadInput, Preempted
from ..runtime.paths import ATTEMPTS, CHECKPOINTS, MANIFEST, attempt_folder_name, number_in_name, run_folder
from .manifest import OWNER, Manifest, Owner

REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that a run which never wrote there need not wait out: no moment makes them pass."""


def claim(plan: TrainingPlan) -> None:
    """Take the folder for this attempt; older attempts can't commit or delete from now on.

    Raises:
        BadInput: another job owns the folder, or a first attempt may not write there.
        Preempted: a newer attempt has claimed it already.
        OSError: the disk fails, or refuses a run that it took before.
    """
    folder = _folder(plan)
    try:
        _take(plan, folder)
    except OSError as error:
        # A later attempt's run has written here before, so a refusal may pass: the caller tries again.
        if plan.job.attempt > 1 or error.errno not in REFUSALS:
            raise
        groups = sorted({os.getegid(), *os.getgroups()})
        raise BadInput(
            f"checkpoint_directory {folder} can't be written by user {os.geteuid()} with the groups "
            f"{groups}: {error.strerror}. Make the volume of spec.checkpoint writable for them"
        ) from error


def _take(plan: TrainingPlan, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / OWNER).exists():
        require_owner(plan)
    # Check and write are two steps, so of two attempts that claim at once both may pass. Each writes below its own
    # folder: that costs time and damages nothing.
    owner = Owner(uid=plan.job.uid, attempt=plan.job.attempt)
    write_atomically(folder / OWNER, owner.model_dump_json())
    (folder / attempt_folder_name(plan.job.attempt)).mkdir(exist_ok=True)


def require_owner(plan: TrainingPlan) -> None:
    """Make sure that no newer attempt and no other job owns the folder.

    Raises:
        BadInput: another job owns it.
        Preempted: a newer attempt owns it.
    """
    path = _folder(plan) / OWNER
    owner = Owner.model_validate_json(path.read_text(encoding="utf-8"))
    if owner.uid != plan.job.uid:
        raise BadInput(
            f"checkpoint_directory {path.parent} belongs to the job with uid {owner.uid}, this one is {plan.job.uid}; "
            f"give each job its own checkpoint.volume.subPath, or remove the old job's folder"
        )
    if owner.attempt > plan.job.attempt:
        raise Preempted(
            f"attempt {plan.job.attempt} is superseded by attempt {owner.attempt}, which owns {path.parent}"
        )


def _folder(plan: TrainingPlan) -> Path:
    folder = run_folder(plan.checkpoint_directory)
    assert folder is not None, "without a volume there is nothing to own"
    return folder


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints of all attempts, newest first: by step, then by attempt."""
    found = [path.parent for path in folder.glob(f"{ATTEMPTS}/{CHECKPOINTS}/{MANIFEST}")]
    # An attempt that resumes takes steps again, so two attempts may have saved the same step.
    return sorted(found, key=lambda path: (number_in_name(path), number_in_name(path.parent)), reverse=True)


def checkpoints_of(folder: Path) -> list[Path]:
    """The complete checkpoints of another run's folder, newest first, or the one checkpoint that the folder is."""
    return [folder] if (folder / MANIFEST).exists() else complete(folder)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        BadInput: it can't be read.
    """
    try:
        return Manifest.model_validate_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{checkpoint / MANIFEST} can't be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(f"{checkpoint / MANIFEST} is not a manifest: {error.errors()[0]['msg']}") from error


def sealed_at(checkpoint: Path) -> float:
    """When a complete checkpoint was sealed, in unix seconds of the volume's clock."""
    return (checkpoint / MANIFEST).stat().st_mtime


def told(checkpoint: Path, where: str) -> Checkpoint:
    """The Checkpoint entry of the progress report for a complete checkpoint; `where` is its path for users.

    Raises:
        BadInput: its manifest can't be read.
    """
    manifest = read_manifest(checkpoint)
    size = sum(file.bytes for file in manifest.files.values())
    return Checkpoint(step=manifest.step, time=sealed_at(checkpoint), bytes=size, where=where)


def list_files(checkpoint: Path) -> dict[str, int]:
    """Size in bytes of every file inside a checkpoint by its path there, sorted, without the manifest."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if name != MANIFEST}


def commit(plan: TrainingPlan, checkpoint: Path, manifest: Manifest) -> None:
    """Make a checkpoint complete, if this attempt still owns the folder.

    Raises:
        Preempted: a newer attempt owns it; the checkpoint stays incomplete.
        OSError: the disk is full; the checkpoint stays incomplete.
    """
    require_owner(plan)
    # A manifest that survives a power cut must not list files whose names were lost.
    sync_folders(checkpoint)
    write_atomically(checkpoint / MANIFEST, manifest.model_dump_json())


def withdraw(plan: TrainingPlan, checkpoints: Iterable[Path]) -> None:
    """Make complete checkpoints count no more; the next rotation deletes them.

    Raises:
        Preempted: a newer attempt owns the folder.
    """
    require_owner(plan)
    # The manifest alone makes a checkpoint count; the next rotation deletes the other files.
    for checkpoint in checkpoints:
        (checkpoint / MANIFEST).unlink(missing_ok=True)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: an interrupted deletion can't leave one that looks complete."""
    if (checkpoint / MANIFEST).exists():
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def rotate(plan: TrainingPlan) -> None:
    """Delete complete checkpoints beyond checkpoint.keep, and what this and older attempts left incomplete.

    Those that were committed last are kept. The step says less: a run goes back behind a checkpoint that is damaged,
    and its next ones come before that.

    Raises:
        Preempted: a newer attempt owns the folder by now, and what is left in it is that one's to keep.
    """
    folder = _folder(plan)
    committed = sorted(
        complete(folder), key=lambda path: (number_in_name(path.parent), number_in_name(path)), reverse=True
    )
    for checkpoint in (*committed[plan.checkpoint.keep :], *_incomplete(plan)):
        # Before each deletion: it takes time, in which a newer attempt may claim the folder.
        require_owner(plan)
        remove(checkpoint)


def _incomplete(plan: TrainingPlan) -> list[Path]:
    """The incomplete checkpoints of this and earlier attempts. A newer attempt may be writing its own now."""
    attempts = [path for path in _folder(plan).glob(ATTEMPTS) if number_in_name(path) <= plan.job.attempt]
    found = [checkpoint for attempt in attempts for checkpoint in attempt.glob(CHECKPOINTS)]
    return [checkpoint for checkpoint in found if not (checkpoint / MANIFEST).exists()]
