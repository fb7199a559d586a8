"""Keeps the reference right while TRL trains: after a resume, at every sync and at the end.

These are TRL's public moments, and so no business of the engine, which has only what touches TRL's private names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..weights.files import ADAPTER_CONFIG, WeightFiles, open_weights
from ..weights.proof import prove, prove_equal
from ..weights.states import check_states
from .base import ReferenceStrategy
from .policy_trainer import PolicyTrainer


class ReferenceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Proves, restores and moves at the right moments."""

    def __init__(self, trainer: PolicyTrainer, strategy: ReferenceStrategy) -> None:
        self.trainer = trainer
        self.strategy = strategy

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The checkpoint is loaded and the models are wrapped: prove it, restore the reference, check states."""
        folder = self.trainer.resumed_from
        if folder:
            with resumed_weights(folder, self.trainer.source.folder) as files:
                self.trainer.proofs.append(prove(self.trainer.model, files, "resumed policy"))
            self.strategy.restore(self.trainer, folder)
        check_states(self.trainer)

    def on_step_end(self, _: TrainingArguments, state: TrainerState, *__: Any, **___: Any) -> None:
        """Moves the reference every `sync.everySteps` steps."""
        sync = self.strategy.sync
        if sync and state.global_step % sync.every_steps == 0:
            self.strategy.move(self.trainer)
            check_states(self.trainer)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """What is exported is the same on all ranks; the engine has asked the same before every checkpoint."""
        prove_equal(self.trainer.model, "policy")


def resumed_weights(checkpoint: Path, base: Path) -> WeightFiles:
    """What the policy must hold after a resume: the checkpoint's weights, under an adapter the base's as before."""
    weights = open_weights(checkpoint)
    if (checkpoint / ADAPTER_CONFIG).exists():
        weights.paths.update(open_weights(base).paths)
    return weights
