"""Attempts of a run of one process on an object store: what they save, and what the next one begins
with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.clock import Clock
from grpo_trainer.checkpoints.hashing import list_files
from grpo_trainer.checkpoints.seal import SealCheckpoints
from grpo_trainer.checkpoints.store_checkpoints import StoreTarget
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.clock import SYSTEM_CLOCK
from grpo_trainer.stores.store_base import PART_BYTES
from harness.programs.object_stores import BUCKET
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import choose, claim_folder, seal_checkpoints, target_of

FILES: Mapping[str, bytes] = {
    "model.safetensors": b"m" * (PART_BYTES + 1),
    "deep/optimizer.pt": b"o",
    "empty": b"",
}


def plan(
    endpoint: str, folder: Path, attempt: int, keep: int = 3, name: str = "demo-0"
) -> TrainingPlan:
    """An attempt of a run of one process, with a disk of its own."""
    made = runs.plan(Path("/models/demo"), folder=folder / f"disk-{attempt}" / name).model_dump(
        by_alias=True
    )
    made["job"]["attempt"] = attempt
    made["checkpoint"] = {
        "store": {"url": f"s3://{BUCKET}/runs", "endpoint": endpoint},
        "keep": keep,
    }
    return TrainingPlan.model_validate(made)


def started(made: TrainingPlan, clock: Clock = SYSTEM_CLOCK) -> tuple[SealCheckpoints, Recorder]:
    """What saves an attempt's checkpoints, by this clock, once it has claimed the run."""
    claim_folder(made)
    recorder = Recorder(made.job.attempt, Placement(0, 0, 1, 1), 0.0)
    return seal_checkpoints(
        made, {}, recorder, Preemption(60.0, can_save=True), clock=clock
    ), recorder


def save(
    seal: SealCheckpoints, made: TrainingPlan, step: int, files: Mapping[str, bytes] = FILES
) -> None:
    """A checkpoint of a few files, one of several parts."""

    def write() -> None:
        assert made.checkpoint_directory is not None
        folder = (
            Path(made.checkpoint_directory) / f"attempt-{made.job.attempt}" / f"checkpoint-{step}"
        )
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    seal.save(step, write)


def of(made: TrainingPlan) -> StoreTarget:
    """The run's checkpoints on its store."""
    found = target_of(made)
    assert isinstance(found, StoreTarget)
    return found


def brought(
    made: TrainingPlan, outdated: Any = lambda _: False, files: Mapping[str, bytes] = FILES
) -> Path | None:
    """The checkpoint that an attempt begins with; all its files are there."""
    claim_folder(made)
    found = choose(made, {}, outdated)
    if found:
        assert {name: (found / name).read_bytes() for name in list_files(found)} == files
    return found
