"""The block sums of the hash on a GPU: one pass that reads every element once and draws
coefficients meanwhile.

Kept apart since Triton is imported for it. The numbers are the same as on CPUs. Triton's
interpreter runs it in tests/trainer/test_engine_hash.py, and harness/images/image_checks.py
compiles it for GPUs. An H100 gave the same (grpo_acceptance, check `hash`).
"""

import torch
import triton
import triton.language as tl

_TILE = 4096
"""Elements in registers at a time; a block is a multiple of it."""


def block_sums(values: torch.Tensor, begin: int, block: int) -> torch.Tensor:
    """Per block the sum of its mixed elements times the coefficients of their places, shape
    (blocks,), int64.

    Args:
        values: shape (elements,), integers of at most 4 bytes, contiguous.
        begin: of the stream of coefficients, unsigned.
        block: elements of a block.
    """
    blocks = values.numel() // block + 1
    sums = torch.empty(blocks, dtype=torch.int64, device=values.device)
    block_sums_kernel[(blocks,)](
        values, sums, values.numel(), begin & 0xFFFFFFFF, begin >> 32, block, _TILE
    )
    return sums


@triton.jit(do_not_specialize=["begin_low", "begin_high"])  # type: ignore[untyped-decorator]  # triton has no type information
def block_sums_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - the kernel takes no types and no keywords
    values,  # noqa: ANN001
    sums,  # noqa: ANN001
    count,  # noqa: ANN001
    begin_low,  # noqa: ANN001
    begin_high,  # noqa: ANN001
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per block. The stream's begin comes in halves, since Triton reads large arguments
    as signed."""
    begin = (begin_high.to(tl.uint64) << 32) | begin_low.to(tl.uint64)
    block = tl.program_id(0).to(tl.int64)
    total = tl.zeros((TILE,), dtype=tl.uint64)
    for start in range(0, BLOCK, TILE):
        place = start + tl.arange(0, TILE)
        offset = block * BLOCK + place
        value = (
            tl.load(values + offset, mask=offset < count, other=0)
            .to(tl.int64)
            .to(tl.uint64, bitcast=True)
        )
        mixed = (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + begin
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
        product = value * ((mixed ^ (mixed >> 31)) | 1)
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
        total += (product ^ (product >> 32)) * ((mixed ^ (mixed >> 31)) | 1)
    tl.store(sums + block, tl.sum(total.to(tl.int64, bitcast=True), axis=0))
