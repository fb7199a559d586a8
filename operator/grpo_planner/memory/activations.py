"""Terms of the memory model for activations: a layer's saved and temporary tensors, and the output
head's tiles.

Sources for layers: transformers 5.23's decoder layers with scaled_dot_product_attention under a
padding mask, PEFT 0.21's LoRA layers, torch's non-reentrant checkpointing. Each coefficient was
read off fake-tensor accounts of the real code by changing one width at a time
(docs/internals/memory-model.md).

TRL's fused log-probabilities never hold the logits. Source: trl.kernels.chunked_logprob (TRL 1.16):
tiles of 4096 tokens by 32768 words, gradients summed in float32. All results are bytes on one GPU.
"""

from ..model.shapes import EMBEDDING, Shape
from . import layer_kinds
from .setup import Setup

INPUT_MAPS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
"""Projections whose input is a norm's output."""
PER_WEIGHT = (
    "mlp.experts.gate_proj",
    "mlp.experts.up_proj",
    "mlp.experts.down_proj",
    "mlp.gate",
    EMBEDDING,
)
"""Names of what PEFT adapts by changing weights, or by a table, and not by a product per token."""


def feed_forward_width(shape: Shape) -> int:
    """Width of the feed-forward products of one token: with experts, of all that it is routed
    to."""
    return shape.intermediate * max(1, shape.active_experts)


def adapters(shape: Shape, setup: Setup, *names: str) -> float:
    """Adapters per layer on the maps of these names that take every token as it comes, or on all
    such maps.

    An adapter on experts changes their weights instead, and so does one on their router.
    """
    adapted = shape.adapted_linears(setup.lora_targets)
    maps = [linear for linear in adapted if linear.name not in PER_WEIGHT]
    if names:
        maps = [linear for linear in maps if linear.name.rsplit(".", 1)[-1] in names]
    in_all_layers = sum(linear.copies for linear in maps)
    return in_all_layers / shape.layers


def saved_attention(shape: Shape, setup: Setup) -> float:
    """Bytes per token: query, keys, values and output, log-sum-exp, and the additive mask's row;
    eagerly, all scores.

    With a padding mask, keys and values are repeated for every query head before the kernel, except
    where a single key head can be expanded without a copy. Under mixed precision rotated keys are
    narrowed after that: a copy always.
    """
    repeated = shape.key_value if shape.kv_heads == 1 else shape.query
    keys_values = shape.query + repeated if setup.precision == "mixed" else 2 * repeated
    query_and_output = 2 * shape.query
    states = setup.compute_bytes * (query_and_output + keys_values)
    if shape.eager:
        score = layer_kinds.score_bytes(shape, setup.precision)
        scores = shape.heads * setup.length
        return states + score.saved_scores * scores
    mask_row = setup.compute_bytes * setup.length
    log_sums = 4 * shape.heads
    return states + mask_row + log_sums


def kept_norm(shape: Shape, setup: Setup) -> float:
    """Bytes per token that one RMSNorm saves: its float32 input (4 bytes per value), and for a
    trained weight the normalised values in the dtype of the multiplication."""
    element_bytes = 4 + _normalised_bytes(shape, setup)
    return shape.hidden * element_bytes


def _normalised_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes of one normalised value that a norm keeps for the gradient of its weight."""
    if setup.has_lora:
        # An adapter leaves the norms' weights as they are: there is no gradient to keep values for.
        return 0
    if setup.precision == "bfloat16" and not shape.wide_norms:
        return 2
    return 4


def saved_inputs(shape: Shape, setup: Setup) -> float:
    """Number of projections that save a norm's output: q, k and v, and gate and up, or the experts'
    router. A fused projection counts once."""
    if setup.has_lora:
        adapted_maps = adapters(shape, setup, *INPUT_MAPS)
        adapted_router = layer_kinds.has_adapted_experts(shape, setup)
        return adapted_maps + adapted_router
    of_attention = 1 if shape.fused_attention else 3
    return of_attention + (1 if shape.fused_gate or shape.experts else 2)


def saved_norms(shape: Shape, setup: Setup) -> float:
    """Bytes per token: what RMSNorms keep, and their outputs as inputs of the projections.

    Projections share one input in plain precision; under autocast each that is trained, or has an
    adapter, keeps its own bfloat16 cast.
    """
    inputs = saved_inputs(shape, setup)
    casts_for_adapters = setup.has_lora and setup.precision == "bfloat16"
    autocast = setup.precision == "mixed" or casts_for_adapters
    output_bytes = 2 * inputs if autocast else 2 * setup.compute_bytes
    norms = shape.norms * kept_norm(shape, setup)
    return norms + shape.hidden * output_bytes


def saved_head_norms(shape: Shape, setup: Setup) -> float:
    """Bytes per token: the same for the norms of queries and keys."""
    if not (shape.qk_norm or shape.whole_qk_norm):
        return 0
    values = shape.query + shape.key_value
    if setup.has_lora:
        return values * 4
    is_wide = shape.wide_norms or setup.precision == "float32"
    return values * (8 if is_wide else 6)


def is_gate_adapted(shape: Shape, setup: Setup) -> bool:
    """True if an adapter is on one of the projections around the gated product."""
    return adapters(shape, setup, "gate_proj", "up_proj", "gate_up_proj", "down_proj") > 0


def saved_adapters(shape: Shape, setup: Setup) -> float:
    """Bytes per token: the adapters' inner values, and the attention output's cast for its adapter
    under autocast."""
    if not setup.has_lora:
        return 0
    inner_values = setup.compute_bytes * setup.lora_rank * adapters(shape, setup)
    if setup.compute_bytes != 2:
        return inner_values
    output_cast = 2 * shape.query * adapters(shape, setup, "o_proj")
    return inner_values + output_cast


def saved_feed_forward(shape: Shape, setup: Setup) -> float:
    """Bytes per token: gate, activation, up and their product, which only a trained or adapted down
    projection keeps."""
    if shape.experts:
        return layer_kinds.saved_rows(shape, setup)
    products = adapters(shape, setup, "down_proj") if setup.has_lora else 1
    tensors = 3 + products
    return tensors * setup.compute_bytes * shape.intermediate


def saved_per_token(shape: Shape, setup: Setup) -> float:
    """Bytes per token that one layer saves for its backward pass."""
    return (
        saved_norms(shape, setup)
        + saved_head_norms(shape, setup)
        + saved_attention(shape, setup)
        + saved_feed_forward(shape, setup)
        + saved_adapters(shape, setup)
    )


def not_yet_saved(shape: Shape, setup: Setup) -> float:
    """Bytes that a layer saves only after its attention has run: at least the feed-forward part and
    half of the norms."""
    norms = shape.norms / 2 * kept_norm(shape, setup)
    per_token = saved_feed_forward(shape, setup) + norms
    return per_token * setup.tokens


def checkpoint(shape: Shape, setup: Setup) -> float:
    """Bytes of one layer's input, which is saved instead of its activations."""
    return setup.weight_bytes * shape.hidden * setup.tokens


def autocast_parameters(shape: Shape) -> int:
    """Parameters of one layer's matrices that autocast narrows: all but experts."""
    return shape.layer_matrices - shape.experts * shape.expert_matrices


def weight_casts(shape: Shape, setup: Setup) -> float:
    """bfloat16 copies of one layer's float32 matrices and adapters that autograd keeps under
    autocast, and experts as adapters change them."""
    matrices = 2 * autocast_parameters(shape) if setup.precision == "mixed" else 0
    adapter = shape.adapter_parameters(setup.lora_rank, setup.lora_targets)
    factors = adapter / shape.layers
    narrow_factors = 2 * factors if setup.compute_bytes == 2 else 0
    changed_experts = layer_kinds.effective_weights(shape, setup)
    return matrices + narrow_factors + changed_experts


def cast_cache(shape: Shape, setup: Setup) -> float:
    """Autocast's cache of the casts of all trained float32 matrices, dropped when the forward pass
    ends."""
    if setup.has_lora or setup.precision != "mixed":
        return 0
    return 2 * autocast_parameters(shape) * shape.layers


def embeddings(shape: Shape, setup: Setup) -> float:
    """The embeddings before they are multiplied by a constant: PEFT's hook, which makes their
    output need a gradient, keeps them."""
    return checkpoint(shape, setup) if shape.scaled_branches and setup.has_lora else 0


def saved_activations(shape: Shape, setup: Setup) -> float:
    """All layers' saved activations after a forward pass."""
    before_layers = embeddings(shape, setup)
    if setup.checkpointing:
        return before_layers + shape.layers * checkpoint(shape, setup)
    saved = saved_per_token(shape, setup) * setup.tokens
    layer = saved + weight_casts(shape, setup)
    return before_layers + shape.layers * layer


def forward_transient(shape: Shape, setup: Setup) -> float:
    """The largest temporaries of one layer's forward pass, beside what it saves in the end.

    A checkpointed layer saves nothing; with scores or experts its temporaries are those of a pass
    without gradients.
    """
    score = layer_kinds.score_bytes(shape, setup.precision)
    scores = layer_kinds.scores(shape, setup)
    if setup.checkpointing and (shape.eager or shape.experts):
        changed_experts = layer_kinds.effective_weights(shape, setup)
        without_gradients = no_grad_transient(shape, setup) + changed_experts
        if shape.experts:
            return without_gradients
        weights = score.kept_mask * scores
        at_gate = feed_forward_transient(shape, setup) + weights
        return max(at_gate, without_gradients)
    # At the scores the layer has not yet saved its feed-forward part, so that room is still free.
    transient_scores = (score.forward - score.saved_scores) * scores
    at_scores = transient_scores - not_yet_saved(shape, setup)
    return max(at_scores, feed_forward_transient(shape, setup))


def feed_forward_transient(shape: Shape, setup: Setup) -> float:
    """Transient bytes around the gated product, or of the experts' weighted rows.

    Full training: gate, up and their product. LoRA adds a float32 copy of the product for its
    adapter; a checkpointed layer has two residual streams beside what a pass without gradients
    holds.
    """
    if shape.experts:
        rows = layer_kinds.forward_transient(shape, setup) + 8 * shape.hidden
        return rows * setup.tokens
    wide = setup.compute_bytes * feed_forward_width(shape)
    if not setup.has_lora:
        stream_bytes = 4 if setup.weight_bytes == 2 else 6
        per_token: float = 3 * wide + stream_bytes * shape.hidden
    elif setup.checkpointing:
        streams = 2 * setup.weight_bytes * shape.hidden
        per_token = streams + held_feed_forward(shape, setup)
    elif not is_gate_adapted(shape, setup):
        per_token = 2 * wide + 4 * shape.hidden
    elif setup.precision == "float32":
        per_token = wide
    else:
        stream_bytes = 14 if setup.precision == "bfloat16" else 10
        # The norm of the branch's output has not kept its float32 input yet.
        stream_bytes -= 4 if shape.norms == 4 else 0
        per_token = 3 * wide + stream_bytes * shape.hidden
    return per_token * setup.tokens


def held_feed_forward(shape: Shape, setup: Setup) -> float:
    """Bytes per token: the most that a feed-forward part holds at once when nothing is saved.

    Without adapters gate, activation or up, and their product; one fused gate_up matrix writes
    twice the width at once.
    """
    tensors = 4 if shape.fused_gate else 3
    product = tensors * setup.compute_bytes * shape.intermediate
    if not setup.has_lora:
        return product
    by_gate = held_by_gate_adapters(shape, setup)
    by_down = held_by_down_adapters(shape, setup)
    return max(product, by_gate, by_down)


def held_by_gate_adapters(shape: Shape, setup: Setup) -> float:
    """Bytes per token: an adapter's sum on gate or up: its map's output, the adapter's own and that
    scaled, for up beside the activation; and a bfloat16 input once more in the adapter's float32.
    """
    if not adapters(shape, setup, "gate_proj", "up_proj", "gate_up_proj"):
        return 0
    # A fused matrix writes gate and up: each of the three outputs is twice as wide.
    unfused_outputs = 4 if adapters(shape, setup, "up_proj") else 3
    outputs = 6 if shape.fused_gate else unfused_outputs
    summands = outputs * setup.compute_bytes * shape.intermediate
    wide_input = 4 * shape.hidden if setup.precision == "bfloat16" else 0
    return summands + wide_input


def held_by_down_adapters(shape: Shape, setup: Setup) -> float:
    """Bytes per token: an adapter on down has the product in float32 and, for its first map, cast
    back beside the base map's output; then that output, the adapter's own and that scaled. A fused
    matrix' output is held by its halves."""
    if not adapters(shape, setup, "down_proj"):
        return 0
    tensors = 3 if shape.fused_gate else 1
    product = tensors * setup.compute_bytes * shape.intermediate
    if setup.precision == "float32":
        return product + 12 * shape.hidden
    # First the product in float32 (4) and cast back (2) beside the base map's output; then three
    # outputs are added.
    at_first_map = 6 * shape.intermediate + 2 * shape.hidden
    at_sum = 4 * shape.intermediate + 6 * shape.hidden
    return product + max(at_first_map, at_sum)


def no_grad_transient(shape: Shape, setup: Setup) -> float:
    """The largest temporaries of one layer when nothing is saved: the reference's pass."""
    score = layer_kinds.score_bytes(shape, setup.precision)
    scores = layer_kinds.scores(shape, setup)
    stream_bytes = 16
    if setup.weight_bytes == 2:
        stream_bytes = 8 if shape.experts else 11
    wide = layer_kinds.scoring_transient(shape, setup) if shape.experts else 6 * shape.intermediate
    per_token = wide + stream_bytes * shape.hidden
    at_feed_forward = per_token * setup.tokens + score.kept_mask * scores
    attention_states = setup.compute_bytes * 4 * shape.query
    streams = 2 * setup.weight_bytes * shape.hidden
    states = (attention_states + streams) * setup.tokens
    at_scores = score.scoring * scores + states
    return max(at_feed_forward, at_scores)


def backward_transient(shape: Shape, setup: Setup) -> float:
    """The largest temporaries of one layer's backward pass, beside what it has saved."""
    score = layer_kinds.score_bytes(shape, setup.precision)
    scores = layer_kinds.scores(shape, setup)
    transient_scores = (score.backward - score.saved_scores) * scores
    at_scores = transient_scores - not_yet_saved(shape, setup)
    return max(at_scores, feed_forward_backward(shape, setup))


def feed_forward_backward(shape: Shape, setup: Setup) -> float:
    """Transient bytes of the backward pass at the product of gate and up projections, or of the
    experts' weighted rows.

    LoRA's adapter has a float32 copy of the product where there is autocast: in a recomputed layer
    beside its gradient.
    """
    if shape.experts:
        per_token = layer_kinds.backward_transient(shape, setup) + 4 * shape.hidden
        rows = per_token * setup.tokens
        # Gate and up projections are twice as wide; where gradients are added up, those before are
        # gone by then.
        down = first_gradient(shape, setup)
        fresh = not (setup.is_accumulating or setup.is_partitioned)
        gate_up = 2 * down if fresh else down
        adapted_experts = layer_kinds.effective_gradient(shape, setup)
        at_gate = layer_kinds.gate_backward(shape, setup) * setup.tokens
        return max(rows - down, at_gate, adapted_experts, gate_up)
    wide = setup.compute_bytes * feed_forward_width(shape)
    if not setup.has_lora or setup.precision == "float32":
        # A fused matrix takes its input's gradient whole while that of the down projection's
        # adapter is added.
        has_whole_gradient = setup.has_lora and shape.fused_gate and setup.checkpointing
        whole_gradient = 4 * shape.hidden if has_whole_gradient else 0
        bytes_per_token = 2 * wide + whole_gradient
    elif not is_gate_adapted(shape, setup):
        # A checkpointed layer's gradient of the residual stream is counted with what is recomputed.
        stream = 0 if setup.checkpointing else setup.weight_bytes * shape.hidden
        bytes_per_token = 3 * wide + stream
    elif setup.checkpointing:
        bytes_per_token = 3 * wide + recomputed_stream_bytes(shape, setup) * shape.hidden
    else:
        bytes_per_token = 2 * wide + 2 * shape.hidden
    return bytes_per_token * setup.tokens


def recomputed_stream_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes per element of the residual streams beside the gated product of a recomputed layer."""
    # One more gradient of a residual stream: of a wide norm, or before a branch's constant.
    if setup.weight_bytes != 2 or shape.wide_norms or shape.scaled_branches:
        return 10
    return 6 if shape.norms == 4 else 8


def first_gradient(shape: Shape, setup: Setup) -> float:
    """The first matrices whose gradients a layer's backward pass makes, its down projections."""
    if setup.has_lora:
        return 0
    copies = max(1, shape.experts)
    return copies * shape.hidden * shape.intermediate * setup.weight_bytes


def layer_backward(shape: Shape, setup: Setup) -> float:
    """One layer recomputed with all it saves, its casts, and its backward temporaries."""
    saved = saved_per_token(shape, setup) * setup.tokens
    saved_and_casts = saved + weight_casts(shape, setup)
    keeps_incoming = setup.checkpointing and setup.weight_bytes == 2
    incoming = checkpoint(shape, setup) if keeps_incoming else 0
    return saved_and_casts + backward_transient(shape, setup) + incoming


TILE_TOKENS = 4096
TILE_WORDS = 32_768


def tile(shape: Shape, setup: Setup) -> float:
    """One tile of logits, and under autocast the tile's slices of weights and hidden states in
    bfloat16."""
    rows = min(setup.scored_tokens, TILE_TOKENS)
    # Counted as a whole tile of words, also for a vocabulary that is smaller than one.
    logits = rows * TILE_WORDS * setup.compute_bytes
    if setup.precision != "mixed":
        return logits
    slices = min(TILE_WORDS, shape.vocab) + rows
    return logits + slices * shape.hidden * 2


def packed_hidden(shape: Shape, setup: Setup) -> float:
    """The final norm's saved tensors for all tokens, the packed hidden states of scored tokens, and
    their statistics.

    The norm keeps float32 input and narrow output; 40 bytes per scored token are the running sums
    and indices.
    """
    # The float32 input takes 4 bytes; a norm whose weight is trained keeps its output, too.
    bytes_of_trained_norm = {"bfloat16": 6, "mixed": 8, "float32": 8}
    norm_bytes = 4 if setup.has_lora else bytes_of_trained_norm[setup.precision]
    bytes_per_scored_token = shape.hidden * setup.weight_bytes + 40
    packed_states = setup.scored_tokens * bytes_per_scored_token
    norm = norm_bytes * shape.hidden * setup.tokens
    return packed_states + norm


def forward_peak(shape: Shape, setup: Setup) -> float:
    """Packed hidden states and one tile."""
    return packed_hidden(shape, setup) + tile(shape, setup)


def backward_peak(shape: Shape, setup: Setup) -> float:
    """The forward's, with float32 gradients of hidden states and (full training) of the head, then
    their casts.

    Under autocast the next slice of the head is cast while the last one is still held.
    """
    # The kernel sums gradients in float32; narrow weights need them cast once more, in 2 bytes.
    wide = 4 if setup.weight_bytes == 4 else 6
    gradient = 0 if setup.has_lora else shape.head * wide
    hidden_gradient = setup.scored_tokens * shape.hidden * wide
    second_slice = 0
    if setup.precision == "mixed":
        words_after_first = max(0, shape.vocab - TILE_WORDS)
        second_slice_words = min(TILE_WORDS, words_after_first)
        second_slice = second_slice_words * shape.hidden * 2
    return forward_peak(shape, setup) + hidden_gradient + gradient + second_slice
