"""The trained tensors one by one, in the order in which a model registers them, and which of them
ZeRO keeps whole or cuts.

Totals are enough for most terms of the memory model. DeepSpeed's buffers on the host need the
tensors: groups and partitions end at tensors, and pinned buffers are rounded up one by one. So do
a step's buffers under ZeRO-2 and what ZeRO-3 keeps whole. Source: transformers 5.23's decoders and
Trainer (weight decay makes two parameter groups), PEFT 0.21's LoRA layers.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from ..model.shapes import ALL_LINEAR, Linear, Shape

PERSISTENCE = 10
"""ZeRO-3 keeps a parameter whole up to this many times the hidden size (transformers' `auto` for
stage3_param_persistence_threshold)."""


@lru_cache(maxsize=32)
def trained_matrices(
    shape: Shape, lora_rank: int, targets: tuple[str, ...] = ALL_LINEAR
) -> tuple[int, ...]:
    """Elements of each trained matrix: an adapter's factors of each linear map, or embedding,
    layers and head.

    What a declared size has beyond the shape's own tensors counts as one matrix more per layer.
    """
    if lora_rank:
        layers = shape.adapted_linears_by_layer(targets)
        return tuple(lora_rank * width for layer in layers for width in _factor_widths(layer))
    layer = _layer(shape)
    beyond = (shape.parameters - shape.counted_parameters) // shape.layers
    if beyond > 0:
        layer = (*layer, beyond)
    output = () if shape.tied else (shape.head,)
    return (shape.head, *layer * shape.layers, *output)


def _factor_widths(layer: tuple[Linear, ...]) -> list[int]:
    """Elements per rank of each factor of a layer's adapters, the inner one first.

    All experts are one tensor, gate and up together, and so are their factors (PEFT's
    ParamWrapper).
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
    matrices: list[int] = []
    for linear in shape.linears:
        matrices += [linear.inputs * linear.outputs] * linear.copies
    return tuple(matrices)


def trained_vectors(shape: Shape, lora_rank: int) -> int:
    """Elements of all norms and biases together: the parameter group without weight decay. An
    adapter has none."""
    if lora_rank:
        return 0
    final_norm = shape.hidden
    return shape.layers * shape.layer_vectors + final_norm


@lru_cache(maxsize=64)
def persistent_elements(
    shape: Shape, lora_rank: int, targets: tuple[str, ...] = ALL_LINEAR, limit: int = 0
) -> int:
    """Elements of all parameters, trained or not, that ZeRO-3 keeps whole between uses.

    Each of at most `limit` (0: PERSISTENCE * hidden); for all together DeepSpeed has a limit that
    is never reached (mark_persistent_parameters, stage3_model_persistence_threshold). Norms, most
    biases, the router of few experts, and an adapter's smaller factors.
    """
    matrices = trained_matrices(shape, 0)
    if lora_rank:
        matrices += trained_matrices(shape, lora_rank, targets)
    sinks = (shape.layers * shape.sinks, shape.heads)
    router_biases = (shape.layers * shape.expert_bias, shape.experts)
    counted_matrices = [(1, elements) for elements in matrices]
    tensors = [*shape.vectors, sinks, router_biases, *counted_matrices]
    most = limit or PERSISTENCE * shape.hidden
    return sum(count * elements for count, elements in tensors if elements <= most)


@lru_cache(maxsize=64)
def largest_trained(shape: Shape, lora_rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> int:
    """Elements of the largest trained tensor; 0 for an adapter on modules that are not known."""
    return max(trained_matrices(shape, lora_rank, targets), default=0)


@lru_cache(maxsize=64)
def largest_in_layer(shape: Shape) -> int:
    """Elements of the largest tensor of a layer."""
    return max(_layer(shape))


@lru_cache(maxsize=512)
def fullest_rank(
    matrices: tuple[int, ...], weight_bytes: int, world: int, size: Callable[[int], int], least: int
) -> int:
    """Bytes of the matrices with `least` elements or more that ZeRO-2 holds on the rank with the
    largest share.

    A tensor that lies across partitions is whole on every rank that has a piece of it. The results
    are cached: the function walks through all tensors, and many methods and fixes ask for the same
    ones.

    `matrices`: elements of each, in their order; `size` returns the bytes of the buffer that holds
    a given number of bytes.
    """
    of_ranks = [
        sum(size(weight_bytes * tensor) for tensor, _ in pieces if tensor >= least)
        for pieces in pieces_by_rank(matrices, world)
    ]
    return max(of_ranks)


@lru_cache(maxsize=512)
def fullest_step(
    matrices: tuple[int, ...], weight_bytes: int, world: int, flat_bytes: float
) -> float:
    """Bytes that a step of ZeRO-2 holds of the matrices on the rank that has most: their gradients,
    and the larger of the flat copies, `flat_bytes`, and of one gradient's norm in float64.

    Other arguments and the cache as for `fullest_rank`.
    """
    of_ranks: list[float] = []
    for pieces in pieces_by_rank(matrices, world):
        gradients = weight_bytes * sum(tensor for tensor, _ in pieces)
        norm = 8 * max((piece for _, piece in pieces), default=0)
        of_ranks.append(gradients + max(flat_bytes, norm))
    return max(of_ranks)


@lru_cache(maxsize=64)
def pieces_by_rank(
    matrices: tuple[int, ...], world: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each rank's partition its tensors: elements of the whole tensor, and of the piece
    in the partition."""
    partition = -(-sum(matrices) // world)
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    end = 0
    for elements in matrices:
        start = end
        end += elements
        for rank in range(start // partition, (end - 1) // partition + 1):
            first = max(start, rank * partition)
            beyond = min(end, (rank + 1) * partition)
            ranks[rank].append((elements, beyond - first))
    return tuple(map(tuple, ranks))
