"""The interface of a reference strategy.

The engine works with any strategy without knowing which. It calls them in this order: `check` (before anything is
built), `build` (inside GRPOTrainer's constructor, before TRL wraps the result), `prepare` (TRL wraps it for DeepSpeed),
`attach` (the constructor is done), `scoring` (around every forward pass), `move` (sync), `save` and `restore`
(checkpoints).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from grpo_api.spec.training import ReferenceSync

from ..errors import BadInput
from ..weights import sync as mixing
from ..weights.partition import unwrapped
from . import store
from .policy_trainer import PolicyTrainer


class ReferenceStrategy(ABC):
    """Where the reference comes from, where it lives, how it moves and how it is saved."""

    name: ClassVar[str]
    """Name in the plan."""
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2)
    """ZeRO stages that it works under; 0 is one process or DDP."""
    own_model: ClassVar[bool] = True
    """Whether the reference is a model of its own."""

    def __init__(self, sync: ReferenceSync | None = None) -> None:
        if sync and not self.own_model:
            raise BadInput(
                f"spec.reference.sync: strategy {self.name} has no reference model of its own that could move; remove "
                "sync, or choose strategy Clone, Offload or Sharded"
            )
        self.sync = sync

    def check(self, zero_stage: int, adapter: bool, beta: float) -> None:
        """Rejects what can't work before anything is loaded or wrapped.

        Raises:
            BadInput: the strategy doesn't fit the parallelism, the method or beta.
        """
        if zero_stage not in self.zero_stages:
            why = "a partitioned policy can't be copied; use Sharded" if zero_stage == 3 else "nothing is partitioned"
            raise BadInput(f"reference strategy {self.name} does not work under ZeRO stage {zero_stage}: {why}")
        if adapter and self.own_model:
            raise BadInput(f"reference strategy {self.name} needs all parameters trained; LoRA's reference is Adapter")
        if (beta == 0.0) != (self.name == "None"):
            raise BadInput(f"spec.training.beta {beta} does not fit reference strategy {self.name}; beta 0 needs None")

    @abstractmethod
    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """The frozen reference, not yet wrapped. `trainer.model` is the policy as loaded."""

    def prepare(self, model: nn.Module, trainer: PolicyTrainer, wrap: Callable[..., Any]) -> nn.Module:
        """Wraps a model for DeepSpeed inference by `wrap(model, accelerator)`."""
        wrapped: nn.Module = wrap(model, trainer.accelerator)
        return wrapped

    def attach(self, trainer: PolicyTrainer) -> None:  # noqa: B027
        """Called once the trainer is built; most strategies need nothing more."""

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surrounds a forward pass for log-probabilities with `model`, which may be the policy."""
        return nullcontext()

    def move(self, trainer: PolicyTrainer) -> None:
        """Moves the reference towards the policy by `sync.mixup`. A collective under ZeRO-3 only for its next pass."""
        if self.sync and trainer.ref_model is not None:
            mixing.mix(trainer.model, unwrapped(trainer.ref_model), self.sync.mixup)

    def save(self, trainer: PolicyTrainer, folder: Path) -> None:
        """Writes into a checkpoint which weights the reference began with and, if it moves, where it is now."""
        store.save_identity(folder, self.name, trainer.start)
        if self.sync and trainer.ref_model is not None:
            store.save(unwrapped(trainer.ref_model), folder, self.name)

    def restore(self, trainer: PolicyTrainer, folder: Path) -> None:
        """Checks that the reference began as the checkpoint's, and reads where it has moved since. A collective.

        Raises:
            BadInput: the checkpoint's is of another strategy, model, world size or sync.
            WeightsDiffer: what was read is not what was saved.
        """
        store.check_identity(folder, self.name, trainer.start)
        if self.sync and trainer.ref_model is not None:
            store.restore(unwrapped(trainer.ref_model), folder, self.name)
