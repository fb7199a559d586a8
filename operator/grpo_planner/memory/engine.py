"""Terms of the memory model for a vLLM engine: its weights, its cache, what it works with, and what
a sync adds.

Sources:

- vLLM 0.30, vocab_parallel_embedding.py: the vocabulary is padded to 64
- vLLM 0.30, QKVParallelLinear: key heads are repeated where there are fewer than GPUs
- vLLM 0.30, cumem.py: sleep level 2 gives weights and cache back and keeps the graphs
- the trainer's generation/merged_weights.py: one tensor at a time is gathered, merged and cast

No GPU has confirmed any of it: GRAPHS_PER_LAYER and WORK_COPIES are assumed. All results are bytes
on one GPU.
"""

from bisect import bisect_right
from functools import lru_cache
from math import ceil, sqrt

from grpo_api.text.units import MIB

from ..model.shapes import Shape
from .setup import Engine, Setup

VOCABULARY_PADDING = 64
"""Rows of embedding and head are a multiple of it."""
GRAPHS_PER_LAYER = 24 * MIB
"""CUDA graphs of one layer (assumed). vLLM logs 0.21 GiB for 16 layers with 35 batch sizes
(vllm#11349), and warns of 1 to 3 GiB for large models."""
COMMUNICATOR = 400 * MIB
"""Buffers of tensor parallelism's own NCCL communicator (assumed, as in phases.py)."""
WORK_COPIES = 2
"""Tensors of the widest kind that one pass has at a time, beside the residual stream (assumed)."""
SCORE_BYTES = 12
"""Per score of the next token: itself, its softmax and its logarithm in float32 (assumed). topP
sorts nothing here: FlashInfer's kernel and vLLM's own do without (topk_topp_sampler.py)."""
MERGED_BYTES = 14
"""Per element of a weight with its adapter while both are added: the float32 weight, the adapter's
product in two bytes and in four, and their sum (the trainer's merged_weights.py)."""


def engine_of(setup: Setup) -> Engine:
    """The setup's engine, which there must be."""
    assert setup.engine is not None, "nobody asks without an engine"
    return setup.engine


def sequences(setup: Setup) -> int:
    """Completions that one engine samples at a time: of the processes that share it, or of all that
    replicas share."""
    engine = engine_of(setup)
    if engine.kind == "Colocated":
        completions = setup.generation_batch * engine.tensor_parallel
    else:
        completions = replica_completions(setup)
    limit = engine.most_sequences or completions
    return min(completions, limit)


def replica_completions(setup: Setup) -> int:
    """Completions of one generation that fall to one replica."""
    completions = setup.world * setup.generation_batch
    replicas = max(1, engine_of(setup).replicas)
    return ceil(completions / replicas)


def weights(shape: Shape, setup: Setup) -> float:
    """Weights in the dtype that the policy computes in.

    `c * ((matrices + padded embeddings + repeated key heads) / t + norms and biases)`, t GPUs for
    tensor parallelism.
    """
    gpus = engine_of(setup).tensor_parallel
    shared, whole = _elements(shape, gpus)
    return setup.compute_bytes * (shared / gpus + whole)


@lru_cache(maxsize=64)
def _elements(shape: Shape, gpus: int) -> tuple[int, int]:
    """Elements of an engine's weights that are shared out among its GPUs, and those that each of
    them has."""
    embeddings = 1 if shape.tied else 2
    blocks_of_words = ceil(shape.vocab / VOCABULARY_PADDING)
    padded_vocab = blocks_of_words * VOCABULARY_PADDING
    padded_embeddings = embeddings * padded_vocab * shape.hidden
    vectors = shape.layers * shape.layer_vectors + shape.hidden
    matrices = shape.parameters - embeddings * shape.head - vectors
    missing_heads = max(0, gpus - shape.kv_heads)
    repeated_heads = 2 * shape.layers * shape.hidden * shape.head_dim * missing_heads
    shared = matrices + padded_embeddings + repeated_heads
    return shared, vectors


def token_bytes(shape: Shape, setup: Setup) -> int:
    """Keys and values of one token in all layers: 2 * layers * heads * width * bytes.

    Heads are shared out, and repeated where there are fewer than GPUs. Layers with a window count
    as if they had none: how vLLM groups them depends on its version.
    """
    engine = engine_of(setup)
    heads = max(1, ceil(shape.kv_heads / engine.tensor_parallel))
    elements = 2 * shape.layers * heads * shape.head_dim
    element_bytes = engine.cache_bytes or setup.compute_bytes
    return elements * element_bytes


def cache(shape: Shape, setup: Setup) -> int:
    """The cache of all that is sampled at a time, as if no prompt were shared; vLLM keeps one block
    for itself."""
    return cached_blocks(setup, sequences(setup)) * block_bytes(shape, setup)


def block_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes of one block of the cache."""
    return engine_of(setup).block * token_bytes(shape, setup)


def cached_blocks(setup: Setup, completions: int) -> int:
    """Blocks of the cache for this many concurrent completions, and vLLM's own.

    At no time do completions hold more in the mean than a prompt and their mean length: of n that
    begin together, n S(t) are longer than t, and t S(t) is at most the mean (Markov). Two standard
    deviations, of which one is near the mean, make it unlikely that vLLM preempts any. One
    completion of the greatest length always fits, and no more is kept than all of them take. Of the
    prompts 95 % are at most as long as counted.
    """
    engine = engine_of(setup)
    whole = ceil(engine.length / engine.block)
    mean = ceil((setup.padded_prompt + setup.mean_completion) / engine.block)
    spread = ceil(2 * sqrt(completions) * setup.mean_completion / engine.block)
    return min(completions * whole, max(whole, completions * mean + spread)) + 1


def graphs(shape: Shape, setup: Setup) -> int:
    """Bytes that a sleeping engine keeps: CUDA graphs, and the communicator of tensor
    parallelism."""
    engine = engine_of(setup)
    cuda_graphs = shape.layers * GRAPHS_PER_LAYER if engine.graphs else 0
    communicator = COMMUNICATOR if engine.tensor_parallel > 1 else 0
    return cuda_graphs + communicator


def work(shape: Shape, setup: Setup) -> float:
    """Work space of one pass: the gated product over all its tokens beside the residual stream, or
    the scores."""
    engine = engine_of(setup)
    at_once = sequences(setup)
    # Tensor parallelism splits the gated product; every GPU has the whole residual stream.
    gated_product = WORK_COPIES * 2 * shape.intermediate / engine.tensor_parallel
    width = gated_product + 2 * shape.hidden
    # A decoding pass has one token of every completion, which may be more than `pass_tokens`.
    tokens = max(engine.pass_tokens, at_once)
    at_layer = tokens * width * setup.compute_bytes
    at_scores = at_once * shape.vocab * SCORE_BYTES
    return max(at_layer, at_scores)


def awake_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes of an engine while it is awake: its share as vLLM counts it, or the pinned share."""
    weight_bytes = weights(shape, setup)
    cache_bytes = cache(shape, setup)
    graph_bytes = graphs(shape, setup)
    needed = weight_bytes + cache_bytes + graph_bytes + work(shape, setup)
    return engine_of(setup).share or round(needed)


def cached_completions(shape: Shape, setup: Setup, share: int) -> int:
    """Number of completions whose cache fits at a time into `share` bytes of a GPU; 0 where not one
    does."""
    one_block = block_bytes(shape, setup)
    score_bytes = shape.vocab * SCORE_BYTES
    room = share - weights(shape, setup) - graphs(shape, setup) - work(shape, setup)

    def needed_bytes(completions: int) -> int:
        return cached_blocks(setup, completions) * one_block + completions * score_bytes

    most = max(0, int(room // (one_block + score_bytes)))
    # Bisection: what is needed grows with the completions.
    return bisect_right(range(1, most + 1), room, key=needed_bytes)


def resting_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes of an engine on the trainer's GPU in every phase."""
    engine = setup.engine
    if engine is None or engine.kind == "Servers":
        return 0
    return graphs(shape, setup) if engine.sleeps else awake_bytes(shape, setup)


def waking_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes that an engine takes on top while it receives weights and samples."""
    engine = engine_of(setup)
    if engine.kind == "Servers" or not engine.sleeps:
        return 0
    return awake_bytes(shape, setup) - resting_bytes(shape, setup)


def sync_bytes(shape: Shape, setup: Setup) -> float:
    """What the trainer adds to send its weights: one tensor at a time.

    It is gathered under ZeRO-3, or copied to the GPU where the base is in host memory, cast where
    the engine's dtype is another, and where it has an adapter added to that in float32. The proof's
    sums are 8 bytes for 65,536 elements: nothing beside it.
    """
    is_elsewhere = setup.zero == 3 or engine_of(setup).offloads_base
    gathered = setup.weight_bytes if is_elsewhere else 0
    cast = setup.compute_bytes if setup.compute_bytes != setup.weight_bytes else 0
    plain = shape.largest_module * (gathered + cast)
    if not setup.has_lora:
        return plain
    adapted_linears = shape.adapted_linears(setup.lora_targets)
    largest = max((linear.inputs * linear.outputs for linear in adapted_linears), default=0)
    merged = largest * (gathered + MERGED_BYTES)
    return max(plain, merged)
