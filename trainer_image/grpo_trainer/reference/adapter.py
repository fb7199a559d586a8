"""Strategy Adapter: the policy is base + LoRA, the reference is the base with the adapter disabled.

It needs no second model: TRL disables the adapter under no_grad (trl/trainer/utils.py, `use_adapter`). What TRL leaves
out is done here: while the adapter is off, the model is in eval mode, so that dropout inside the base can't make the
reference random.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, NoReturn

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..errors import BadInput, TrainingError
from .base import ReferenceStrategy
from .policy_trainer import PolicyTrainer


class Adapter(ReferenceStrategy):
    """The base model itself; no copy."""

    name: ClassVar[str] = "Adapter"
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    own_model: ClassVar[bool] = False

    def check(self, zero_stage: int, adapter: bool, beta: float) -> None:
        """Fits every parallelism, but only LoRA.

        Raises:
            BadInput: all parameters are trained, or beta is 0.
        """
        super().check(zero_stage, adapter, beta)
        if not adapter:
            raise BadInput("reference strategy Adapter needs LoRA: with all parameters trained the base does not stay")

    def build(self, trainer: PolicyTrainer) -> NoReturn:
        """Never reached with PEFT; a second model is what this strategy exists to avoid."""
        raise TrainingError(f"TRL asked for a second model although {type(trainer.model).__name__} has an adapter")

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Eval mode for passes with the adapter off; nothing for the policy's own."""
        return evaluating(model) if adapter_is_off(model) else nullcontext()


def adapter_is_off(model: nn.Module) -> bool:
    """Whether PEFT's adapter layers in the model are disabled now."""
    return any(layer.disable_adapters for layer in model.modules() if isinstance(layer, BaseTunerLayer))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards, also after an exception, every module's own mode again. Nests."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
