"""`python -m grpo_trainer` on a GPU that is full but for two gigabytes: how an out-of-memory is
injected.

The memory is really gone, so that CUDA's own error comes up through every layer, whatever the
allocator's settings.
"""

import torch

from grpo_trainer.__main__ import exit_process, main

FREE_BYTES = 2 << 30
"""Bytes that stay free: enough for the model and its communicator, too few for a step of
ends.check_out_of_memory."""


def fill_gpu() -> torch.Tensor:
    """Allocate the free memory of the GPU but for FREE_BYTES; return it, shape (bytes,), uint8."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - FREE_BYTES), dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    ballast = fill_gpu()
    exit_process(main())
