"""Seals each checkpoint after transformers has written it: all ranks' files, then hashes, then the manifest, then the
rotation of old ones.

transformers alone writes checkpoints in place and deletes old ones without waiting for the other ranks: a crash then
leaves a folder that looks like a checkpoint and isn't one.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.plan import TrainingPlan
from grpo_api.report import Generations

from ..gang import ranks
from ..paths import checkpoint_folder
from ..process.preemption import Preemption
from ..process.recorder import Recorder
from .hashing import cut, digests, records, share
from .manifest import Manifest
from .volume import commit, list_files, rotate


class SealCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Completes checkpoints; all its work is collective."""

    def __init__(
        self,
        plan: TrainingPlan,
        identity: dict[str, str],
        recorder: Recorder,
        preemption: Preemption,
        skipped: Sequence[Generations] = (),
    ) -> None:
        self._plan = plan
        self._identity = identity
        self._recorder = recorder
        self._preemption = preemption
        self._skipped = skipped
        self.last: Path | None = None
        """The last checkpoint that this attempt sealed."""

    def on_save(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        """Seal `checkpoint-<step>` of this attempt.

        Raises:
            Preempted: a newer attempt owns the folder.
            OSError: the disk is full.
        """
        self._recorder.stage("Saving")
        begin = time.perf_counter()
        checkpoint = checkpoint_folder(Path(args.output_dir), state.global_step)
        seal(self._plan, checkpoint, state.global_step, self._identity, self._skipped)
        self.last = checkpoint
        self._preemption.save_seconds = time.perf_counter() - begin
        self._recorder.stage("Training")


def seal(
    plan: TrainingPlan, checkpoint: Path, step: int, identity: dict[str, str], skipped: Sequence[Generations] = ()
) -> None:
    """Hash the files of a checkpoint, a share on each rank, and commit it on rank 0."""
    ranks.gather(None)  # a barrier: transformers returns on each rank when that rank's own files are written
    # rank 0's list for all, so that the shares are disjoint and complete whatever another node sees of the volume
    sizes = ranks.gather(list_files(checkpoint) if ranks.rank() == 0 else {})[0]
    own = digests(checkpoint, share(cut(sizes), ranks.rank(), ranks.world_size()))
    hashes = [one for part in ranks.gather(own) for one in part]
    manifest = Manifest(
        attempt=plan.job.attempt,
        step=step,
        identity=identity,
        skipped=list(skipped),
        files=records(sizes, hashes),
    )
    ranks.on_main(lambda: _commit(plan, checkpoint, manifest))


def _commit(plan: TrainingPlan, checkpoint: Path, manifest: Manifest) -> None:
    commit(plan, checkpoint, manifest)
    rotate(plan)  # only now: until its manifest stands, the new checkpoint replaces no old one
