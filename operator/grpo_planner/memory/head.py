"""Terms of the memory model around the output head: TRL's fused log-probabilities never hold the logits.

Source: trl.kernels.chunked_logprob (TRL 1.16): tiles of 4096 tokens by 32768 words, gradients summed in float32.
All results are bytes on one GPU.
"""

from ..model.shapes import Shape
from .setup import Setup

TILE_TOKENS = 4096
TILE_WORDS = 32_768


def tile(shape: Shape, setup: Setup) -> float:
    """One tile of logits, and under autocast the tile's slices of weights and hidden states in bfloat16."""
    rows = min(setup.scored_tokens, TILE_TOKENS)
    # Counted as a whole tile of words, also for a vocabulary that is smaller than one.
    logits = rows * TILE_WORDS * setup.compute_bytes
    if setup.precision != "mixed":
        return logits
    slices = min(TILE_WORDS, shape.vocab) + rows
    return logits + slices * shape.hidden * 2


def packed_hidden(shape: Shape, setup: Setup) -> float:
    """The final norm's saved tensors for all tokens, the packed hidden states of scored tokens, and their statistics.

    The norm keeps float32 input and narrow output; 40 bytes per scored token are the running sums and indices.
    """
    # The float32 input takes 4 bytes; a norm whose weight is trained keeps its output, too.
    bytes_of_trained_norm = {"bfloat16": 6, "mixed": 8, "float32": 8}
    norm_bytes = 4 if setup.lora else bytes_of_trained_norm[setup.precision]
    packed = setup.scored_tokens * (shape.hidden * setup.weight_bytes + 40)
    return packed + norm_bytes * shape.hidden * setup.tokens


def forward_peak(shape: Shape, setup: Setup) -> float:
    """Packed hidden states and one tile."""
    return packed_hidden(shape, setup) + tile(shape, setup)


def backward_peak(shape: Shape, setup: Setup) -> float:
    """The forward's, with float32 gradients of hidden states and (full training) of the head, then their casts.

    Under autocast the next slice of the head is cast while the last one is still held.
    """
    # The kernel sums gradients in float32; narrow weights need them cast once more, in 2 bytes.
    wide = 4 if setup.weight_bytes == 4 else 6
    gradient = 0 if setup.lora else shape.head * wide
    hidden_gradient = setup.scored_tokens * shape.hidden * wide
    second_slice = 0
    if setup.precision == "mixed":
        words = min(TILE_WORDS, max(0, shape.vocab - TILE_WORDS))
        second_slice = words * shape.hidden * 2
    return forward_peak(shape, setup) + hidden_gradient + gradient + second_slice
