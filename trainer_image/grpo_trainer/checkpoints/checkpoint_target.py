"""The place of a run's checkpoints, a volume or an object store. Both answer the same questions,
and only this file asks which of them it is.

A checkpoint is a folder of this node everywhere. On a volume it is the checkpoint itself. With an
object store it is the node's copy while it is written or loaded.
"""

from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.clock import Clock

from ..runtime.clock import SYSTEM_CLOCK, OnWait, ignore_wait
from ..runtime.paths import run_folder
from ..stores.run_store import run_store, source_run
from .manifest import Owner
from .store_checkpoints import StoreSource, StoreTarget
from .volume_checkpoints import VolumeSource, VolumeTarget

CheckpointSource = VolumeSource | StoreSource
"""A run's checkpoints, for a run that reads them."""
CheckpointTarget = VolumeTarget | StoreTarget
"""A run's checkpoints, for the attempt that makes them."""


def open_target(
    plan: TrainingPlan, *, on_answer: OnWait = ignore_wait, clock: Clock = SYSTEM_CLOCK
) -> CheckpointTarget | None:
    """The place of the run's own checkpoints; None where nothing is kept. `on_answer` as for a
    Store.

    Raises:
        BadInput: the store's settings are wrong.
    """
    folder = run_folder(plan.checkpoint_directory)
    if folder is None:
        return None
    owner = Owner(uid=plan.job.uid, attempt=plan.job.attempt)
    run = run_store(plan, on_answer=on_answer, clock=clock)
    if run is None:
        return VolumeTarget(folder, owner, plan.checkpoint.keep, clock)
    return StoreTarget(run, folder, plan.execution.processes_per_node, owner)


def open_source(plan: TrainingPlan, on_answer: OnWait = ignore_wait) -> CheckpointSource | None:
    """The place of the checkpoints of spec.resumeFrom; None if it is not set.

    Raises:
        BadInput: the store's settings are wrong.
    """
    if plan.resume_from is None:
        return None
    run, folder = source_run(plan.resume_from, plan.resume_store, on_answer), Path(plan.resume_from)
    if run is None:
        return VolumeSource(folder)
    return StoreSource(run, folder, plan.execution.processes_per_node)


def address_of(checkpoint: Path, *places: CheckpointSource | None) -> str:
    """Address of a checkpoint of one of the places, for messages."""
    for place in places:
        if place and checkpoint.is_relative_to(place.folder):
            return place.address(checkpoint)
    return str(checkpoint)
