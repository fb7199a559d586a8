"""Terms of the memory model for generation with transformers' `generate`: prefill, cache and the
last decoding step.

Sources: transformers 5.23 (DynamicCache, sliding-window layers), TRL 1.16
(unwrap_model_for_generation gathers under ZeRO-3). All results are bytes on one GPU.
"""

from ..model.shapes import Shape
from . import layer_kinds
from .activations import cast_cache, held_feed_forward
from .setup import Setup
from .states import gathered_parameters, live_parameters, persistent_parameters


def gathered_policy(shape: Shape, setup: Setup) -> float:
    """What ZeRO-3 adds to its own partition to generate: the whole model, or without gather the
    live modules.

    Whole, not the other ranks' part of it: DeepSpeed gathers into new buffers and keeps its
    partition (`ds_tensor`). But for what is whole already.
    """
    if setup.zero != 3:
        return 0
    if not setup.gather:
        return live_parameters(shape, setup)
    return setup.weight_bytes * gathered_parameters(shape, setup) - persistent_parameters(
        shape, setup
    )


def cached_positions(shape: Shape, tokens: int) -> int:
    """Cached positions summed over layers; layers with a window keep at most that many tokens."""
    if not shape.sliding_window:
        return shape.layers * tokens
    windowed = shape.layers - shape.full_attention_layers
    return shape.full_attention_layers * tokens + windowed * min(tokens, shape.sliding_window)


def cache(shape: Shape, setup: Setup, tokens: int) -> float:
    """Keys and values of `tokens` positions: 2 * positions * key width * bytes * sequences.

    The cache has the dtype of the weights: float32 under autocast, where only products are narrow.
    """
    return (
        2
        * cached_positions(shape, tokens)
        * shape.key_value
        * setup.weight_bytes
        * setup.generation_batch
    )


def head_cast(shape: Shape, setup: Setup) -> float:
    """The head's bfloat16 copy under autocast."""
    return 2 * shape.head if setup.precision == "mixed" else 0


def logits(shape: Shape, setup: Setup) -> float:
    """float32 scores of the next token and their softmax, and under autocast the head's cast."""
    return setup.generation_batch * shape.vocab * 8 + head_cast(shape, setup)


def prefill_layer(shape: Shape, setup: Setup) -> float:
    """One layer's temporaries over all prompts, at the scores or at the feed-forward part, and the
    mask."""
    score = layer_kinds.score_bytes(shape, setup.precision)
    count = shape.heads * setup.prompt
    if shape.experts:
        streams = 8 if setup.weight_bytes == 2 else 16
        wide = layer_kinds.scoring_transient(shape, setup) + streams * shape.hidden
    else:
        wide = 4 * setup.weight_bytes * shape.hidden + held_feed_forward(shape, setup)
    masks = layer_kinds.mask_bytes(shape, setup) * setup.prompt
    at_feed_forward = wide + score.kept_mask * count
    at_scores = score.scoring * count + prefill_attention(shape, setup)
    per_token = max(at_feed_forward, at_scores) + masks
    return setup.generation_batch * setup.prompt * per_token + layer_kinds.effective_weights(
        shape, setup
    )


def prefill_attention(shape: Shape, setup: Setup) -> float:
    """Per token of the prompts: queries, keys and values of all heads and attention's output,
    beside residual streams.

    With a kernel the additive mask's row as well; and under autocast the float32 states, rotated
    and repeated, of which the kernel takes narrow copies.
    """
    states = 4 * setup.compute_bytes * shape.query
    if shape.eager:
        return states + 2 * setup.weight_bytes * shape.hidden
    wide = 12 * shape.query if setup.precision == "mixed" else 0
    return (
        states + wide + 3 * setup.weight_bytes * shape.hidden + setup.compute_bytes * setup.prompt
    )


def prefill(shape: Shape, setup: Setup) -> float:
    """The cache of all prompts beside one layer's temporaries, or beside the logits, of which the
    first are there while the last layer's output still is."""
    states = setup.weight_bytes * shape.hidden * setup.generation_batch * setup.prompt
    first_logits = setup.compute_bytes * setup.generation_batch * shape.vocab
    first = states + head_cast(shape, setup) + first_logits
    largest = max(prefill_layer(shape, setup), first, logits(shape, setup))
    return cache(shape, setup, setup.prompt) + largest


def decode(shape: Shape, setup: Setup) -> float:
    """The full cache, one layer's keys once more (the cache grows by concatenation), and the
    logits; eager scores, and experts as an adapter changes them."""
    # DynamicCache grows by concatenation: the old and the new keys of one layer are there at the
    # same time.
    longer = shape.key_value * setup.weight_bytes * setup.generation_batch * setup.length
    score = layer_kinds.score_bytes(shape, setup.precision).scoring
    scores = score * shape.heads * setup.length * setup.generation_batch
    layer = max(scores, layer_kinds.effective_weights(shape, setup))
    largest = max(logits(shape, setup), layer)
    return cache(shape, setup, setup.length) + longer + largest


def peak(shape: Shape, setup: Setup) -> float:
    """The higher of prefill and decoding, with autocast's cache; beside gathered_policy."""
    return cast_cache(shape, setup) + max(prefill(shape, setup), decode(shape, setup))
