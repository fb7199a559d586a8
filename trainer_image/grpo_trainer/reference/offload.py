"""Strategy Offload: a frozen copy in host memory, on the GPU only for the reference pass.

For a GPU that has room for the copy during that pass, when gradients and activations are gone, but not throughout the
step. Without ZeRO-3 only; there it is Sharded with spec.reference.offload.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import nn

from ..weights.models import freeze
from ..weights.partition import unwrapped
from .base import ReferenceStrategy
from .policy_trainer import PolicyTrainer


class Offload(ReferenceStrategy):
    """A copy in pinned host memory."""

    name: ClassVar[str] = "Offload"

    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """Copies the policy's parameters to the host, without a second copy on the GPU on the way."""
        policy: nn.Module = trainer.model
        host = {p: nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=False) for p in policy.parameters()}
        return freeze(copy.deepcopy(policy, {id(p): copied for p, copied in host.items()}))

    def attach(self, trainer: PolicyTrainer) -> None:
        """Takes the parameters back to the host: TRL's wrapping put them on the device (before any optimizer state)."""
        for parameter in unwrapped(trainer.ref_model).parameters():
            parameter.data = pinned(parameter.data.to("cpu"), trainer.accelerator.device)

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:
        """Brings the copy in for its own passes."""
        return on_device(model, trainer.accelerator.device) if model is trainer.ref_model else nullcontext()


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters on `device` inside; afterwards, also after an exception, the same host memory as before."""
    home = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, data in home:
            parameter.data = data.to(device, non_blocking=True)
        yield
    finally:
        for parameter, data in home:
            parameter.data = data


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host tensor in page-locked memory if `device` is a GPU, so that copies to it can overlap."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
