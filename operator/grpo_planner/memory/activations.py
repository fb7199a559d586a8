"""Terms of the memory model for a layer's activations: what autograd saves, and what comes and goes.

Sources: transformers 5.23's decoder layers with scaled_dot_product_attention under a padding mask, PEFT 0.21's LoRA
layers, torch's non-reentrant checkpointing; each coefficient was read off fake-tensor accounts of the real code by
changing one width at a time (docs/memory-model.md). All results are bytes on one GPU.
"""

from ..model.shapes import Shape
from .setup import Setup


def inner(shape: Shape) -> int:
    """Width of the feed-forward products of one token: with experts, of all that it is routed to."""
    return shape.intermediate * max(1, shape.active_experts)


def saved_attention(shape: Shape, setup: Setup) -> float:
    """Per token: query, keys, values and output, log-sum-exp, and the additive mask's row.

    With a padding mask, keys and values are repeated for every query head before the kernel, except where a single
    key head can be expanded without a copy. Under mixed precision rotated keys are narrowed after that: a copy always.
    """
    repeated = shape.key_value if shape.kv_heads == 1 else shape.query
    keys_values = shape.query + repeated if setup.precision == "mixed" else 2 * repeated
    return setup.compute_bytes * (2 * shape.query + keys_values + setup.length) + 4 * shape.heads


def saved_norms(shape: Shape, setup: Setup) -> float:
    """Per token: what RMSNorms keep, and their outputs as inputs of the projections.

    A norm keeps its float32 input (4 bytes), and for a trained weight the normalised values in the dtype that they are
    multiplied in. Projections share one input in plain precision; under autocast each keeps its own bfloat16 cast.
    """
    normalised = 0 if setup.lora else 2 if setup.precision == "bfloat16" and not shape.wide_norms else 4
    inputs = 2 if shape.fused else 5
    autocast = setup.precision == "mixed" or (setup.lora and setup.precision == "bfloat16")
    outputs = 2 * inputs if autocast else 2 * setup.compute_bytes
    return shape.hidden * (shape.norms * (4 + normalised) + outputs)


def saved_head_norms(shape: Shape, setup: Setup) -> float:
    """Per token: the same for the norms of queries and keys."""
    if not shape.qk_norm:
        return 0
    wide = shape.wide_norms or setup.precision == "float32"
    return (shape.query + shape.key_value) * (4 if setup.lora else 8 if wide else 6)


def saved_adapters(shape: Shape, setup: Setup) -> float:
    """Per token: the adapters' inner values, and the attention output's cast for its adapter under autocast."""
    if not setup.lora:
        return 0
    # One per linear map: query, key, value, output, gate, up and down, four where some are fused.
    inner_values = setup.compute_bytes * setup.lora_rank * (4 if shape.fused else 7)
    return inner_values + (2 * shape.query if setup.compute_bytes == 2 else 0)


def saved_per_token(shape: Shape, setup: Setup) -> float:
    """What one layer keeps for its backward pass, per token; the gated product keeps four of its inner width."""
    return (
        saved_norms(shape, setup)
        + saved_head_norms(shape, setup)
        + saved_attention(shape, setup)
        + 4 * setup.compute_bytes * inner(shape)
        + saved_adapters(shape, setup)
    )


def checkpoint(shape: Shape, setup: Setup) -> float:
    """One layer's input, kept instead of its activations."""
    return setup.weight_bytes * shape.hidden * setup.tokens


def weight_casts(shape: Shape, setup: Setup) -> float:
    """bfloat16 copies of one layer's float32 matrices and adapters that autograd keeps under autocast."""
    matrices = 2 * shape.layer_matrices if setup.precision == "mixed" else 0
    adapters = (
        2 * shape.adapter_parameters(setup.lora_rank, setup.lora_targets) / shape.layers
        if setup.compute_bytes == 2
        else 0
    )
    return matrices + adapters


def cast_cache(shape: Shape, setup: Setup) -> float:
    """Autocast's cache of the casts of all trained float32 matrices, dropped when the forward pass ends."""
    return 2 * shape.layer_matrices * shape.layers if setup.precision == "mixed" and not setup.lora else 0


def mask(setup: Setup) -> float:
    """The boolean mask [batch, 1, length, length] that all layers share."""
    return setup.length * setup.tokens


def saved(shape: Shape, setup: Setup) -> float:
    """All layers' saved activations after a forward pass."""
    if setup.checkpointing:
        return shape.layers * checkpoint(shape, setup)
    return shape.layers * (saved_per_token(shape, setup) * setup.tokens + weight_casts(shape, setup))


def forward_transient(shape: Shape, setup: Setup) -> float:
    """The largest temporaries of one layer's forward pass, beside what it saves: around the gated product.

    Full training: gate, up and their product. LoRA adds a float32 copy of the product for its adapter; recomputed
    layers hold both projections and the activation as well, and cast a frozen float32 matrix at a time.
    """
    wide = setup.compute_bytes * inner(shape)
    if not setup.lora:
        return (3 * wide + (4 if setup.weight_bytes == 2 else 6) * shape.hidden) * setup.tokens
    if setup.checkpointing:
        cast = 2 * shape.hidden * shape.intermediate if setup.precision == "mixed" else 0
        return (4 * wide + 8 * shape.hidden) * setup.tokens + cast
    if setup.precision == "float32":
        return wide * setup.tokens
    return (3 * wide + (14 if setup.precision == "bfloat16" else 10) * shape.hidden) * setup.tokens


def no_grad_transient(shape: Shape, setup: Setup) -> float:
    """The largest temporaries of one layer when nothing is saved: the reference's pass."""
    return (6 * inner(shape) + (11 if setup.weight_bytes == 2 else 16) * shape.hidden) * setup.tokens


def backward_transient(shape: Shape, setup: Setup) -> float:
    """The largest temporaries of one layer's backward pass: at the product of gate and up projections.

    LoRA's adapter has a float32 copy of the product where there is autocast: in a recomputed layer beside its gradient.
    """
    wide = setup.compute_bytes * inner(shape)
    if not setup.lora or setup.precision == "float32":
        return 2 * wide * setup.tokens
    if setup.checkpointing:
        return (3 * wide + (8 if setup.weight_bytes == 2 else 10) * shape.hidden) * setup.tokens
    return (2 * wide + 2 * shape.hidden) * setup.tokens


def layer_backward(shape: Shape, setup: Setup) -> float:
    """One layer recomputed with all it saves, its casts, and its backward temporaries."""
    own = saved_per_token(shape, setup) * setup.tokens + weight_casts(shape, setup)
    incoming = checkpoint(shape, setup) if setup.checkpointing and setup.weight_bytes == 2 else 0
    return own + backward_transient(shape, setup) + incoming
