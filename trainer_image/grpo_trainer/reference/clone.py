"""Strategy Clone: a deep copy of the policy at step 0, a full one on every GPU.

The copy needs no second read of the checkpoint and can't differ from the policy it is copied from.
"""

from __future__ import annotations

import copy
from typing import ClassVar

from torch import nn

from ..weights.models import freeze
from .base import ReferenceStrategy
from .policy_trainer import PolicyTrainer


class Clone(ReferenceStrategy):
    """A frozen copy in eval mode beside the policy."""

    name: ClassVar[str] = "Clone"

    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """Copies the policy. Before TRL adds its fused head: a copy of that would still call the policy."""
        policy: nn.Module = trainer.model
        return freeze(copy.deepcopy(policy))
