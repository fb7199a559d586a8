"""The trainer's functions for checkpoints as tests call them: with a whole plan, as the worker has
one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome
from grpo_api.report.revisions import Generations
from grpo_api.text.clock import Clock
from grpo_trainer.checkpoints import export, resume, volume_checkpoints
from grpo_trainer.checkpoints.checkpoint_target import (
    CheckpointSource,
    CheckpointTarget,
    open_source,
    open_target,
)
from grpo_trainer.checkpoints.export import Describe
from grpo_trainer.checkpoints.manifest import Manifest, Owner
from grpo_trainer.checkpoints.resume import Beginning, Outdated
from grpo_trainer.checkpoints.seal import SealCheckpoints
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.clock import SYSTEM_CLOCK
from grpo_trainer.weights.model_files import Source


def target_of(plan: TrainingPlan, clock: Clock = SYSTEM_CLOCK) -> CheckpointTarget | None:
    """Where the plan's run keeps its checkpoints."""
    return open_target(plan, clock=clock)


def source_of(plan: TrainingPlan) -> CheckpointSource | None:
    """Where the checkpoints of the plan's resumeFrom are."""
    return open_source(plan)


def claim_folder(plan: TrainingPlan, clock: Clock = SYSTEM_CLOCK) -> None:
    """What a worker does first. A collective."""
    if target := target_of(plan, clock):
        target.claim()


def finished_attempt(plan: TrainingPlan) -> Outcome | None:
    """What a worker does then."""
    target = target_of(plan)
    return target.find_success() if target else None


def choose(
    plan: TrainingPlan, identity: dict[str, str], outdated: Outdated = lambda _: False
) -> Path | None:
    """The checkpoint that the plan's attempt continues from. A collective."""
    return resume.choose(target_of(plan), source_of(plan), identity, outdated)


def begin(plan: TrainingPlan, identity: dict[str, str]) -> Beginning:
    """What the plan's attempt begins with. A collective."""
    return resume.begin(target_of(plan), source_of(plan), identity, plan.execution.method)


def seal_checkpoints(
    plan: TrainingPlan,
    identity: dict[str, str],
    recorder: Recorder,
    preemption: Preemption,
    skipped: Sequence[Generations] = (),
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> SealCheckpoints:
    """What saves the checkpoints of the plan's attempt."""
    target = target_of(plan, clock)
    return SealCheckpoints(target, source_of(plan), identity, recorder, preemption, skipped=skipped)


def export_model(
    plan: TrainingPlan,
    source: Source,
    save: Callable[[str], None],
    attest: Describe = lambda _: None,
) -> Path | None:
    """Export the model of the plan's run. A collective."""
    return export.export_model(plan, target_of(plan), source, save, attest=attest)


def _owned(plan: TrainingPlan) -> tuple[Path, Owner]:
    assert plan.checkpoint_directory is not None
    return Path(plan.checkpoint_directory), Owner(uid=plan.job.uid, attempt=plan.job.attempt)


def claim(plan: TrainingPlan) -> None:
    """Take the plan's folder on a volume, on one rank."""
    volume_checkpoints.claim(*_owned(plan))


def commit(plan: TrainingPlan, checkpoint: Path, manifest: Manifest) -> None:
    """Commit a checkpoint of the plan's attempt on a volume, on one rank."""
    volume_checkpoints.commit(*_owned(plan), checkpoint, manifest)


def rotate(plan: TrainingPlan) -> None:
    """Delete old checkpoints of the plan's run on a volume, on one rank."""
    volume_checkpoints.rotate(*_owned(plan), plan.checkpoint.keep)
