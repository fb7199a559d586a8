"""Chooses the checkpoint that an attempt continues from, the same on all ranks, and checks it before it is loaded.

Exists so that a damaged checkpoint is passed over for the one before it, and another run's is refused. Called by
worker.py after the rendezvous.
"""

from pathlib import Path

from grpo_api.plan import TrainingPlan

from . import ranks
from .checkpoint import OWNER, claim, complete, damage, read_manifest
from .errors import BadInput
from .identity import require_same_run


def claim_folder(plan: TrainingPlan) -> None:
    """Take the checkpoint folder for this attempt and make sure that every rank sees the same one.

    Raises:
        BadInput: the folder belongs to another job, or isn't shared by all nodes.
        Preempted: a newer attempt owns it.
    """
    if plan.checkpoint_directory is None:
        return
    ranks.together(lambda: claim(plan) if ranks.rank() == 0 else None)
    path = Path(plan.checkpoint_directory) / OWNER
    ranks.together(lambda: _require_visible(path))


def _require_visible(path: Path) -> None:
    if not path.is_file():
        raise BadInput(
            f"{path}, just written by rank 0, can't be seen: the checkpoint volume must be shared by all nodes "
            f"(ReadWriteMany). Use such a volume, or unset checkpoint.volume"
        )


def choose(plan: TrainingPlan, identity: dict[str, str]) -> Path | None:
    """The newest undamaged complete checkpoint of any attempt; None for a fresh start.

    Raises:
        BadInput: that checkpoint belongs to a different run.
    """
    if plan.checkpoint_directory is None:
        return None
    found = complete(Path(plan.checkpoint_directory)) if ranks.rank() == 0 else []
    for checkpoint in ranks.gather(found)[0]:
        problems = _damage_anywhere(checkpoint)
        if not problems:
            require_same_run(checkpoint, read_manifest(checkpoint), identity)
            return checkpoint
        if ranks.rank() == 0:
            print(f"checkpoint {checkpoint} is damaged and passed over: {'; '.join(problems)}", flush=True)
    return None


def _damage_anywhere(checkpoint: Path) -> list[str]:
    """Problems of a checkpoint's files, each rank checking its share."""

    def check() -> list[str]:
        files = read_manifest(checkpoint).files
        names = sorted(files)[ranks.rank() :: ranks.world_size()]
        return damage(checkpoint, {name: files[name] for name in names})

    return [problem for part in ranks.gather(ranks.together(check)) for problem in part]
