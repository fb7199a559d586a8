"""Strategy None: no reference, for beta 0; with it the engine needs no special case."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ..errors import TrainingError
from .base import ReferenceStrategy
from .policy_trainer import PolicyTrainer


class NoReference(ReferenceStrategy):
    """Trains without a KL term."""

    name: ClassVar[str] = "None"
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    own_model: ClassVar[bool] = False

    def check(self, zero_stage: int, adapter: bool, beta: float) -> None:  # noqa: ARG002  # fits all stages and methods
        """Only beta 0 fits."""
        super().check(zero_stage, False, beta)

    def build(self, trainer: PolicyTrainer) -> NoReturn:
        """Never reached with beta 0; TRL asking for a reference means that it changed."""
        raise TrainingError(f"TRL asked for a reference although beta is {trainer.args.beta}")
