"""What a reference strategy sees of the trainer that it serves.

The engine owns the strategies and they act on it: with this narrow view they need not know the engine, and a reader
sees at a glance how much of TRL's trainer a reference depends on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ..weights.models import Source
from ..weights.proof import Proof
from ..weights.states import TrainerModels


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
