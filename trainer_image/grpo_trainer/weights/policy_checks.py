"""Checks the models of a run: only the policy trains, and the policy and its optimizer hold finite
numbers.

A reference that trains, or a reward model in train mode, changes results without any error (TRL
1.16 leaves requires_grad on in its reference). GRPO has no value model: the mean reward of a group
is the baseline, so there is nothing of that kind to check.

A NaN in a checkpoint can't be undone by any attempt that resumes from it. So the policy is checked
before it generates, is saved or exported. Each rank checks what it holds, under ZeRO-3 its own
partition, so that nothing is gathered; one exchange shares the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..gang import ranks
from ..runtime.errors import Diverged, TrainingError
from . import parameters
from .parameters import unwrap_model


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
    """Policy: trained parameters, all in the optimizer. Reference and reward models: frozen, eval,
    not in it.

    Raises:
        TrainingError: names the model, the parameter or module, and what is wrong.
    """
    optimized = {id(parameter) for parameter in optimizer_parameters(trainer.optimizer)}
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    if not trained:
        raise TrainingError("no parameter of the policy requires a gradient")
    for name, parameter in trained.items():
        if id(parameter) not in optimized:
            raise TrainingError(
                f"policy parameter {name} requires a gradient, but the optimizer does not have it"
            )
    # Unwrapped, since a DeepSpeed engine has an unused mode of its own.
    if trainer.ref_model is not None:
        _check_frozen("reference", unwrap_model(trainer.ref_model), optimized)
    for number, reward in enumerate(trainer.reward_funcs):
        if isinstance(reward, nn.Module):
            _check_frozen(f"reward model {number}", unwrap_model(reward), optimized)


def optimizer_parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    """The model's parameters that an optimizer steps, also through accelerate's and DeepSpeed's
    wrappers.

    DeepSpeed's ZeRO optimizers have flat copies in `param_groups` and the model's own in
    `fp16_groups` (stage 3) or `bit16_groups` (stages 1 and 2), whatever the dtype.
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
            raise TrainingError(
                f"module {name or '(root)'} of the {kind} is in train mode; it must be in eval mode"
            )
    for name, parameter in model.named_parameters():
        for wrong, what in (
            (parameter.requires_grad, "requires a gradient"),
            (parameter.grad is not None, "has a gradient"),
            (id(parameter) in optimized, "is in the optimizer"),
        ):
            if wrong:
                raise TrainingError(f"parameter {name} of the {kind} {what}; it must stay as it is")


def require_finite_policy(model: nn.Module, optimizer: Any, step: int) -> None:
    """Makes sure that all ranks hold finite numbers in the parameters and in the optimizer's state
    (None leaves it out) after `step` optimizer steps. A collective.

    Raises:
        Diverged: on every rank, naming the ranks and the first parameter or state that isn't
            finite.
    """
    own_not_finite = first_not_finite(model, optimizer)
    if not ranks.any_rank(bool(own_not_finite)):
        return
    not_finite = ranks.gather(own_not_finite)
    wrong = [number for number, name in enumerate(not_finite) if name]
    raise Diverged(
        f"{ranks.rank_names(wrong)}: {not_finite[wrong[0]]} is not finite after step {step}, so "
        "neither a checkpoint nor a model is written. Lower training.learningRate",
        step,
    )


def first_not_finite(model: nn.Module, optimizer: Any) -> str:
    """Name of this rank's first parameter or optimizer state with an element that isn't finite;
    empty for none."""
    all_tensors = list(_parameters(model))
    if optimizer is not None:
        all_tensors += _states(model, optimizer)
    floating = [(name, tensor) for name, tensor in all_tensors if tensor.is_floating_point()]
    named_tensors = [(name, tensor) for name, tensor in floating if tensor.numel()]
    if not named_tensors:
        return ""
    device = named_tensors[0][1].device
    # one pass without a copy of the tensor; both extremes are NaN where any element is
    extremes = [
        extreme.to(device)
        for _, tensor in named_tensors
        for extreme in torch.aminmax(tensor.detach())
    ]
    # together, so that a GPU is waited for once
    finite = torch.stack(extremes).isfinite().view(-1, 2).all(dim=1).tolist()
    return next(
        (name for (name, _), fine in zip(named_tensors, finite, strict=True) if not fine), ""
    )


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.parameters_by_name(model).items():
        with parameters.local_share(parameter) as share:
            yield f"parameter {name}", share.tensor


def _states(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Moments and, under ZeRO, the float32 masters, through accelerate's and DeepSpeed's
    wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        if id(parameter) not in parameter_ids:
            yield f"master weight {number} of the optimizer", parameter
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"state {name} of weight {number} of the optimizer", value
