"""Checkpoints on an object store: every rank uploads its part of its node's files and downloads
what its node needs.

The disk of a pod holds a checkpoint only while it is written and uploaded, or downloaded and
loaded. The files lie there as on a volume, so that the code that reads checkpoints does not depend
on stores.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_128_hexdigest

from grpo_api.report.report import Outcome
from grpo_api.text.contract import EXPORT_FOLDER

from ..gang import ranks
from ..runtime.clock import unix_time
from ..runtime.durable_files import disk_errors
from ..runtime.errors import BadInput, StoreFailed
from ..runtime.paths import (
    ATTEMPTS,
    CHECKPOINTS,
    MANIFEST,
    attempt_folder_name,
)
from ..stores.run_store import (
    HISTORY_WAIT,
    SAVE_WAIT,
    CommittedCheckpoint,
    RunStore,
    StoredRun,
)
from ..stores.store_base import PART_BYTES
from .hashing import (
    Part,
    difference_message,
    list_files,
    read_part,
    recorded_parts,
    records,
    share,
    split_into_parts,
)
from .manifest import FileRecord, Manifest, Owner
from .volume_checkpoints import checkpoints_of, claim, read_manifest, require_owner

if TYPE_CHECKING:
    from ..stores.store_client import Store

T = TypeVar("T")
log = logging.getLogger(__name__)

AT_ONCE = 4
"""Requests of one rank at a time; each holds PART_BYTES in host memory."""
_OF_ONE_RANK = re.compile(
    r"(?:^|/)(?:rng_state_|rollouts-|reference-|(?:bf16_|fp16_)?zero_pp_rank_)([0-9]+)(?:\.pth|-of-|_mp_rank_)[^/]*$"
)
"""Files that only the rank in their names reads; all others are read by every rank."""


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A run's checkpoints on an object store, as one rank reads them."""

    run: StoredRun
    folder: Path
    """The run's folder on this node's own disk."""
    processes_per_node: int

    @property
    def local_rank(self) -> int:
        """This rank's place on its node."""
        return ranks.rank() % self.processes_per_node

    @property
    def node_ranks(self) -> range:
        """The ranks of this node."""
        first = ranks.rank() - self.local_rank
        return range(first, first + self.processes_per_node)

    def remove_copies(self) -> None:
        """Remove this node's copies of checkpoints, also of the one that was begun with: a pod's
        disk is small."""
        if self.local_rank == 0:
            for checkpoint in self.folder.glob(f"{ATTEMPTS}/{CHECKPOINTS}"):
                shutil.rmtree(checkpoint, ignore_errors=True)

    def list_checkpoints(self) -> list[Path]:
        """Download the manifests of all complete checkpoints to the disk of every node; return
        their folders, newest first. A collective.

        Raises:
            BadInput: there are some, but all manifests are missing or changed.
            StoreFailed: the store gave nothing for too long.
            DiskFailed: the disk of a node fails.
        """
        manifests = ranks.run_on_rank0(self._manifests)

        @disk_errors()
        def write_manifests() -> None:
            for checkpoint, manifest in manifests:
                folder = self.folder / checkpoint.key
                folder.mkdir(parents=True, exist_ok=True)
                (folder / MANIFEST).write_bytes(manifest)
                # sealed_at() takes the manifest's time for the checkpoint's.
                os.utime(folder / MANIFEST, (checkpoint.time, checkpoint.time))

        self._run_on_node_leader(write_manifests)
        return ranks.run_on_rank0(lambda: checkpoints_of(self.folder))

    def _run_on_node_leader(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of each node, whose disk the others share."""
        return ranks.run_on_leader(self.node_ranks[0], work)

    def _manifests(self) -> list[tuple[CommittedCheckpoint, bytes]]:
        head = self.run.head()
        counted = head.checkpoints if head else []
        complete: list[tuple[CommittedCheckpoint, bytes]] = []
        for checkpoint in counted:
            manifest = self.run.manifest(checkpoint)
            if manifest is not None:
                complete.append((checkpoint, manifest))
            else:
                problem = "its manifest is missing or changed"
                log.warning(f"passed over {self.run.store.url}/{checkpoint.key}: {problem}")
        if counted and not complete:
            # A run that spec.resumeFrom names may go on and delete what its head had named.
            if self.run.head() != head:
                return self._manifests()
            raise BadInput(
                f"{self.run.store.url}: the manifests of all {len(counted)} checkpoints are "
                "missing or changed; restore the bucket, or start a new job"
            )
        return complete

    def bring(self, checkpoint: Path) -> list[str]:
        """Download this rank's share of what its node needs of a checkpoint; what is wrong with it,
        as sentences.

        Raises:
            StoreFailed: the store gave nothing for too long.
            DiskFailed: there is no room.
        """
        # A pod's disk is small, and each rank reads only its own partition of the optimizer.
        recorded, own_ranks = read_manifest(checkpoint).files, self.node_ranks
        files = {name: recorded[name] for name in recorded if is_read_by_ranks(name, own_ranks)}
        expected = dict(recorded_parts(files))
        own_parts = share(list(expected), self.local_rank, self.processes_per_node)
        key, store = self._key(checkpoint), self.run.store

        def bring(part: Part) -> str | None:
            stored = store.get(part_key(key, part, files[part.name].chunk_bytes))
            if stored is None:
                return f"{part.name} has no bytes {part.begin} to {part.end} on the store"
            # Before it is written: loaded files are not hashed again.
            if xxh3_128_hexdigest(stored[0]) != expected[part]:
                return difference_message(part)
            _write(checkpoint / part.name, part.begin, stored[0])
            return None

        return [problem for problem in _run_on_parts(disk_errors()(bring), own_parts) if problem]

    def bring_export(self) -> None:
        """Put the finished model, if there is one, where it would be on a volume, on every node. A
        collective.

        Raises:
            StoreFailed, DiskFailed: as bring.
        """
        key, folder = ranks.run_on_rank0(self.run.export_folder), self.folder / EXPORT_FOLDER
        if key:
            self._run_on_node_leader(disk_errors()(lambda: self.run.store.bring(key, folder)))

    def _key(self, checkpoint: Path) -> str:
        # Rank 0 has named it, whose disk may be mounted elsewhere.
        return f"{checkpoint.parent.name}/{checkpoint.name}"

    @property
    def run_address(self) -> str:
        """URL of the run's folder, for messages."""
        return self.run.store.url

    def address(self, checkpoint: Path) -> str:
        """URL of a checkpoint, for messages."""
        return f"{self.run.store.url}/{self._key(checkpoint)}"


@dataclass(frozen=True, slots=True)
class StoreTarget(StoreSource):
    """The run's checkpoints on an object store, for the attempt that makes them. Only the newest
    attempt may commit, withdraw or delete."""

    run: RunStore
    owner: Owner
    """The run and the attempt."""

    @property
    def attempt_folder(self) -> Path:
        """Folder of this attempt on this node."""
        return self.folder / attempt_folder_name(self.owner.attempt)

    def claim(self) -> None:
        """Take the folder on the disk of every node, and the run on the store. A collective.

        Raises:
            BadInput, Preempted, StoreFailed: as RunStore.claim; the first two also of the folder.
            DiskFailed: the disk fails.
        """
        # Every node has a disk of its own, which its first rank claims. The store is one for all.
        claim_disk = disk_errors()(lambda: claim(self.folder, self.owner))
        self._run_on_node_leader(claim_disk)
        ranks.run_on_rank0(self.run.claim)

    def require_owner(self) -> None:
        """Check the owner on the node's disk as volume_checkpoints.require_owner does. The store
        checks it at every write of its head."""
        require_owner(self.folder, self.owner)

    def find_success(self) -> Outcome | None:
        """The durable success of an earlier attempt, by the run's head; the same for all ranks,
        since no older attempt can change it any more."""
        head = self.run.head()
        return head.outcome if head else None

    def store_files(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Upload and hash what all nodes wrote of a checkpoint; the records of all its files. A
        collective.

        Raises:
            DiskFailed: the disk of any rank, or the store, fails.
        """

        @disk_errors()
        def list_disk() -> dict[str, int]:
            # The ranks of a node share its disk, so its first rank lists the files for all of them.
            return list_files(checkpoint) if self.local_rank == 0 else {}

        listed = ranks.run_on_all(list_disk)
        sizes, node_sizes = _merge_sizes(ranks.gather(listed), self.node_ranks[0])
        node_parts = split_into_parts(node_sizes, PART_BYTES)
        parts = share(node_parts, self.local_rank, self.processes_per_node)
        key, store = self._key(checkpoint), self.run.store.within(SAVE_WAIT)
        send = disk_errors()(lambda: _send(store, key, checkpoint, parts))
        sent = ranks.gather(ranks.run_on_all(send))
        hashes = {part: digest for of_rank in sent for part, digest in of_rank.items()}
        ordered = [hashes[part] for part in split_into_parts(sizes, PART_BYTES)]
        return records(sizes, ordered, PART_BYTES)

    def commit(self, checkpoint: Path, manifest: Manifest) -> None:  # noqa: ARG002  # the manifest names it
        """Make a checkpoint complete whose files are stored; then remove this node's copies. A
        collective.

        Raises:
            Preempted, StoreFailed: as RunStore.commit.
        """
        # A checkpoint that fails is tried again after a few steps, so the store is not waited for
        # as long as elsewhere.
        run = replace(self.run, store=self.run.store.within(SAVE_WAIT))
        ranks.run_on_rank0(
            lambda: run.commit(manifest.step, manifest.model_dump_json().encode(), unix_time())
        )
        # A pod's disk is small: what the store has is removed from it.
        self.remove_copies()

    def discard(self, checkpoint: Path) -> None:  # noqa: ARG002
        """Remove this node's copies of a checkpoint that failed; what was uploaded counts for
        nothing, and the next commit deletes it."""
        self.remove_copies()

    def withdraw(self, checkpoints: Iterable[Path]) -> None:
        """Make complete checkpoints count no more; see RunStore.withdraw. A collective."""
        keys = {self._key(checkpoint) for checkpoint in checkpoints}
        ranks.run_on_rank0(lambda: self.run.withdraw(keys))

    def fetch_history(self) -> None:
        """Download the rows of the newest attempt that has any, as far as they can be had. A
        collective."""

        # The store is waited for as at the requests before this one: the next checkpoint deletes
        # the rows that are not here.
        def fetch() -> None:
            with _without_history("rows of earlier attempts can't be had"):
                self.run.fetch_rows(self.folder)

        ranks.run_on_rank0(fetch)

    def send_history(self) -> None:
        """Upload both history files of this attempt as they are now, as far as they can be. Rank 0
        alone calls it."""
        # It is sent when an attempt ends, too, so the store is not waited for as long as elsewhere.
        run = replace(self.run, store=self.run.store.within(HISTORY_WAIT))
        with _without_history("the history is not sent"):
            run.send_history(self.attempt_folder)

    def send_export(self, folder: Path) -> str:
        """Upload the model, name it in the run's head, and return its URL. A collective.

        Raises:
            Preempted, StoreFailed: as RunStore.commit.
        """
        return ranks.run_on_rank0(disk_errors()(lambda: self.run.export(folder)))


@contextmanager
def _without_history(problem: str) -> Iterator[None]:
    """A run goes on without its history; each checkpoint has what is sealed of it."""
    try:
        yield
    except (StoreFailed, OSError) as error:
        log.warning(f"{problem}: {error}")


def is_read_by_ranks(name: str, node_ranks: range) -> bool:
    """True if the ranks of a node read a checkpoint's file."""
    of = _OF_ONE_RANK.search(name)
    return of is None or int(of[1]) in node_ranks


def part_key(checkpoint: str, part: Part, chunk: int) -> str:
    """Key of a part of a file below its checkpoint's."""
    return f"{checkpoint}/{part.name}.{part.begin // chunk:06}"


def _merge_sizes(
    listed: Sequence[dict[str, int]], leader: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the files of all nodes, sorted by name, and of this node's; one that several wrote
    is the first's."""
    # In reverse, so that the lowest rank that wrote a file stays its owner.
    owners = {name: rank for rank in reversed(range(len(listed))) for name in listed[rank]}
    sizes = {name: listed[owners[name]][name] for name in sorted(owners)}
    return sizes, {name: size for name, size in sizes.items() if owners[name] == leader}


def _send(store: "Store", key: str, checkpoint: Path, parts: Sequence[Part]) -> dict[Part, str]:
    """Upload parts; the hash of each, of the very bytes that were sent."""

    def send(part: Part) -> tuple[Part, str]:
        data = read_part(checkpoint, part)
        store.put(part_key(key, part, PART_BYTES), data)
        return part, xxh3_128_hexdigest(data)

    return dict(_run_on_parts(send, parts))


def _run_on_parts(action: Callable[[Part], T], parts: Sequence[Part]) -> list[T]:
    """What the action returns for each part, several at a time; the first failure ends all that has
    not begun."""
    with ThreadPoolExecutor(AT_ONCE, "parts") as pool:
        try:
            return list(pool.map(action, parts))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write(path: Path, begin: int, data: bytes) -> None:
    """Write bytes into a file that other ranks of the node may be writing other bytes of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not truncated, and written at an offset: other ranks write their parts of the file at the same
    # time.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.seek(begin)
        file.write(data)
