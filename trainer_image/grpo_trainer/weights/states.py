"""The policy trains, everything else stands still: checked, not assumed.

A reference that trains, or a reward model in train mode, changes results without any error (TRL 1.16 leaves
requires_grad on in its reference). GRPO has no value model: the mean reward of a group is the baseline, so there is
nothing of that kind to check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

from ..errors import TrainingError
from .partition import unwrapped


class TrainerModels(Protocol):
    """The models of a GRPO trainer."""

    model: Any
    """The policy."""
    ref_model: Any
    """The reference, as wrapped for several ranks; None without one."""
    reward_funcs: list[Any]
    """Reward functions, some of which may be models."""
    optimizer: Any
    """The policy's optimizer; None before training."""


def check_states(trainer: TrainerModels) -> None:
    """Policy: trained parameters, all in the optimizer. Reference and reward models: frozen, eval, not in it.

    Raises:
        TrainingError: names the model, the parameter or module, and what is wrong.
    """
    optimized = {id(parameter) for parameter in optimizer_parameters(trainer.optimizer)}
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    if not trained:
        raise TrainingError("no parameter of the policy requires a gradient")
    for name, parameter in trained.items():
        if id(parameter) not in optimized:
            raise TrainingError(f"policy parameter {name} requires a gradient, but the optimizer does not have it")
    for kind, model in frozen_models(trainer):
        _check_frozen(kind, model, optimized)


def frozen_models(trainer: TrainerModels) -> Iterator[tuple[str, nn.Module]]:
    """The reference and the reward models, with a name for messages; without a DeepSpeed engine's own, unused, mode."""
    if trainer.ref_model is not None:
        yield "reference", unwrapped(trainer.ref_model)
    for number, reward in enumerate(trainer.reward_funcs):
        if isinstance(reward, nn.Module):
            yield f"reward model {number}", unwrapped(reward)


def optimizer_parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    """The model's parameters that an optimizer steps, also through accelerate's and DeepSpeed's wrappers.

    DeepSpeed's ZeRO optimizers have flat copies in `param_groups` and the model's own in `fp16_groups` (stage 3) or
    `bit16_groups` (stages 1 and 2), whatever the dtype.
    """
    while optimizer is not None:
        for attribute in ("fp16_groups", "bit16_groups"):
            for group in getattr(optimizer, attribute, []):
                yield from group
        for group in optimizer.param_groups:
            yield from group["params"]
        optimizer = getattr(optimizer, "optimizer", None)


def _check_frozen(kind: str, model: nn.Module, optimized: set[int]) -> None:
    for name, module in model.named_modules():
        if module.training:
            raise TrainingError(f"module {name or '(root)'} of the {kind} is in train mode; it must be in eval mode")
    for name, parameter in model.named_parameters():
        for wrong, what in (
            (parameter.requires_grad, "requires a gradient"),
            (parameter.grad is not None, "has a gradient"),
            (id(parameter) in optimized, "is in the optimizer"),
        ):
            if wrong:
                raise TrainingError(f"parameter {name} of the {kind} {what}; it must stay as it is")
