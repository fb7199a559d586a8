"""`python -m grpo_trainer` on a GPU that is full but for two gigabytes: how an out-of-memory is injected.

The memory is really gone, so that CUDA's own error comes up through every layer, whatever the allocator's settings.
"""

import torch

from grpo_trainer.__main__ import leave, main

LEFT = 2 << 30
"""Bytes that stay free: enough for the model and its communicator, too few for a step of ends.out_of_memory."""


def fill() -> torch.Tensor:
    """Take all but LEFT."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - LEFT), dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    ballast = fill()
    leave(main())
