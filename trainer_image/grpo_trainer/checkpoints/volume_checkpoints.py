"""Checkpoints as facts on a shared volume: who owns the folder, which checkpoints are complete,
which one to resume.

Neither a crash in the middle of a write nor an old pod that lives on can damage a run, by two
rules. A checkpoint counts only with its manifest, which is written last and disappears first. And
an attempt commits only while it owns the folder: owner.json names the newest attempt that claimed
it.

The functions are plain file access on one rank. VolumeSource and VolumeTarget call them on the
ranks that have to.
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_api.report.artifacts import Checkpoint
from grpo_api.report.report import Outcome
from grpo_api.text.clock import Clock
from grpo_api.text.contract import EXPORT_FOLDER

from ..gang import ranks
from ..process.outcome import last_success
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.durable_files import (
    READ_PAUSES,
    disk_errors,
    read_again,
    retry_disk_errors,
    sync_folder,
    sync_folders,
    write_atomically,
)
from ..runtime.errors import BadInput, Preempted
from ..runtime.paths import (
    ATTEMPTS,
    CHECKPOINTS,
    MANIFEST,
    attempt_folder_name,
    glob_run,
    number_in_name,
)
from .hashing import UNREADABLE, damage, digests, list_files, records, share, split_into_parts
from .manifest import OWNER, FileRecord, Manifest, Owner

log = logging.getLogger(__name__)

REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that a run which never wrote there need not wait out: no moment makes them pass."""


def claim(folder: Path, owner: Owner) -> None:
    """Take the folder for this attempt; older attempts can't commit or delete from now on.

    Raises:
        BadInput: another job owns the folder, or a first attempt may not write there.
        Preempted: a newer attempt has claimed it already.
        OSError: the disk fails, or refuses a run that it took before.
    """
    try:
        _take(folder, owner)
    except OSError as error:
        # A later attempt's run has written here before, so a refusal may pass: the caller tries
        # again.
        if owner.attempt > 1 or error.errno not in REFUSALS:
            raise
        raise BadInput(f"checkpoint_directory {refusal_message(folder, error)}") from error


def refusal_message(folder: Path, error: OSError) -> str:
    """Who may not write to a folder, and what to do."""
    groups = sorted({os.getegid(), *os.getgroups()})
    return (
        f"{folder} can't be written by user {os.geteuid()} with the groups {groups}: "
        f"{error.strerror}. Make the volume of spec.checkpoint writable for them"
    )


def _take(folder: Path, owner: Owner) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / OWNER).exists():
        require_owner(folder, owner)
    # Check and write are two steps, so of two attempts that claim at once both may pass, and the
    # older one may write last. The newer one takes the folder back when it next needs it.
    (folder / attempt_folder_name(owner.attempt)).mkdir(exist_ok=True)
    write_atomically(folder / OWNER, owner.model_dump_json())


def require_owner(folder: Path, claimant: Owner) -> None:
    """Make sure that no newer attempt and no other job than the claimant's owns the folder; take
    it back from an older attempt that claimed it at the same moment.

    Raises:
        BadInput: another job owns it.
        Preempted: a newer attempt owns it.
    """
    try:
        # A newer image may say more; uid and attempt alone fence the folder.
        owner = Owner.model_validate_json((folder / OWNER).read_bytes(), extra="ignore")
    except ValidationError as error:
        raise BadInput(
            f"{folder / OWNER} does not say whose the folder is; if it is this job's, remove it"
        ) from error
    if owner.uid != claimant.uid:
        raise BadInput(
            f"checkpoint_directory {folder} belongs to the job with uid {owner.uid}, this one is "
            f"{claimant.uid}; give each job its own checkpoint.volume.subPath, or remove the old "
            "job's folder"
        )
    if owner.attempt > claimant.attempt:
        raise Preempted(
            f"attempt {claimant.attempt} is superseded by attempt {owner.attempt}, which owns "
            f"{folder}"
        )
    if owner.attempt < claimant.attempt:
        write_atomically(folder / OWNER, claimant.model_dump_json())


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints of all attempts, newest first: by step, then by attempt."""
    checkpoints = [path.parent for path in glob_run(folder, f"{ATTEMPTS}/{CHECKPOINTS}/{MANIFEST}")]
    # An attempt that resumes takes steps again, so two attempts may have saved the same step.
    return sorted(
        checkpoints,
        key=lambda path: (number_in_name(path), number_in_name(path.parent)),
        reverse=True,
    )


def checkpoints_of(folder: Path) -> list[Path]:
    """The complete checkpoints of another run's folder, newest first, or the one checkpoint that
    the folder is."""
    return [folder] if (folder / MANIFEST).exists() else complete(folder)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        BadInput: it can't be read.
    """
    try:
        content = read_again((checkpoint / MANIFEST).read_bytes, iter(READ_PAUSES))
        return Manifest.model_validate_json(content)
    except OSError as error:
        raise BadInput(f"{checkpoint / MANIFEST} {UNREADABLE}: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(
            f"{checkpoint / MANIFEST} is not a manifest: {error.errors()[0]['msg']}"
        ) from error


def sealed_at(checkpoint: Path) -> float:
    """When a complete checkpoint was sealed, in unix seconds of the volume's clock."""
    return (checkpoint / MANIFEST).stat().st_mtime


def describe_checkpoint(checkpoint: Path, where: str) -> Checkpoint:
    """The Checkpoint entry of the progress report for a complete checkpoint; `where` is its path
    for users.

    Raises:
        BadInput: its manifest can't be read.
    """
    manifest = read_manifest(checkpoint)
    size = sum(file.bytes for file in manifest.files.values())
    return Checkpoint(step=manifest.step, time=sealed_at(checkpoint), bytes=size, where=where)


def commit(folder: Path, owner: Owner, checkpoint: Path, manifest: Manifest) -> None:
    """Make a checkpoint complete, if this attempt still owns the folder.

    Raises:
        Preempted: a newer attempt owns it; the checkpoint stays incomplete.
        OSError: the disk is full; the checkpoint stays incomplete.
    """
    require_owner(folder, owner)
    # A manifest that survives a power cut must not list files whose names were lost.
    sync_folders(checkpoint)
    write_atomically(checkpoint / MANIFEST, manifest.model_dump_json())


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: an interrupted deletion can't leave one that looks
    complete."""
    if (checkpoint / MANIFEST).exists():
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def rotate(folder: Path, owner: Owner, keep: int) -> None:
    """Delete complete checkpoints beyond the `keep` newest, and what this and older attempts left
    incomplete.

    Those that were committed last are kept. The step says less: a run goes back behind a checkpoint
    that is damaged, and its next ones come before that.

    Raises:
        Preempted: a newer attempt owns the folder by now, and what is left in it is that one's to
            keep.
    """
    committed = sorted(
        complete(folder),
        key=lambda path: (number_in_name(path.parent), number_in_name(path)),
        reverse=True,
    )
    for checkpoint in (*committed[keep:], *_incomplete(folder, owner.attempt)):
        # Before each deletion: it takes time, in which a newer attempt may claim the folder.
        require_owner(folder, owner)
        remove(checkpoint)


def _incomplete(folder: Path, newest: int) -> list[Path]:
    """The incomplete checkpoints of the attempts up to the `newest` one. A newer attempt may be
    writing its own now."""
    return [
        checkpoint
        for checkpoint in glob_run(folder, f"{ATTEMPTS}/{CHECKPOINTS}")
        if number_in_name(checkpoint.parent) <= newest and not (checkpoint / MANIFEST).exists()
    ]


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """A run's checkpoints on a volume that all nodes share."""

    folder: Path
    """The run's folder."""

    @property
    def run_address(self) -> str:
        """Address of the run's folder, for messages."""
        return str(self.folder)

    def address(self, checkpoint: Path) -> str:
        """Address of a checkpoint, for messages."""
        return str(checkpoint)

    def list_checkpoints(self) -> list[Path]:
        """The complete checkpoints, newest first. A collective: rank 0 lists them for all, since a
        volume may show its folders to one node later than to another.

        Raises:
            DiskFailed: a folder can't be listed.
        """
        return ranks.run_on_rank0(disk_errors()(lambda: checkpoints_of(self.folder)))

    def bring(self, checkpoint: Path) -> list[str]:
        """Check this rank's share of a checkpoint's files, which are there already; what is wrong,
        as sentences."""
        try:
            files = read_manifest(checkpoint).files
            return damage(checkpoint, files, ranks.rank(), ranks.world_size())
        except BadInput as error:
            return [str(error)]

    def bring_export(self) -> None:
        """Nothing: it is there."""

    def remove_copies(self) -> None:
        """Nothing: there are none."""


@dataclass(frozen=True, slots=True)
class VolumeTarget(VolumeSource):
    """The run's checkpoints on a volume, for the attempt that makes them. Only the newest attempt
    may commit, withdraw or delete."""

    owner: Owner
    """The run and the attempt."""
    keep: int
    """Checkpoints that are kept."""
    clock: Clock = SYSTEM_CLOCK
    """The clock that the claim's retries wait by."""

    @property
    def attempt_folder(self) -> Path:
        """Folder of this attempt."""
        return self.folder / attempt_folder_name(self.owner.attempt)

    def claim(self) -> None:
        """Take the folder for this attempt, and check that every rank sees the same one. Older
        attempts can't commit from now on. A collective.

        Raises:
            BadInput, Preempted: as claim; or a rank does not see the folder.
            DiskFailed: the disk took nothing for minutes.
        """
        claim_folder = disk_errors()(lambda: claim(self.folder, self.owner))
        retry_disk_errors(lambda: ranks.run_on_rank0(claim_folder), self.clock)
        # Every rank saves its own partition. On a folder of its own node alone no attempt could
        # load all of them.
        ranks.run_on_all(lambda: _require_visible(self.folder / OWNER))

    def require_owner(self) -> None:
        """See require_owner."""
        require_owner(self.folder, self.owner)

    def find_success(self) -> Outcome | None:
        """The durable success of an earlier attempt, whose process may have died after writing it;
        None if the export that it names is gone. A collective."""
        # Rank 0's answer for all, as of the list of checkpoints.
        return ranks.run_on_rank0(disk_errors()(self._find_success))

    def _find_success(self) -> Outcome | None:
        success, folder = last_success(self.folder), self.folder / EXPORT_FOLDER
        is_on_volume = success and success.export and success.export.to == "Volume"
        # A newer attempt that did not know of the success may have been killed while it exported.
        if is_on_volume and not folder.exists():
            log.warning(f"{folder} is gone, so that the model is exported again")
            return None
        return success

    def store_files(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Hash what all ranks wrote of a checkpoint, a share on each rank; the records of all its
        files. A collective.

        Raises:
            DiskFailed: the disk of any rank fails.
        """
        # Rank 0's list for all: the shares are disjoint and complete whatever another node sees of
        # the volume.
        sizes = ranks.run_on_rank0(disk_errors()(lambda: list_files(checkpoint)))
        own_parts = share(split_into_parts(sizes), ranks.rank(), ranks.world_size())
        hash_parts = disk_errors()(lambda: digests(checkpoint, own_parts))
        hashed = ranks.gather(ranks.run_on_all(hash_parts))
        return records(sizes, [digest for part in hashed for digest in part])

    def commit(self, checkpoint: Path, manifest: Manifest) -> None:
        """Write the manifest, and only then rotate: until it is complete, the new checkpoint
        replaces no old one. A collective.

        Raises:
            DiskFailed: the disk fails before the manifest is complete.
            Preempted: a newer attempt owns the folder.
        """
        write = disk_errors()(lambda: commit(self.folder, self.owner, checkpoint, manifest))
        ranks.run_on_rank0(write)
        ranks.run_on_rank0(self._rotate)

    def _rotate(self) -> None:
        try:
            rotate(self.folder, self.owner, self.keep)
        except OSError as error:
            log.warning(f"old checkpoints stay until the next one is saved: {error}")

    def discard(self, checkpoint: Path) -> None:
        """Delete what was written of a checkpoint that failed, on rank 0. The next rotation deletes
        what can't be deleted now."""
        if ranks.rank() == 0:
            with suppress(OSError):
                remove(checkpoint)

    def withdraw(self, checkpoints: Iterable[Path]) -> None:
        """Make complete checkpoints count no more. A collective.

        Raises:
            Preempted: a newer attempt owns the folder.
        """

        def remove_manifests() -> None:
            self.require_owner()
            # The manifest alone makes a checkpoint count; the next rotation deletes the other
            # files.
            for checkpoint in checkpoints:
                (checkpoint / MANIFEST).unlink(missing_ok=True)

        ranks.run_on_rank0(remove_manifests)

    def fetch_history(self) -> None:
        """Nothing: it is there."""

    def send_history(self) -> None:
        """Nothing: it stays there."""

    def send_export(self, folder: Path) -> None:
        """None: an export on the volume stays there."""


def _require_visible(path: Path) -> None:
    if not path.is_file():
        raise BadInput(
            f"{path}, just written by rank 0, can't be seen: the checkpoint volume must be shared "
            "by all nodes (ReadWriteMany). Use such a volume, or unset checkpoint.volume"
        )
