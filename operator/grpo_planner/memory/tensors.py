"""The trained tensors one by one, in the order in which a model registers them.

Most terms need totals only. DeepSpeed's host buffers don't: groups and partitions end at tensors, and pinned buffers
are rounded up one by one. Nor does what ZeRO-3 keeps whole. Source: transformers 5.23's decoders and Trainer (weight
decay makes two parameter groups), PEFT 0.19's LoRA layers.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from ..model.shapes import ALL_LINEAR, Linear, Shape

PERSISTENCE = 10
"""ZeRO-3 keeps a parameter whole up to this many times the hidden size (transformers' `auto` for
stage3_param_persistence_threshold)."""


@lru_cache(maxsize=32)
def trained_matrices(shape: Shape, lora_rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> tuple[int, ...]:
    """Elements of each trained matrix: an adapter's factors of each linear map, or embedding, layers and head.

    What a declared size has beyond the shape's own tensors counts as one matrix more per layer.
    """
    if lora_rank:
        layers = shape.adapted_by_layer(targets)
        return tuple(lora_rank * width for layer in layers for width in _factor_widths(layer))
    beyond = (shape.parameters - shape.counted) // shape.layers
    layer = _layer(shape) + ((beyond,) if beyond > 0 else ())
    return (shape.head, *layer * shape.layers) + (() if shape.tied else (shape.head,))


def _factor_widths(layer: tuple[Linear, ...]) -> list[int]:
    """Elements per rank of each factor of a layer's adapters, the inner one first.

    All experts are one tensor, gate and up together, and so are their factors (PEFT's ParamWrapper).
    """
    copies: Counter[tuple[str, int, int]] = Counter()
    for linear in layer:
        module = "experts" if ".experts." in linear.name else linear.name
        copies[module, linear.inputs, linear.outputs] += linear.copies
    return [count * width for (_, *widths), count in copies.items() for width in widths]


def _layer(shape: Shape) -> tuple[int, ...]:
    """Matrices of one layer. All experts of a layer are two tensors beside their router."""
    if shape.experts:
        query = output = shape.hidden * shape.query
        key = value = shape.hidden * shape.key_value
        router = shape.experts * shape.hidden
        down = shape.experts * shape.hidden * shape.intermediate
        gate_up = 2 * down
        return query, key, value, output, router, gate_up, down
    return tuple(linear.inputs * linear.outputs for linear in shape.linears for _ in range(linear.copies))


def trained_vectors(shape: Shape, lora_rank: int) -> int:
    """Elements of all norms and biases together: the parameter group without weight decay. An adapter has none."""
    return 0 if lora_rank else shape.layers * shape.layer_vectors + shape.hidden


@lru_cache(maxsize=64)
def persistent(shape: Shape, lora_rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> int:
    """Elements of all parameters, trained or not, that ZeRO-3 keeps whole between uses.

    Each of at most PERSISTENCE * hidden; for all together DeepSpeed has a limit that is never reached
    (mark_persistent_parameters, stage3_model_persistence_threshold). Norms, most biases, the router of few experts, and
    an adapter's smaller factors.
    """
    matrices = trained_matrices(shape, 0)
    if lora_rank:
        matrices += trained_matrices(shape, lora_rank, targets)
    sinks = (shape.layers * shape.sinks, shape.heads)
    router_biases = (shape.layers * shape.expert_bias, shape.experts)
    tensors = [*shape.vectors, sinks, router_biases, *((1, elements) for elements in matrices)]
    limit = PERSISTENCE * shape.hidden
    return sum(count * elements for count, elements in tensors if elements <= limit)


def largest_trained(shape: Shape, lora_rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> int:
    """Elements of the largest trained tensor."""
    return max(trained_matrices(shape, lora_rank, targets))


def largest_in_layer(shape: Shape) -> int:
    """Elements of the largest tensor of a layer."""
    return max(_layer(shape))


@lru_cache(maxsize=512)
def fullest_rank(
    matrices: tuple[int, ...], weight_bytes: int, world: int, size: Callable[[int], int], least: int
) -> int:
    """Bytes of those matrices of `least` elements or more that ZeRO-2 holds on the rank that has most.

    A tensor that lies across partitions is whole on every rank that has a piece of it. The results are cached: the
    function walks through all tensors, and many methods and fixes ask for the same ones.

    Args:
        matrices: elements of each, in their order.
        weight_bytes: bytes of an element.
        world: ranks.
        size: returns the bytes of the buffer that holds a given number of bytes.
        least: elements of the smallest that counts.
    """
    own = -(-sum(matrices) // world)
    ranks = [0] * world
    end = 0
    for elements in matrices:
        start, end = end, end + elements
        if elements >= least:
            buffer = size(weight_bytes * elements)
            for rank in range(start // own, (end - 1) // own + 1):
                ranks[rank] += buffer
    return max(ranks)
