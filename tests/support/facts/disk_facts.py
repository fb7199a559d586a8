"""Fails each write of a checkpoint in turn, on either rank, and records how the ranks and the run
react.

A folder with the file's name makes each write fail; once the disk is really full. Nothing is
mocked: the errors come from the kernel, as torch, safetensors and Python report them.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.gang import ranks
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.recorder import Recorder
from tests.support.ranks.checkpoint_plans import claim_folder, export_model, seal_checkpoints

from ..ranks import demo_model, runs

MANIFEST = f"checkpoint-4/.manifest.json.{os.uname().nodename}.{{}}.tmp"
COMMON = ("README.md", "checkpoint-2/model.safetensors", "checkpoint-3/rng_state_1.pth", MANIFEST)
WAYS: dict[str, dict[str, Any]] = {
    "Clone": {"zero": 0, "reference": {"sync": {"everySteps": 1}}},
    "Sharded": {"zero": 3, "reference": {"sync": {"everySteps": 1}}},
}
OBSTACLES = {
    "Clone": (*COMMON, "checkpoint-5/optimizer.pt", "checkpoint-6/reference/reference.safetensors"),
    "Sharded": (
        *COMMON,
        "checkpoint-5/global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "checkpoint-6/global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "checkpoint-7/zero_to_fp32.py",
        "checkpoint-8/latest",
        "checkpoint-9/reference/reference-00001-of-00002.safetensors",
        "checkpoint-10/scheduler.pt",
    ),
}
"""What stands in the way of the checkpoint of step 1, 2, 3 …: a path in the attempt's folder, with
rank 0's pid."""
BALLAST = "ballast"


DISK = "disk"
"""Folder of the small disk, where there is one."""


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Mount a tmpfs of `mebibytes` MiB at `folder` while the body runs."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def failing_writes(folder: Path, strategy: str) -> dict[str, Any]:
    """A run that saves after every step, the first of which fail, and its losses beside those of a
    calm one.

    `folder` has a small disk of its own, DISK, which the last but one checkpoint and the export
    find full; what ranks print and find lies beside it. A collective.
    """
    disk = folder / DISK
    obstacles = OBSTACLES[strategy]
    steps = len(obstacles) + 2
    calm = _run(disk / "calm", strategy, steps, ())
    ranks.gather(None)
    shutil.rmtree(disk / "calm", ignore_errors=True)
    return _run(disk / "disturbed", strategy, steps, obstacles) | {"calm": calm["losses"]}


def _run(folder: Path, strategy: str, steps: int, obstacles: tuple[str, ...]) -> dict[str, Any]:
    runs.reset()
    job = _job(folder, strategy, steps)
    claim_folder(job)
    preemption = Preemption(60.0, can_save=True)
    recorder = Recorder(job.job.attempt, Placement(ranks.rank(), ranks.rank(), 2, 1), 0.0)
    seal = seal_checkpoints(job, {}, recorder, preemption)
    logs, disk = runs.Logs(), Disk(folder, obstacles, recorder, preemption)
    trainer = runs.build(job, logs, seal, disk)
    trainer.save = seal.save
    trainer.train()
    exported = bool(obstacles) and _export_to_a_full_disk(
        folder, partial(export_model, job, trainer.source), trainer
    )
    return {
        "losses": [logs.rows[step]["loss"] for step in range(1, steps + 1)],
        "checkpoints": disk.checkpoints,
        "exported": exported,
        "left": sorted(path.name for path in (folder / "attempt-1").iterdir()),
    }


def _job(folder: Path, strategy: str, steps: int) -> TrainingPlan:
    if ranks.rank() == 0:
        demo_model.save_policy(folder / "model")
    ranks.gather(None)
    settings: dict[str, Any] = {"training": {"maxSteps": steps}, "execution": {"saveEverySteps": 1}}
    return runs.plan(
        folder / "model", strategy, world_size=2, folder=folder, **settings, **WAYS[strategy]
    )


def _export_to_a_full_disk(folder: Path, export: Any, trainer: Any) -> bool:
    """Whether the export is there although the disk got room only when the first try had failed."""
    if ranks.rank() == 0:
        fill(folder / BALLAST)
    ranks.gather(None)
    room = threading.Timer(0.5, partial((folder / BALLAST).unlink, missing_ok=True))
    room.start()
    export(trainer.write_model)
    room.join()
    return (folder / "export" / "model.safetensors").is_file()


class Disk(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Blocks one write of each checkpoint, removes the obstacle after it, and records the reports
    about it."""

    def __init__(
        self, folder: Path, obstacles: tuple[str, ...], recorder: Recorder, preemption: Preemption
    ) -> None:
        self._folder = folder
        self._obstacles = obstacles
        self._recorder = recorder
        self._preemption = preemption
        self.checkpoints: list[dict[str, Any]] = []

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Let rank 0 block a write of the checkpoint that follows, or fill the disk."""
        if ranks.rank() == 0 and state.global_step <= len(self._obstacles):
            obstacle = self._obstacles[state.global_step - 1].format(os.getpid())
            (self._folder / "attempt-1" / obstacle).mkdir(parents=True)
        elif (
            ranks.rank() == 0 and state.global_step == len(self._obstacles) + 1 and self._obstacles
        ):
            fill(self._folder / BALLAST)
        ranks.gather(None)

    def on_save(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """The disk is well again."""
        progress = self._recorder.progress
        checkpoint = self._folder / "attempt-1" / f"checkpoint-{state.global_step}"
        self.checkpoints.append(
            {
                "there": checkpoint.exists(),
                "problem": progress.checkpoint_problem,
                "failures": progress.metrics.get("checkpoint_failures"),
                "save_seconds": self._preemption.save_seconds,
            }
        )
        ranks.gather(None)
        if ranks.rank() == 0:
            (self._folder / BALLAST).unlink(missing_ok=True)
            shutil.rmtree(self._folder / "attempt-1" / "README.md", ignore_errors=True)


def fill(ballast: Path) -> None:
    """Write until the disk of this file is full."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
