"""Terms of the memory model for two kinds of layers: attention without a fused kernel, and mixtures
of experts.

Without a fused kernel, every attention score is an element of a tensor: one query position times
one key position of one head. Sources: `eager_attention_forward` of transformers 5.23's Gemma 2
(soft-capped scores) and GPT-OSS (a sink beside them).

A mixture of experts copies every token for each expert that the token passes. Sources: transformers
5.23's `grouped_mm_experts_forward`, whose tensors do not depend on the routing, and PEFT 0.21's
ParamWrapper. Others are the gates of Mixtral, Qwen 3 MoE and GPT-OSS. `grouped_mm` computes in the
dtype of the experts, which autocast does not change. All results are bytes on one GPU.
"""

from typing import NamedTuple

from ..model.shapes import Shape
from .setup import Precision, Setup


class ScoreBytes(NamedTuple):
    """Bytes of one attention score, summed over all tensors of that shape."""

    saved_scores: int
    """Kept for the backward pass."""
    forward: int
    """All that is live at the softmax of a forward pass, the saved among it."""
    backward: int
    """All that is live at the softmax of a backward pass."""
    scoring: int
    """All that is live at the softmax of a pass without gradients."""
    kept_mask: int
    """The weights, which the layer holds until it returns."""


SOFT_CAPPED: dict[Precision, ScoreBytes] = {
    "bfloat16": ScoreBytes(saved_scores=8, forward=12, backward=14, scoring=10, kept_mask=2),
    "mixed": ScoreBytes(saved_scores=8, forward=10, backward=14, scoring=8, kept_mask=4),
    "float32": ScoreBytes(saved_scores=8, forward=12, backward=16, scoring=8, kept_mask=4),
}
"""tanh and the narrow weights are kept beside the float32 softmax."""
WITH_SINK: dict[Precision, ScoreBytes] = {
    "bfloat16": ScoreBytes(saved_scores=2, forward=6, backward=6, scoring=6, kept_mask=2),
    "mixed": ScoreBytes(saved_scores=6, forward=12, backward=12, scoring=12, kept_mask=4),
    "float32": ScoreBytes(saved_scores=4, forward=12, backward=12, scoring=12, kept_mask=4),
}
"""The softmax has the scores' own dtype; under autocast the mask makes that float32."""
FUSED = ScoreBytes(0, 0, 0, 0, 0)


def score_bytes(shape: Shape, precision: Precision) -> ScoreBytes:
    """The bytes of one score; all zero where a fused kernel never stores it."""
    if not shape.eager:
        return FUSED
    by_precision = WITH_SINK if shape.sinks else SOFT_CAPPED
    return by_precision[precision]


def scores(shape: Shape, setup: Setup) -> int:
    """Number of attention scores of one layer for one micro-batch; those outside a window are
    computed and masked."""
    return shape.heads * setup.length * setup.tokens


def mask(shape: Shape, setup: Setup) -> float:
    """Bytes of the mask [batch, 1, length, length] that all layers share."""
    return mask_bytes(shape, setup) * setup.length * setup.tokens


def mask_bytes(shape: Shape, setup: Setup) -> int:
    """One query position times one key position of one sequence: a boolean, three where only some
    layers have a window; where attention is eager two additive masks in the dtype of the weights,
    with the window and without."""
    # transformers makes one mask per kind of layer, and an eager layer adds it to the scores.
    if shape.eager:
        return 2 * setup.weight_bytes
    return 3 if shape.full_attention_layers else 1


INDICES = 40
"""Bytes of one copy's place in the order by expert, and of its weight: int64 indices to sort and to
sort back."""


def weighted_element(shape: Shape, setup: Setup) -> int:
    """Bytes of an element of a row once the router has weighted it."""
    return 4 if shape.wide_routing else setup.weight_bytes


def copies(shape: Shape) -> int:
    """Elements of the residual stream that one token has after it is copied to its experts."""
    return shape.active_experts * shape.hidden


def has_adapted_experts(shape: Shape, setup: Setup) -> bool:
    """True if an adapter is on the experts."""
    if not setup.has_lora:
        return False
    adapted = shape.adapted_linears(setup.lora_targets)
    return any("experts" in linear.name for linear in adapted)


def has_expert_gradients(shape: Shape, setup: Setup) -> bool:
    """True if the experts are trained, or have an adapter."""
    return not setup.has_lora or has_adapted_experts(shape, setup)


def saved_rows(shape: Shape, setup: Setup) -> float:
    """Bytes per token: rows in and out of the experts, the gated product, the router's
    probabilities, and indices.

    Where the experts have no gradient, the inputs of their products are not kept.
    """
    has_gradient = has_expert_gradients(shape, setup)
    gate_tensors = (6 if shape.expert_bias else 3) + has_gradient
    at_gate = gate_tensors * shape.intermediate * shape.active_experts
    rows = (1 + has_gradient) * copies(shape)
    probabilities = 4 * shape.experts
    indices = INDICES * shape.active_experts
    return setup.weight_bytes * (at_gate + rows) + probabilities + indices


def effective_weights(shape: Shape, setup: Setup) -> float:
    """Bytes of a layer's expert weights with the adapter's change added, which each pass
    computes."""
    if not has_adapted_experts(shape, setup):
        return 0
    return setup.weight_bytes * shape.experts * shape.expert_matrices


def forward_transient(shape: Shape, setup: Setup) -> float:
    """Bytes per token: the weighted rows, in the experts' order and in the tokens', and those that
    the experts read where they are not kept; or biases gathered for each row."""
    weighted_rows = 2 * copies(shape) * weighted_element(shape, setup)
    read_elements = 0 if has_expert_gradients(shape, setup) else copies(shape)
    biases = 2 * shape.intermediate * shape.active_experts * shape.expert_bias
    return weighted_rows + setup.weight_bytes * (read_elements + biases)


def scoring_transient(shape: Shape, setup: Setup) -> float:
    """Bytes per token, without gradients: four times the rows at the end, or rows and the gate's
    tensors."""
    rows = copies(shape)
    gate_tensors = 9.1 if shape.expert_bias else 4
    gate = gate_tensors * shape.intermediate * shape.active_experts
    row_bytes = setup.weight_bytes
    at_end = 2 * rows * (row_bytes + weighted_element(shape, setup))
    return max(at_end, row_bytes * (rows + gate))


def backward_transient(shape: Shape, setup: Setup) -> float:
    """Bytes per token: the gradients of the weighted rows, of the rows, and their product with the
    weights' gradient; those of GPT-OSS's gate come on top."""
    row_bytes = 3 * weighted_element(shape, setup)
    gate = 2 * shape.intermediate * shape.active_experts * shape.expert_bias
    return row_bytes * copies(shape) + setup.weight_bytes * gate


def gate_backward(shape: Shape, setup: Setup) -> float:
    """Bytes per token: gradients of the gated product and of both its factors, in place of the rows
    that the experts returned and of the product, which only experts with a gradient keep; and of
    the residual stream."""
    tensors = 2 if has_expert_gradients(shape, setup) else 3
    gradients = tensors * shape.intermediate * shape.active_experts - copies(shape)
    return setup.weight_bytes * gradients + setup.weight_bytes * shape.hidden


def effective_gradient(shape: Shape, setup: Setup) -> float:
    """What the whole gradients of adapted experts add, before they become the adapter's: the down
    projections' a third of a layer's; gate's and up's are two thirds, but the changed down
    projections are gone by then.

    Beside the down projections' are four gradients of residual streams, of which the caller counts
    one of a recomputed layer, and that of the weighted rows where the router made them wider.
    """
    if not has_adapted_experts(shape, setup):
        return 0
    streams = (3 if setup.checkpointing else 4) * setup.weight_bytes * shape.hidden
    wide = weighted_element(shape, setup)
    wide_rows = wide * copies(shape) if wide > setup.weight_bytes else 0
    per_token = streams + wide_rows
    return effective_weights(shape, setup) / 3 + per_token * setup.tokens
