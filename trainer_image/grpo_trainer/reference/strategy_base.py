"""The interface of a reference strategy, what it sees of the trainer, and the sync of its weights.

The trainer works with any strategy without knowing which. It calls them in this order:

- `check`: before anything is built
- `build`: inside GRPOTrainer's constructor, before TRL wraps the result
- `prepare`: TRL wraps it for DeepSpeed
- `attach`: the constructor is done
- `scoring`: around every forward pass
- `move`: sync
- `save` and `restore`: checkpoints

A strategy acts on the trainer through the narrow view PolicyTrainer, which shows how much of TRL's
trainer a reference depends on.

A sync computes reference = mixup * policy + (1 - mixup) * reference. Under ZeRO-3, TRL's
SyncRefModelCallback gathers both models whole on every rank (4 bytes per parameter of each in
bf16). Its result is lost on resume. Elementwise mixing needs no gather, since policy and reference
are partitioned alike. Each rank mixes its own partitions, in the same operations and so to the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from grpo_api.spec.training import ReferenceSync

from ..runtime.errors import BadInput, TrainingError
from ..weights import parameters
from ..weights.model_files import Source
from ..weights.parameters import unwrap_model
from ..weights.policy_checks import TrainerModels
from ..weights.proof import Proof
from . import reference_state


class PolicyTrainer(TrainerModels, Protocol):
    """The trainer of the policy, as its reference needs it."""

    accelerator: Any
    """accelerate's Accelerator."""
    args: Any
    """TRL's GRPOConfig."""
    source: Source
    """The files that the policy was loaded from."""
    proofs: list[Proof]
    """Every proof made so far, in order."""
    resumed_from: Path | None
    """The checkpoint that the run continues from."""

    @property
    def start(self) -> str:
        """Fingerprint of the weights that the run began with, adapter included."""


@torch.no_grad()
def mix_weights(policy: nn.Module, reference: nn.Module, mixup: float) -> None:
    """Mixes every parameter once, a tied one too, on this rank's elements. No collective."""
    targets = parameters.parameters_by_name(reference)
    sources = parameters.parameters_by_name(policy)
    assert targets.keys() == sources.keys()  # both were loaded from the same files
    for name, target in targets.items():
        with parameters.local_share(target) as old, parameters.local_share(sources[name]) as new:
            assert (old.start, old.stop, old.shape) == (new.start, new.stop, new.shape), name
            old.tensor.mul_(1.0 - mixup).add_(new.tensor.to(old.tensor.device), alpha=mixup)
        parameters.release(target)


class ReferenceStrategy:
    """Where the reference comes from, where it lives, how it moves and how it is saved."""

    name: ClassVar[str]
    """Name in the plan."""
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2)
    """ZeRO stages that it works under; 0 is one process or DDP."""
    has_own_model: ClassVar[bool] = True
    """Whether the reference is a model of its own."""

    def __init__(self, sync: ReferenceSync | None = None) -> None:
        if sync and not self.has_own_model:
            raise BadInput(
                f"spec.reference.sync: strategy {self.name} has no reference model of its own that "
                "could move; remove sync, or choose strategy Clone, Offload or Sharded"
            )
        self.sync = sync

    def check(self, zero_stage: int, adapter: bool, beta: float) -> None:
        """Rejects what can't work before anything is loaded or wrapped.

        Raises:
            BadInput: the strategy doesn't fit the parallelism, the method or beta.
        """
        if zero_stage not in self.zero_stages:
            why = (
                "a partitioned policy can't be copied; use Sharded"
                if zero_stage == 3
                else "nothing is partitioned"
            )
            raise BadInput(
                f"reference strategy {self.name} does not work under ZeRO stage {zero_stage}: {why}"
            )
        if adapter and self.has_own_model:
            raise BadInput(
                f"reference strategy {self.name} needs all parameters trained; LoRA's reference "
                "is Adapter"
            )
        if (beta == 0.0) != (self.name == "None"):
            raise BadInput(
                f"spec.training.beta {beta} does not fit reference strategy {self.name}; beta 0 "
                "needs None"
            )

    def build(self, trainer: PolicyTrainer) -> nn.Module:  # noqa: ARG002
        """The frozen reference, not yet wrapped. `trainer.model` is the policy as loaded. TRL asks
        for none with beta 0, and none with an adapter."""
        raise TrainingError(f"TRL asked for a reference model, and strategy {self.name} has none")

    def prepare(
        self, model: nn.Module, trainer: PolicyTrainer, wrap: Callable[..., Any]
    ) -> nn.Module:
        """Wraps a model for DeepSpeed inference by `wrap(model, accelerator)`."""
        wrapped: nn.Module = wrap(model, trainer.accelerator)
        return wrapped

    def attach(self, trainer: PolicyTrainer) -> None:
        """Called once the trainer is built; most strategies need nothing more."""

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surrounds a forward pass for log-probabilities with `model`, which may be the policy."""
        return nullcontext()

    def move(self, trainer: PolicyTrainer) -> None:
        """Moves the reference towards the policy by `sync.mixup`. A collective under ZeRO-3 only
        for its next pass."""
        if self.sync and trainer.ref_model is not None:
            mix_weights(trainer.model, unwrap_model(trainer.ref_model), self.sync.mixup)

    def save(self, trainer: PolicyTrainer, folder: Path) -> None:
        """Writes into a checkpoint which weights the reference began with and, if it moves, where
        it is now."""
        reference_state.save_identity(folder, trainer.start)
        if self.sync and trainer.ref_model is not None:
            reference_state.save_reference(unwrap_model(trainer.ref_model), folder)

    def restore(self, trainer: PolicyTrainer, folder: Path) -> None:
        """Checks that the reference began as the checkpoint's, and reads where it has moved since.
        A collective.

        Raises:
            BadInput: the model's files have changed since.
            WeightsDiffer: what was read is not what was saved.
        """
        reference_state.check_identity(folder, trainer.start)
        if self.sync and trainer.ref_model is not None:
            reference_state.restore_reference(unwrap_model(trainer.ref_model), folder)
