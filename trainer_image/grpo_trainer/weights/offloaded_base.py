"""Keeps frozen weights in host memory: the base of a LoRA policy while an engine has the GPU, and
an offloaded reference between its passes.

The base never changes, so that its copy in host memory is made once and nothing is ever written
back. To leave the GPU copies nothing, and to come back copies the base once over the host link. An
engine's sync reads the host copy in between, tensor by tensor.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..runtime.errors import TrainingError

ALIGNMENT = 64
"""Bytes between whose multiples every tensor begins, so that it can be viewed as any dtype."""


class OffloadedBase:
    """The parameters of a model that are not trained, and their copy in host memory."""

    def __init__(self, model: nn.Module) -> None:
        """Copy them from where they are, which is where they come back to."""
        self._parameters = [
            parameter for parameter in model.parameters() if not parameter.requires_grad
        ]
        self.device = self._parameters[0].device
        sizes = [-(-parameter.nbytes // ALIGNMENT) * ALIGNMENT for parameter in self._parameters]
        starts = accumulate(sizes, initial=0)
        self._memory = _pinned_memory(sum(sizes), self.device)
        self._copies = [
            self._memory[start : start + parameter.nbytes]
            .view(parameter.dtype)
            .view(parameter.shape)
            for start, parameter in zip(starts, self._parameters, strict=False)
        ]
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.copy_(parameter.detach())

    def move_to_host(self) -> None:
        """Point the parameters at their copies, which frees their memory on the device."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy

    def move_to_device(self) -> None:
        """Bring the parameters back to memory of their own on the device, bit for bit."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            # `to` would give the copy itself where host and device are one.
            on_device = torch.empty_like(copy, device=self.device)
            parameter.data = on_device.copy_(copy, non_blocking=True)


def _pinned_memory(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes of host memory, page-locked if `device` is a GPU.

    torch's pinned allocator rounds every tensor up to a power of two, which would be up to twice
    the base (CachingHostAllocator.h; pytorch issue 95823).

    Raises:
        TrainingError: CUDA can't lock them.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
        if error:
            raise TrainingError(
                f"weights that are offloaded take {size} bytes of page-locked host memory, and "
                f"CUDA can't lock them (error {error}): raise resources.requests.memory"
            )
    return memory
