"""Terms of the memory model for attention without a fused kernel, where every score is an element of a tensor.

Sources: `eager_attention_forward` of transformers 5.23's Gemma 2 (soft-capped scores) and GPT-OSS (a sink beside them).
All results are bytes on one GPU; a score is one query position times one key position of one head.
"""

from typing import NamedTuple

from ..model.shapes import Shape
from .setup import Precision, Setup


class ScoreBytes(NamedTuple):
    """What one score takes, counting every tensor of that shape."""

    saved: int
    """Kept for the backward pass."""
    forward: int
    """All that is live at the softmax of a forward pass, the saved among it."""
    backward: int
    """All that is live at the softmax of a backward pass."""
    scoring: int
    """All that is live at the softmax of a pass without gradients."""
    kept: int
    """The weights, which the layer holds until it returns."""


SOFT_CAPPED: dict[Precision, ScoreBytes] = {
    "bfloat16": ScoreBytes(saved=8, forward=12, backward=14, scoring=10, kept=2),
    "mixed": ScoreBytes(saved=8, forward=10, backward=14, scoring=8, kept=4),
    "float32": ScoreBytes(saved=8, forward=12, backward=16, scoring=8, kept=4),
}
"""tanh and the narrow weights are kept beside the float32 softmax."""
WITH_SINK: dict[Precision, ScoreBytes] = {
    "bfloat16": ScoreBytes(saved=2, forward=6, backward=6, scoring=6, kept=2),
    "mixed": ScoreBytes(saved=6, forward=12, backward=12, scoring=12, kept=4),
    "float32": ScoreBytes(saved=4, forward=12, backward=12, scoring=12, kept=4),
}
"""The softmax has the scores' own dtype; under autocast the mask makes that float32."""
FUSED = ScoreBytes(0, 0, 0, 0, 0)


def score_bytes(shape: Shape, precision: Precision) -> ScoreBytes:
    """What a score takes; nothing where a kernel makes and forgets it."""
    if not shape.eager:
        return FUSED
    return (WITH_SINK if shape.sinks else SOFT_CAPPED)[precision]


def scores(shape: Shape, setup: Setup) -> int:
    """Scores of one layer over one micro-batch; those outside a window are made and masked."""
    return shape.heads * setup.length * setup.tokens


def mask(shape: Shape, setup: Setup) -> float:
    """What all layers share of [batch, 1, length, length]."""
    return mask_bytes(shape, setup) * setup.length * setup.tokens


def mask_bytes(shape: Shape, setup: Setup) -> int:
    """One query position times one key position of one sequence: a boolean, three where only some layers have a window;
    where attention is eager two additive masks in the dtype of the weights, with the window and without."""
    # transformers makes one mask per kind of layer, and an eager layer adds it to the scores.
    if shape.eager:
        return 2 * setup.weight_bytes
    return 3 if shape.full_attention_layers else 1
