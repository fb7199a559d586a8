"""A coarse model of the time that a vLLM engine takes: one decoded token, a sync of weights, a wake.

Decoding with CUDA graphs is bound by what it reads or by what it computes, where transformers' generate waits for
kernels to be launched. No GPU has confirmed a number here: all constants are assumed from what others report, and
docs/generation.md lists them. All results are seconds.
"""

from functools import lru_cache

from ..hardware.products import Product
from ..memory import engine as terms
from ..memory.setup import Setup
from ..model.shapes import Shape

READ_SHARE = 0.7
"""Share of the memory bandwidth that decoding reaches (assumed; others report 0.77 for 8 B at one sequence on an A100,
vLLM 0.23)."""
COMPUTE_SHARE = 0.4
"""Share of the peak FLOP/s that decoding of many sequences reaches (assumed, as of other large products)."""
TOKEN_SECONDS = 2e-3
"""Scheduling and sampling of one token of all sequences (assumed)."""
EAGER_LAYER_SECONDS = 0.2e-3
"""Launch cost of one layer's kernels without CUDA graphs (assumed)."""
REDUCE_SECONDS = 20e-6
"""Latency of one sum over the GPUs of an engine, of which a layer has two (assumed)."""
TENSOR_SECONDS = 0.6e-3
"""Sending one tensor, whatever its size: 0.18 s for the 310 tensors of 0.6 B on an H100 (trl#5892)."""
WAKE_SECONDS = 0.5
"""Going to sleep and waking once (assumed; vLLM's own measurements of waking are 0.1 to 0.4 s)."""
SENT_SHARE = 0.7
"""Share of a link's bandwidth that sending reaches (assumed, as of collectives)."""
HASHED_SHARE = 0.5
"""Share of the memory bandwidth that a hash reaches (assumed)."""
GIGA = 1e9


def token_seconds(shape: Shape, setup: Setup, hardware: Product) -> float:
    """One token of all sequences of an engine: `max(read, compute)` and what doesn't depend on either.

    Read are the weights and the caches, which hold the prompt and on average half of the completion.
    """
    engine, at_once = terms.of(setup), terms.sequences(setup)
    cached = at_once * (setup.prompt + setup.completion / 2) * terms.token_bytes(shape, setup)
    read = (terms.weights(shape, setup) + cached) / (hardware.bandwidth * GIGA * READ_SHARE)
    flops = 2 * shape.parameters * at_once / engine.tensor_parallel
    launched = 0.0 if engine.graphs else shape.layers * EAGER_LAYER_SECONDS
    reduced = 2 * shape.layers * REDUCE_SECONDS if engine.tensor_parallel > 1 else 0.0
    return max(read, flops / (hardware.teraflops * 1e12 * COMPUTE_SHARE), launched) + reduced + TOKEN_SECONDS


def sync_seconds(shape: Shape, setup: Setup, hardware: Product, link: float) -> float:
    """One sync: every tensor gathered under ZeRO-3, sent or copied, and proven; and the wake before it.

    Args:
        shape: the policy's shape.
        setup: the run's settings.
        hardware: the trainer's GPU.
        link: bytes per second between ranks.
    """
    engine = terms.of(setup)
    whole, memory = shape.parameters * setup.compute_bytes, hardware.bandwidth * GIGA
    gathered = 0.0
    if setup.zero == 3:
        gathered = shape.parameters * setup.weight_bytes * (setup.world - 1) / setup.world / link
    if engine.kind == "Servers":
        network = (hardware.node_network or hardware.network) * GIGA * SENT_SHARE
        sent = engine.replicas * whole / network
    else:
        sent = 2 * whole / memory
    proven = 2 * whole / (memory * HASHED_SHARE)
    return gathered + sent + proven + tensors(shape) * TENSOR_SECONDS + (WAKE_SECONDS if engine.sleeps else 0.0)


@lru_cache(maxsize=64)
def tensors(shape: Shape) -> int:
    """Parameters of the model by count: matrices, and norms and biases of each layer, and the ends."""
    matrices = shape.layers * sum(linear.copies for linear in shape.linears)
    return matrices + sum(count for count, _ in shape.vectors) + (1 if shape.tied else 2)
