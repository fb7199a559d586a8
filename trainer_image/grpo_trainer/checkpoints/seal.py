"""Makes a checkpoint whole or nothing: all ranks' files, then hashes, then the manifest, then the
rotation of old ones.

On its own, transformers writes checkpoints in place and deletes old ones without waiting for the
other ranks. A crash then leaves a folder that looks like a checkpoint and isn't one. And where a
disk fails it ends the run, although nothing is lost yet. Here all ranks agree that this checkpoint
failed, train on, and try again soon.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.report.artifacts import Checkpoint
from grpo_api.report.revisions import Generations

from ..gang import ranks
from ..process.preemption import Preemption
from ..process.recorder import Recorder
from ..runtime.clock import unix_time
from ..runtime.errors import DiskFailed
from ..runtime.paths import checkpoint_folder
from .checkpoint_target import CheckpointSource, CheckpointTarget
from .manifest import Manifest

LATE_SECONDS, LATE_FACTOR = 120.0, 4.0
"""A checkpoint is late after both: seconds, and multiples of what the last one took."""
FIRST_LATE_SECONDS = 900.0
"""The same of an attempt's first: the speed of its volume is unknown then."""


class SealCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Saves checkpoints for the trainer, and asks it to save again after one that failed; both
    alike on all ranks."""

    def __init__(
        self,
        target: CheckpointTarget | None,
        source: CheckpointSource | None,
        identity: dict[str, str],
        recorder: Recorder,
        preemption: Preemption,
        *,
        skipped: Sequence[Generations] = (),
    ) -> None:
        """Save to `target`, which is None where nothing is saved; `source` is what the run began
        with."""
        self._target = target
        self._source = source
        self._identity = identity
        self._recorder = recorder
        self._preemption = preemption
        self._skipped = skipped
        self._failures = 0
        self._try_again_at = math.inf
        self.last: Path | None = None
        """The last checkpoint that this attempt sealed."""

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save again after a checkpoint that failed."""
        due = state.global_step >= self._try_again_at
        # A run that stops has already decided whether there is time to save.
        if due and not control.should_training_stop:
            control.should_save = True

    def save(self, step: int, write: Callable[[], None]) -> None:
        """Write and seal `checkpoint-<step>` of this attempt, or clear it away where a disk fails.
        A collective.

        Raises:
            Preempted: a newer attempt owns the folder.
            TrainingError: `write` refuses to save what it would.
        """
        target = self._target
        assert target is not None, "without a volume nothing is saved"
        checkpoint = checkpoint_folder(target.attempt_folder, step)
        self._recorder.enter_stage("Saving")
        began = time.perf_counter()
        named = self._name_when_late(target.address(checkpoint), step)
        try:
            # Only a failure of a disk is one rank's alone. `write` raises other errors on all ranks
            # alike.
            ranks.run_on_all(write, DiskFailed)
            size = self._seal(target, checkpoint, step)
        except DiskFailed as error:
            self._record_failure(target, checkpoint, step, str(error))
        else:
            self._record_success(target.address(checkpoint), checkpoint, step, began, size)
        finally:
            named.cancel()
            named.join()
            self._recorder.record_wait("Store", "")
        self._recorder.enter_stage("Training")

    def _name_when_late(self, where: str, step: int) -> threading.Timer:
        """Report, unless cancelled before, that writing this checkpoint takes far longer than the
        last one did: a volume that hangs says nothing by itself."""
        usual = self._preemption.save_seconds
        limit = max(LATE_SECONDS, LATE_FACTOR * usual) if usual else FIRST_LATE_SECONDS
        why = f"it writes the checkpoint of step {step} to {where} for more than {limit:.0f} s"
        if usual:
            why += f", which took {usual:.3g} s the last time"
        timer = threading.Timer(limit, self._recorder.record_wait, ("Store", why))
        timer.daemon = True
        timer.start()
        return timer

    def _seal(self, target: CheckpointTarget, checkpoint: Path, step: int) -> int:
        """Store the files of a checkpoint, then its manifest; returns its bytes. A collective that
        fails on all ranks alike."""
        files = target.store_files(checkpoint)
        manifest = Manifest(
            attempt=target.owner.attempt,
            step=step,
            identity=self._identity,
            skipped=list(self._skipped),
            clock=self._recorder.clock(),
            files=files,
        )
        target.commit(checkpoint, manifest)
        return sum(file.bytes for file in files.values())

    def _record_success(
        self, where: str, checkpoint: Path, step: int, began: float, size: int
    ) -> None:
        # the slowest rank's for all: whether there is time for another is decided on each rank, and
        # must be the same
        seconds = max(ranks.gather(time.perf_counter() - began))
        self._failures, self._try_again_at, self.last = 0, math.inf, checkpoint
        if self._source:
            # The run has its own checkpoint now, so the copy of the one that it began with only
            # takes room.
            self._source.remove_copies()
        if ranks.rank() == 0 and self._target:
            self._target.send_history()
        self._preemption.save_seconds = seconds
        sealed = Checkpoint(step=step, time=unix_time(), bytes=size, where=where)
        self._recorder.record_checkpoint(sealed, seconds)

    def _record_failure(
        self, target: CheckpointTarget, checkpoint: Path, step: int, why: str
    ) -> None:
        """Each failure doubles the steps until the next try, which costs the time of writing until
        the disk is full."""
        self._failures += 1
        self._try_again_at = step + 2 ** (self._failures - 1)
        target.discard(checkpoint)
        # No rank may begin the next try while rank 0 still deletes files of this one.
        ranks.gather(None)
        problem = f"the checkpoint of step {step} could not be written: {why}"
        self._recorder.record_checkpoint_failure(problem)
