"""From allocated bytes to what the device must have, and what a checkpoint takes of the disk.

CONTEXT, WORKSPACES and FRAGMENTATION with expandable segments were measured on one H100
(docs/internals/gpu.md); the others are assumed (docs/internals/memory-model.md, "assumed").
"""

from grpo_api.text.units import GIB, MIB

from ..model.shapes import Shape
from .phases import Prediction
from .setup import Setup
from .states import optimizer_state, trained_bytes, trained_parameters

CONTEXT = round(0.7 * GIB)
"""CUDA context with the kernels of torch and cuBLAS: 0.67 GiB after one product on an H100."""
WORKSPACES = 64 * MIB
"""Two workspaces of cuBLAS, of the main thread and of the backward pass's thread, 32 MiB each on
Hopper and Blackwell (torch, CublasHandlePool.cpp; earlier GPUs have 8 MiB). torch allocates them,
so each phase has them: on an H100 all phases were 59 to 71 MiB above the other terms."""
COMMUNICATOR = round(0.4 * GIB)
"""NCCL's buffers of one communicator."""
FRAGMENTATION = {True: 0.06, False: 0.15}
"""Share of what comes and goes that the caching allocator can't reuse, with expandable segments and
without. Without, a freed block serves requests of its own size and smaller, and completions of a
new length ask for new sizes. With them an H100 held up to 18 % beside the context where memory was
plentiful; the margin has the rest."""
MARGIN = {"Exact": 0.05, "Catalogue": 0.05, "Estimated": 0.10}
"""Share of the allocated bytes kept free, by where the shape came from."""


def device_bytes(prediction: Prediction, world: int, margin: float, *, expandable: bool) -> int:
    """Bytes that a GPU must have: allocated bytes with margin, fragmentation, CUDA context and
    communicator.

    `margin`: share of the allocated bytes kept free; `expandable`: whether torch's allocator has
    expandable segments.
    """
    communicator = COMMUNICATOR if world > 1 else 0
    # What stays allocated is never returned to the allocator, so only the rest can fragment.
    dynamic = prediction.dynamic
    fragments = FRAGMENTATION[expandable] * dynamic
    allocated = (prediction.static + dynamic) * (1 + margin) + fragments
    return round(allocated) + CONTEXT + communicator


def whole_mib(count: int) -> int:
    """Bytes rounded up to whole MiB: a pod's request then reads well, and the scheduler's sums of
    it are exact."""
    return -(-count // MIB) * MIB


def checkpoint_bytes(shape: Shape, setup: Setup, drifting_reference: bool) -> int:
    """Disk of one checkpoint: weights (the adapter's under LoRA), optimizer state and a drifting
    reference."""
    trained = trained_parameters(shape, setup)
    weights = trained * trained_bytes(setup)
    moments = 12 * trained if setup.zero else optimizer_state(shape, setup)
    reference = shape.parameters * setup.weight_bytes if drifting_reference else 0
    return round(weights + moments + reference)


def export_bytes(shape: Shape, setup: Setup, merged: bool) -> int:
    """Disk of the exported weights: the model's, or under LoRA the adapter's unless it is merged
    into its base."""
    if setup.has_lora and not merged:
        return trained_parameters(shape, setup) * trained_bytes(setup)
    return shape.parameters * setup.weight_bytes
