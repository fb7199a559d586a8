"""What a run asks of the place where its checkpoints are: the same questions of a volume and of an
object store.

Only open_target.py knows which kinds of places there are. A checkpoint is a folder of this node
everywhere. On a volume it is the checkpoint itself. With an object store it is the node's copy
while it is written or loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from grpo_api.report.report import Outcome

from ..runtime.paths import attempt_folder_name
from .manifest import FileRecord, Manifest, Owner


class CheckpointSource(ABC):
    """A run's checkpoints, for a run that reads them."""

    folder: Path
    """The run's folder on this node."""

    @property
    @abstractmethod
    def run_address(self) -> str:
        """Address of the run's folder, for messages."""

    @abstractmethod
    def address(self, checkpoint: Path) -> str:
        """Address of a checkpoint, for messages."""

    @abstractmethod
    def list_checkpoints(self) -> list[Path]:
        """The complete checkpoints, newest first, each with its manifest on this node. A
        collective.

        Raises:
            BadInput: there are some, but all of them were lost or changed.
            StoreFailed: the store gave nothing for too long.
        """

    @abstractmethod
    def bring(self, checkpoint: Path) -> list[str]:
        """Bring this rank's share of a checkpoint's files to this node and check it; what is wrong,
        as sentences.

        Raises:
            StoreFailed: the store gave nothing for too long.
            DiskFailed: there is no room.
        """

    @abstractmethod
    def bring_export(self) -> None:
        """Bring the run's exported model, if there is one, to its place below `folder`. A
        collective.

        Raises:
            StoreFailed: the store gave nothing for too long.
            DiskFailed: there is no room.
        """

    @abstractmethod
    def remove_copies(self) -> None:
        """Remove this node's copies of checkpoints that are kept elsewhere."""


class CheckpointTarget(CheckpointSource):
    """A run's checkpoints, for the attempt that makes them. Only the newest attempt may commit,
    withdraw or delete."""

    owner: Owner
    """The run and the attempt."""

    @property
    def attempt_folder(self) -> Path:
        """Folder of this attempt on this node."""
        return self.folder / attempt_folder_name(self.owner.attempt)

    @abstractmethod
    def claim(self) -> None:
        """Take the run for this attempt; older attempts can't commit from now on. A collective.

        Raises:
            BadInput: the folder belongs to another job, or can't be used.
            Preempted: a newer attempt owns it.
            DiskFailed: the disk, or the store, took nothing for minutes.
        """

    @abstractmethod
    def require_owner(self) -> None:
        """Make sure that no newer attempt and no other job owns the folder of this node.

        Raises:
            BadInput: another job owns it.
            Preempted: a newer attempt owns it.
        """

    @abstractmethod
    def find_success(self) -> Outcome | None:
        """The durable success of an earlier attempt, whose process may have died after writing it.
        A collective."""

    @abstractmethod
    def store_files(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Keep and hash what all ranks wrote of a checkpoint; the records of all its files. A
        collective.

        Raises:
            DiskFailed: the disk of any rank, or the store, fails.
        """

    @abstractmethod
    def commit(self, checkpoint: Path, manifest: Manifest) -> None:
        """Make a checkpoint complete whose files are stored; then delete old ones. A collective.

        Raises:
            DiskFailed: the disk, or the store, fails before the manifest stands.
            Preempted: a newer attempt owns the run.
        """

    @abstractmethod
    def discard(self, checkpoint: Path) -> None:
        """Delete what was written of a checkpoint that failed. All ranks call it."""

    @abstractmethod
    def withdraw(self, checkpoints: Iterable[Path]) -> None:
        """Make complete checkpoints count no more. A collective.

        Raises:
            Preempted: a newer attempt owns the run.
        """

    @abstractmethod
    def fetch_history(self) -> None:
        """Bring the rows of the attempt before this one to their place below `folder`, as far as
        they can be had. Rank 0 alone calls it."""

    @abstractmethod
    def send_history(self) -> None:
        """Keep the history files of this attempt where its checkpoints are, as far as they can be
        written. Rank 0 alone calls it."""

    @abstractmethod
    def send_export(self, folder: Path) -> str | None:
        """Upload an exported model and return its URL; None if it stays on the volume. A
        collective.

        Raises:
            StoreFailed: the store took nothing for minutes; the last checkpoint stands.
            Preempted: a newer attempt owns the run.
        """


def address_of(checkpoint: Path, *places: CheckpointSource | None) -> str:
    """Address of a checkpoint of one of the places, for messages."""
    for place in places:
        if place and checkpoint.is_relative_to(place.folder):
            return place.address(checkpoint)
    return str(checkpoint)
