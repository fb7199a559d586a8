"""Whether a policy and its optimizer hold finite numbers only: asked before they generate, are saved or exported.

A NaN in a checkpoint can't be undone by any attempt that resumes from it. Each rank looks at what it holds, under
ZeRO-3 its own partition, so that nothing is gathered; one exchange tells all of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import Diverged
from ..gang import ranks
from . import partition


def require_finite(model: nn.Module, optimizer: Any, step: int) -> None:
    """Makes sure that all ranks hold finite numbers. A collective.

    Args:
        model: of which every parameter is looked at.
        optimizer: whose state is, too; None to leave it out.
        step: finished optimizer steps, for the message.

    Raises:
        Diverged: on every rank, naming the ranks and the first parameter or state that isn't finite.
    """
    own = first_not_finite(model, optimizer)
    if not ranks.any_rank(bool(own)):
        return
    found = ranks.gather(own)
    wrong = [number for number, name in enumerate(found) if name]
    raise Diverged(
        f"{ranks.named(wrong)}: {found[wrong[0]]} is not finite after step {step}, so neither a checkpoint nor a "
        "model is written. Lower training.learningRate",
        step,
    )


def first_not_finite(model: nn.Module, optimizer: Any) -> str:
    """Name of this rank's first parameter or optimizer state with an element that isn't finite; empty for none."""
    held = [*_parameters(model), *(_states(model, optimizer) if optimizer is not None else ())]
    floating = [(name, tensor) for name, tensor in held if tensor.is_floating_point()]
    held = [(name, tensor) for name, tensor in floating if tensor.numel()]
    if not held:
        return ""
    device = held[0][1].device
    # one pass without a copy of the tensor; both extremes are NaN where any element is
    extremes = [extreme.to(device) for _, tensor in held for extreme in torch.aminmax(tensor.detach())]
    # together, so that a GPU is waited for once
    finite = torch.stack(extremes).isfinite().view(-1, 2).all(dim=1).tolist()
    return next((name for (name, _), fine in zip(held, finite, strict=True) if not fine), "")


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in partition.parameters_by_name(model).items():
        with partition.held(parameter) as share:
            yield f"parameter {name}", share.tensor


def _states(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Moments and, under ZeRO, the float32 masters, through accelerate's and DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    known = {id(parameter) for parameter in model.parameters()}
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        if id(parameter) not in known:
            yield f"master weight {number} of the optimizer", parameter
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"state {name} of weight {number} of the optimizer", value
