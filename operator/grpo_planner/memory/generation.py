"""Terms of the memory model for generation with transformers' `generate`: prefill, cache and the last decoding step.

Sources: transformers 5.23 (DynamicCache, sliding-window layers), TRL 1.16 (unwrap_model_for_generation gathers under
ZeRO-3). All results are bytes on one GPU.
"""

from ..model.shapes import Shape
from . import attention, experts
from .activations import cast_cache, gate_adapted, inner
from .setup import Setup
from .states import gathered_parameters, live_parameters


def gathered_policy(shape: Shape, setup: Setup) -> float:
    """What ZeRO-3 adds to its own partition to generate: the whole model, or without gather the live modules.

    Whole, not the other ranks' part of it: DeepSpeed gathers into new buffers and keeps its partition (`ds_tensor`).
    """
    if setup.zero != 3:
        return 0
    if not setup.gather:
        return live_parameters(shape, setup)
    return setup.weight_bytes * gathered_parameters(shape, setup)


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
    return 2 * cached_positions(shape, tokens) * shape.key_value * setup.weight_bytes * setup.generation_batch


def logits(shape: Shape, setup: Setup) -> float:
    """float32 scores of the next token and their softmax, and under autocast the head's cast."""
    cast = 2 * shape.head if setup.precision == "mixed" else 0
    return setup.generation_batch * shape.vocab * 8 + cast


def prefill_layer(shape: Shape, setup: Setup) -> float:
    """One layer's temporaries over all prompts, at the scores or at the feed-forward part, and the mask."""
    score, count = attention.score_bytes(shape, setup.precision), shape.heads * setup.prompt
    streams = 8 if setup.weight_bytes == 2 else 16
    wide = experts.scoring_transient(shape, setup) + streams * shape.hidden if shape.experts else gated(shape, setup)
    states = setup.compute_bytes * 4 * shape.query + 2 * setup.weight_bytes * shape.hidden
    masks = attention.mask_bytes(shape, setup) * setup.prompt
    per_token = max(wide + score.kept * count, score.scoring * count + states) + masks
    return setup.generation_batch * setup.prompt * per_token + experts.effective(shape, setup)


def gated(shape: Shape, setup: Setup) -> float:
    """Per token of the prompts: the gated product and four residual streams.

    The product holds gate, activation and product. An adapter's sum adds one of that width, and under autocast a share
    of its float32 copy; one fused gate_up matrix writes twice the width, which an adapter holds four times over.
    """
    adapter = setup.lora and gate_adapted(shape, setup)
    autocast_adapter = adapter and setup.compute_bytes == 2
    products = 4.75 if autocast_adapter else 4 if adapter or shape.fused else 3
    if adapter and shape.fused:
        products = 8
    streams = 8 if autocast_adapter else 4 * setup.weight_bytes
    return products * setup.compute_bytes * inner(shape) + streams * shape.hidden


def prefill(shape: Shape, setup: Setup) -> float:
    """The cache of all prompts beside one layer's temporaries, or beside the logits."""
    return cache(shape, setup, setup.prompt) + max(prefill_layer(shape, setup), logits(shape, setup))


def decode(shape: Shape, setup: Setup) -> float:
    """The full cache, one layer's keys once more (the cache grows by concatenation), and the logits; eager scores, and
    experts as an adapter changes them."""
    longer = shape.key_value * setup.weight_bytes * setup.generation_batch * setup.length
    score = attention.score_bytes(shape, setup.precision).scoring
    scores = score * shape.heads * setup.length * setup.generation_batch
    layer = max(scores, experts.effective(shape, setup))
    return cache(shape, setup, setup.length) + longer + max(logits(shape, setup), layer)


def peak(shape: Shape, setup: Setup) -> float:
    """The higher of prefill and decoding, with autocast's cache; beside gathered_policy."""
    return cast_cache(shape, setup) + max(prefill(shape, setup), decode(shape, setup))
