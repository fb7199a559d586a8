"""Makes a checkpoint whole or nothing: all ranks' files, then hashes, then the manifest, then the rotation of old ones.

transformers alone writes checkpoints in place and deletes old ones without waiting for the other ranks: a crash then
leaves a folder that looks like a checkpoint and isn't one. And where a disk fails it ends the run, although nothing is
lost yet: here all ranks agree that this checkpoint failed, train on, and try again soon.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import Checkpoint
from grpo_api.report.report import Generations
from grpo_api.text.clock import Clock
from grpo_api.text.timing import Clock as RunTime

from ..gang import rank0_task, ranks
from ..process.preemption import Preemption
from ..process.recorder import Recorder
from ..runtime.clock import SYSTEM_CLOCK, unix_time
from ..runtime.durable_files import disk_errors
from ..runtime.errors import DiskFailed
from ..runtime.paths import attempt_folder, checkpoint_folder
from .hashing import cut, digests, records, share
from .manifest import FileRecord, Manifest
from .store_checkpoints import Remote, remote_of, source_of
from .volume_checkpoints import commit, list_files, remove, rotate


class SealCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Saves checkpoints for the trainer, and asks it to save again after one that failed; both alike on all ranks."""

    def __init__(
        self,
        plan: TrainingPlan,
        identity: dict[str, str],
        recorder: Recorder,
        preemption: Preemption,
        skipped: Sequence[Generations] = (),
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._plan = plan
        self._remote = remote_of(plan, recorder.event, clock)
        self._source = source_of(plan)
        self._identity = identity
        self._recorder = recorder
        self._preemption = preemption
        self._skipped = skipped
        self._failures = 0
        self._try_again_at = math.inf
        self.last: Path | None = None
        """The last checkpoint that this attempt sealed."""

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save again after a checkpoint that failed."""
        due = state.global_step >= self._try_again_at
        # A run that stops has already decided whether there is time to save.
        if due and not control.should_training_stop:
            control.should_save = True

    def save(self, step: int, write: Callable[[], None]) -> None:
        """Write and seal `checkpoint-<step>` of this attempt, or clear it away where a disk fails. A collective.

        Raises:
            Preempted: a newer attempt owns the folder.
            TrainingError: `write` refuses to save what it would.
        """
        folder = attempt_folder(self._plan.checkpoint_directory, self._plan.job.attempt)
        assert folder is not None, "without a volume nothing is saved"
        checkpoint = checkpoint_folder(folder, step)
        self._recorder.stage("Saving")
        began = time.perf_counter()
        try:
            # Only a failure of a disk is one rank's alone. `write` raises other errors on all ranks alike.
            ranks.run_on_all(write, DiskFailed)
            size = seal(
                self._plan, checkpoint, step, self._identity, self._skipped,
                clock=self._recorder.clock, remote=self._remote,
            )  # fmt: skip
        except DiskFailed as error:
            self._failed(checkpoint, step, str(error))
        else:
            self._sealed(checkpoint, step, began, size)
        self._recorder.stage("Training")

    def _sealed(self, checkpoint: Path, step: int, began: float, size: int) -> None:
        # the slowest rank's for all: whether there is time for another is decided on each rank, and must be the same
        seconds = max(ranks.gather(time.perf_counter() - began))
        self._failures, self._try_again_at, self.last = 0, math.inf, checkpoint
        if self._source:
            # The run has its own checkpoint now, so the copy of the one that it began with only takes room.
            self._source.clear()
        self._preemption.save_seconds = seconds
        where = self._remote.url(checkpoint) if self._remote else str(checkpoint)
        self._recorder.saved(Checkpoint(step=step, time=unix_time(), bytes=size, where=where), seconds)

    def _failed(self, checkpoint: Path, step: int, why: str) -> None:
        """Each failure doubles the steps until the next try, which costs the time of writing until the disk is full."""
        self._failures += 1
        self._try_again_at = step + 2 ** (self._failures - 1)
        if self._remote:
            self._remote.clear()
        elif ranks.rank() == 0:
            # The next rotation deletes what can't be deleted now.
            with suppress(OSError):
                remove(checkpoint)
        # No rank may begin the next try while rank 0 still deletes files of this one.
        ranks.gather(None)
        self._recorder.not_saved(f"the checkpoint of step {step} could not be written: {why}")


def seal(
    plan: TrainingPlan,
    checkpoint: Path,
    step: int,
    identity: dict[str, str],
    skipped: Sequence[Generations] = (),
    *,
    clock: Callable[[], RunTime] = RunTime,
    remote: Remote | None = None,
) -> int:
    """Hash the files of a checkpoint, a share on each rank, and commit it on rank 0; with a store, send them before.
    Returns its bytes.

    Raises:
        DiskFailed: on all ranks, where the disk of any, or the store, fails before the manifest stands.
        Preempted: a newer attempt owns the folder.
    """
    files = remote.send(checkpoint) if remote else _hashed(checkpoint)
    manifest = Manifest(
        attempt=plan.job.attempt, step=step, identity=identity, skipped=list(skipped), clock=clock(), files=files
    )
    if remote:
        rank0_task.run_on_rank0(lambda: remote.commit(manifest))
        # A pod's disk is small: what the store has is removed from it.
        remote.clear()
    else:
        rank0_task.run_on_rank0(disk_errors()(lambda: commit(plan, checkpoint, manifest)))
        # Only now: until its manifest is written, the new checkpoint replaces no old one.
        rank0_task.run_on_rank0(lambda: _rotate(plan))
    return sum(file.bytes for file in files.values())


def _hashed(checkpoint: Path) -> dict[str, FileRecord]:
    """The records of a checkpoint's files on a volume. A collective."""

    @disk_errors()
    def list_volume() -> dict[str, int]:
        # rank 0's list for all, so that the shares are disjoint and complete whatever another node sees of the volume
        return list_files(checkpoint) if ranks.rank() == 0 else {}

    sizes = ranks.gather(ranks.run_on_all(list_volume))[0]
    own = share(cut(sizes), ranks.rank(), ranks.world_size())
    hashed = ranks.gather(ranks.run_on_all(disk_errors()(lambda: digests(checkpoint, own))))
    return records(sizes, [one for part in hashed for one in part])


def _rotate(plan: TrainingPlan) -> None:
    try:
        rotate(plan)
    except OSError as error:
        print(f"old checkpoints stay until the next one is saved: {error}", flush=True)
