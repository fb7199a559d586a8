"""Terms of the memory model for generation with transformers' `generate`: prefill, cache and the
last decoding step.

Sources: transformers 5.23 (DynamicCache, sliding-window layers, logits_process.py), and TRL 1.16
(unwrap_model_for_generation gathers under ZeRO-3). What a sort takes is from torch 2.13
(SortStable.cu and cub.cu), and no GPU has confirmed it. All results are bytes on one GPU.
"""

from ..model.shapes import Shape
from . import layer_kinds
from .activations import cast_cache, held_feed_forward
from .setup import Setup
from .states import gathered_parameters, live_parameters, persistent_parameters

SORTED_ROW_BY_ROW = 128
"""Rows from which torch sorts each by itself."""


def gathered_policy(shape: Shape, setup: Setup) -> float:
    """Bytes that ZeRO-3 adds to its own partition to generate: the whole model, or without gather
    the live modules.

    DeepSpeed gathers into new buffers and keeps its partition (`ds_tensor`), so the whole model
    counts, less the parameters that every rank keeps whole.
    """
    if setup.zero != 3:
        return 0
    if not setup.gather:
        return live_parameters(shape, setup)
    whole = setup.weight_bytes * gathered_parameters(shape, setup)
    already_whole = persistent_parameters(shape, setup)
    return whole - already_whole


def cached_positions(shape: Shape, tokens: int) -> int:
    """Cached positions summed over layers; layers with a window keep at most that many tokens."""
    if not shape.sliding_window:
        return shape.layers * tokens
    window_layers = shape.layers - shape.full_attention_layers
    in_full_layers = shape.full_attention_layers * tokens
    in_window_layers = window_layers * min(tokens, shape.sliding_window)
    return in_full_layers + in_window_layers


def cache(shape: Shape, setup: Setup, tokens: int) -> float:
    """Keys and values of `tokens` positions: 2 * positions * key width * bytes * sequences.

    The cache has the dtype of the weights: float32 under autocast, where only products are narrow.
    """
    position_bytes = 2 * shape.key_value * setup.weight_bytes
    positions = cached_positions(shape, tokens)
    return positions * position_bytes * setup.generation_batch


def head_cast(shape: Shape, setup: Setup) -> float:
    """The head's bfloat16 copy under autocast."""
    return 2 * shape.head if setup.precision == "mixed" else 0


def logits(shape: Shape, setup: Setup) -> float:
    """The next token's logits as the head writes them, in float32, and divided by the temperature;
    their softmax and what multinomial draws from that, or sorted with their int64 places beside
    what the sort takes; under autocast the head's cast."""
    rows = setup.generation_batch
    drawn = 2 * 4 * rows
    if setup.sorts_words:
        drawn = (4 + 8) * rows + sort_bytes(rows)
    per_word = (setup.compute_bytes + 2 * 4) * rows + drawn
    return shape.vocab * per_word + head_cast(shape, setup)


def sort_bytes(rows: int) -> int:
    """Bytes per column that a GPU's sort of float32 rows takes beside its result.

    It has indices to sort along, and cub's copy of keys and indices. A few rows are sorted as one,
    with indices and rows twice, and the sorted keys. The bytes never fall with more rows, on which
    the search relies.
    """
    cub_copy = 4 + 8
    row_by_row = (8 + cub_copy) * rows
    as_one = (2 * 8 + 4 + cub_copy) * min(rows, SORTED_ROW_BY_ROW - 1)
    return row_by_row if rows == 1 else max(row_by_row, as_one)


def prefill_layer(shape: Shape, setup: Setup) -> float:
    """One layer's temporaries over all prompts, at the scores or at the feed-forward part, and the
    mask."""
    score = layer_kinds.score_bytes(shape, setup.precision)
    scores = shape.heads * setup.prompt
    if shape.experts:
        stream_bytes = 8 if setup.weight_bytes == 2 else 16
        wide = layer_kinds.scoring_transient(shape, setup) + stream_bytes * shape.hidden
    else:
        streams = 4 * setup.weight_bytes * shape.hidden
        wide = streams + held_feed_forward(shape, setup)
    masks = layer_kinds.mask_bytes(shape, setup) * setup.prompt
    at_feed_forward = wide + score.kept_mask * scores
    at_scores = score.scoring * scores + prefill_attention(shape, setup)
    per_token = max(at_feed_forward, at_scores) + masks
    temporaries = setup.generation_batch * setup.prompt * per_token
    return temporaries + layer_kinds.effective_weights(shape, setup)


def prefill_attention(shape: Shape, setup: Setup) -> float:
    """Bytes per token of the prompts: queries, keys and values of all heads and attention's output,
    beside residual streams.

    With a kernel the additive mask's row as well; and under autocast the float32 states, rotated
    and repeated, of which the kernel takes narrow copies.
    """
    states = 4 * setup.compute_bytes * shape.query
    stream = setup.weight_bytes * shape.hidden
    if shape.eager:
        return states + 2 * stream
    wide_states = 12 * shape.query if setup.precision == "mixed" else 0
    mask_row = setup.compute_bytes * setup.prompt
    return states + wide_states + 3 * stream + mask_row


def prefill(shape: Shape, setup: Setup) -> float:
    """The cache of all prompts beside one layer's temporaries, or beside the logits, of which the
    first are there while the last layer's output still is."""
    states = setup.weight_bytes * shape.hidden * setup.generation_batch * setup.prompt
    first_logits = setup.compute_bytes * setup.generation_batch * shape.vocab
    at_first_logits = states + head_cast(shape, setup) + first_logits
    at_layer = prefill_layer(shape, setup)
    largest = max(at_layer, at_first_logits, logits(shape, setup))
    return cache(shape, setup, setup.prompt) + largest


def decode(shape: Shape, setup: Setup) -> float:
    """The full cache, one layer's keys once more (the cache grows by concatenation), and the
    logits; eager scores, and experts as an adapter changes them."""
    # DynamicCache grows by concatenation: the old and the new keys of one layer are there at the
    # same time.
    longer = shape.key_value * setup.weight_bytes * setup.generation_batch * setup.length
    score = layer_kinds.score_bytes(shape, setup.precision).scoring
    scores = score * shape.heads * setup.length * setup.generation_batch
    changed_experts = layer_kinds.effective_weights(shape, setup)
    largest = max(logits(shape, setup), scores, changed_experts)
    return cache(shape, setup, setup.length) + longer + largest


def peak(shape: Shape, setup: Setup) -> float:
    """The higher of prefill and decoding, with autocast's cache; beside gathered_policy."""
    highest = max(prefill(shape, setup), decode(shape, setup))
    return cast_cache(shape, setup) + highest
