"""A coarse model of the time of one step, with and without a vLLM engine; it ranks candidates,
unchecked on any GPU.

Sources: FLOPs as 2 * parameters * tokens (Kaplan et al. 2020) and attention; ring collectives move
(N - 1) / N of what they share per rank (Rajbhandari et al. 2020); decoding is bound by memory or by
kernel launches. docs/memory-model.md lists the assumptions.

The speed of links is that of the product table, unless an attempt of the job has measured its own:
what the job's ranks reached is more accurate than what such machines usually have.

For a vLLM engine the model covers one decoded token, a sync of weights and a wake. Decoding with
CUDA graphs is bound by what it reads or by what it computes, while transformers' generate waits for
kernel launches. All constants are assumed from what others report, and docs/generation.md lists
them. All results are seconds.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from grpo_api.plan.learned import MeasuredLinks
from grpo_api.text.quantity import MAX_COUNT

from ..hardware.inventory import Inventory, Node
from ..hardware.products import Product
from ..memory import engine as terms
from ..memory.setup import Setup
from ..memory.states import trained_bytes, trained_parameters
from ..model.shapes import Shape

UTILISATION = 0.40
"""Share of the peak FLOP/s that large matrix products reach."""
HALF_SPEED_TOKENS = 512
"""Tokens per micro-batch at which half of UTILISATION is reached."""
MEMORY_EFFICIENCY = 0.6
"""Share of the memory bandwidth that decoding reaches."""
LAUNCH_SECONDS = 0.9e-3
"""Launch cost of one layer's kernels in one decoding step of transformers' generate."""
LINK_EFFICIENCY = 0.7
"""Share of a link's bandwidth that collectives reach."""
GATHER_SECONDS = {False: 30e-6, True: 100e-6}
"""Latency of one collective, on one node and between several."""
PCIE_GB_PER_S = 22.0
"""Between host and device."""
HOST_ADAM_GB_PER_S = 25.0
"""Memory bandwidth of DeepSpeed's CPU Adam, per rank."""
GIGA = 1e9


class StepTime(NamedTuple):
    """Seconds of one optimizer step by what they are spent on."""

    compute: float
    """Training and log-probabilities."""
    generation: float
    """Prefill and decoding."""
    gathering: float
    """Sending the model to generate: at once for every call, or under ZeRO-3 without gather for
    every token."""
    communication: float
    """Gradients, and under ZeRO-3 weights, while training."""
    offload: float
    """The host link, and AdamW on the CPU."""
    sync: float = 0.0
    """Bringing the weights into engines, and proving them there."""

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self)


def forward_flops(shape: Shape, tokens: float, length: int) -> float:
    """FLOPs of one forward pass over `tokens` tokens in sequences of `length`: parameters and
    causal attention."""
    return 2 * shape.active_parameters * tokens + 2 * shape.layers * shape.query * length * tokens


def pass_seconds(shape: Shape, hardware: Product, tokens: float, length: int) -> float:
    """One forward pass over `tokens` tokens; few of them leave the GPU idle."""
    speed = UTILISATION * tokens / (tokens + HALF_SPEED_TOKENS)
    return forward_flops(shape, tokens, length) / (hardware.teraflops * 1e12 * speed)


def scoring_passes(setup: Setup) -> int:
    """Passes without gradients over the step's completions: the reference's, and the old policy's
    off policy."""
    return (setup.reference != "None") + setup.scores_old_policy


def compute_seconds(shape: Shape, setup: Setup, hardware: Product) -> float:
    """Training and log-probabilities of one step: forward, twice that backward (once under LoRA),
    recomputation."""
    passes = (2 if setup.has_lora else 3) + setup.checkpointing + scoring_passes(setup)
    return passes * setup.accumulation * pass_seconds(shape, hardware, setup.tokens, setup.length)


def decoded_parameters(shape: Shape, sequences: int) -> float:
    """Parameters that decoding one token of each sequence reads: of the experts, all that any token
    is sent to.

    With even routing a sequence misses an expert with probability 1 - k/E, and all of them with its
    power.
    """
    if not shape.experts:
        return shape.parameters
    missed = (1 - shape.active_experts / shape.experts) ** sequences
    return shape.parameters - shape.layers * shape.experts * missed * shape.expert_matrices


def generation_seconds(shape: Shape, setup: Setup, hardware: Product, calls: float) -> float:
    """`calls` calls of generate: the prompts' pass; then each token reads weights and moves the
    cache, or waits for launches.

    The cache has the prompt and on average half of the completion. DynamicCache concatenates keys
    and values for every token, so the cache is read once and copied twice. Where several heads
    share a key, attention writes and reads it once more for each of them (repeat_kv). Both counted
    on meta tensors, transformers 5.23.
    """
    sequences = setup.generation_batch
    held = setup.prompt + setup.completion / 2
    cache = sequences * held * 2 * shape.layers * shape.key_value * setup.weight_bytes
    repeats = shape.heads // shape.kv_heads
    moves = 3 + (2 * repeats if repeats > 1 else 0)
    traffic = decoded_parameters(shape, sequences) * setup.compute_bytes + moves * cache
    bytes_per_second = hardware.bandwidth * GIGA * MEMORY_EFFICIENCY
    token = max(traffic / bytes_per_second, shape.layers * LAUNCH_SECONDS)
    prefill = pass_seconds(shape, hardware, sequences * setup.prompt, setup.prompt)
    return calls * (prefill + setup.completion * token)


def engine_seconds(shape: Shape, setup: Setup, hardware: Product, calls: float) -> float:
    """`calls` times as many completions as an engine samples at a time: their prompts' pass, then
    token by token."""
    engine = terms.engine_of(setup)
    at_once = terms.sequences(setup)
    prefill = (
        pass_seconds(shape, hardware, at_once * setup.prompt, setup.prompt) / engine.tensor_parallel
    )
    return calls * (prefill + setup.completion * token_seconds(shape, setup, hardware))


def link_bytes_per_second(hardware: Product, nodes: int, per_node: int) -> float:
    """What a rank sends and receives of a ring over the gang: a link's share, or all of a node's
    network cards.

    Every node's traffic passes its cards once, whatever the number of its GPUs.
    """
    between = hardware.node_network or per_node * hardware.network
    return (hardware.link if nodes == 1 else min(hardware.link, between)) * GIGA * LINK_EFFICIENCY


def assumed_link(hardware: Product, nodes: int, per_node: int) -> int | None:
    """The same as a plan publishes it, to be held against a measurement; None for one process,
    which has no link."""
    if nodes * per_node == 1:
        return None
    speed = link_bytes_per_second(hardware, nodes, per_node)
    return int(min(max(1.0, speed), MAX_COUNT))


def gathering_seconds(
    shape: Shape, setup: Setup, link: float, latency: float, calls: float
) -> float:
    """Under ZeRO-3 generate gathers the whole model once per call, or layer by layer for every
    token of every call."""
    if setup.zero != 3:
        return 0.0
    model = (
        setup.weight_bytes * shape.parameters * (setup.world - 1) / setup.world / link
        + shape.layers * latency
    )
    return calls * model * (1 if setup.gather else setup.completion)


def communication_seconds(shape: Shape, setup: Setup, link: float, latency: float) -> float:
    """Gradients and weights of one step's update.

    DDP reduces all gradients once, in float32 with full weights and adapters alike. ZeRO-2 reduces
    them after every micro-batch and gathers the new weights once. ZeRO-3 reduces after every
    micro-batch, and gathers the weights for forward, backward and each scoring pass; half of that
    overlaps with computing.
    """
    share = (setup.world - 1) / setup.world
    gradients = trained_parameters(shape, setup) * trained_bytes(setup) * share / link
    if setup.zero == 0:
        return 2 * gradients
    if setup.zero == 2:
        return (setup.accumulation + 1) * gradients
    model = setup.weight_bytes * shape.parameters * share / link + shape.layers * latency
    return 0.5 * setup.accumulation * (gradients + (2 + scoring_passes(setup)) * model)


def offload_seconds(shape: Shape, setup: Setup) -> float:
    """Gradients to the host and weights back over its link, and CPU Adam's 28 bytes per parameter.

    Each micro-batch after the first also brings the sum so far to the GPU to add to it. An
    offloaded reference comes to the GPU once, under ZeRO-3 in partitions for every micro-batch.
    """
    seconds = 0.0
    if setup.offload:
        own = trained_parameters(shape, setup) / setup.world
        moved = 2 * setup.weight_bytes * setup.accumulation
        seconds += own * (moved / PCIE_GB_PER_S + 28 / HOST_ADAM_GB_PER_S) / GIGA
    if setup.reference == "Offload":
        copies = setup.accumulation / setup.world if setup.zero == 3 else 1
        seconds += copies * shape.parameters * setup.weight_bytes / (PCIE_GB_PER_S * GIGA)
    return seconds


class TrainingTime(NamedTuple):
    """The parts of a step that do not depend on what samples."""

    compute: float
    communication: float
    offload: float


class SamplingTime(NamedTuple):
    """The parts of a step that depend on what samples."""

    generation: float
    gathering: float
    sync: float


def training_time(shape: Shape, setup: Setup, hardware: Product, nodes: int) -> TrainingTime:
    """Time of one step without its sampling; arguments as of step_time."""
    link = link_bytes_per_second(hardware, nodes, setup.world // nodes)
    latency = GATHER_SECONDS[nodes > 1]
    return TrainingTime(
        compute_seconds(shape, setup, hardware),
        communication_seconds(shape, setup, link, latency),
        offload_seconds(shape, setup),
    )


def sampling_time(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    nodes: int,
    calls: float,
    *,
    servers: Product | None = None,
) -> SamplingTime:
    """Time that one step takes to sample its completions; arguments as of step_time."""
    link = link_bytes_per_second(hardware, nodes, setup.world // nodes)
    if setup.engine:
        generation = engine_seconds(shape, setup, servers or hardware, calls)
        sync = setup.engine.syncs * sync_seconds(shape, setup, hardware, link)
        return SamplingTime(generation, 0.0, sync)
    generation = generation_seconds(shape, setup, hardware, calls)
    latency = GATHER_SECONDS[nodes > 1]
    return SamplingTime(generation, gathering_seconds(shape, setup, link, latency, calls), 0.0)


def step_time(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    nodes: int,
    calls: float,
    *,
    servers: Product | None = None,
) -> StepTime:
    """Time of one optimizer step.

    Args:
        shape: the policy's shape.
        setup: the run's settings.
        hardware: the GPU.
        nodes: nodes that the gang runs on.
        calls: calls of generate per optimizer step; below 1 where one batch feeds several steps.
        servers: the GPU of engines in pods of their own.
    """
    training = training_time(shape, setup, hardware, nodes)
    sampling = sampling_time(shape, setup, hardware, nodes, calls, servers=servers)
    return StepTime(**training._asdict(), **sampling._asdict())


def with_measured_links(inventory: Inventory, links: MeasuredLinks | None) -> Inventory:
    """The inventory whose nodes with these GPUs have the links that were measured; what is declared
    of them stays."""
    if links is None:
        return inventory
    return replace(inventory, nodes=tuple(_node(node, links) for node in inventory.nodes))


def _node(node: Node, links: MeasuredLinks) -> Node:
    """Ranks on one node tell of the links between its GPUs; on several, of the network, which is
    never the faster."""
    if node.gpu_product != links.gpu_product:
        return node
    speed = links.bytes_per_second / GIGA / LINK_EFFICIENCY
    if links.nodes > 1:
        return node if node.node_gbps else replace(node, node_gbps=speed)
    return node if node.gpu_gbps else replace(node, gpu_gbps=speed)


READ_SHARE = 0.7
"""Share of the memory bandwidth that decoding reaches (assumed; others report 0.77 for 8 B at one
sequence on an A100, vLLM 0.23)."""
COMPUTE_SHARE = 0.4
"""Share of the peak FLOP/s that decoding of many sequences reaches (assumed, as of other large
products)."""
TOKEN_SECONDS = 2e-3
"""Scheduling and sampling of one token of all sequences (assumed)."""
EAGER_LAYER_SECONDS = 0.2e-3
"""Launch cost of one layer's kernels without CUDA graphs (assumed)."""
REDUCE_SECONDS = 20e-6
"""Latency of one sum over the GPUs of an engine, of which a layer has two (assumed)."""
TENSOR_SECONDS = 0.6e-3
"""Sending one tensor, whatever its size: 0.18 s for the 310 tensors of 0.6 B on an H100
(trl#5892)."""
WAKE_SECONDS = 0.5
"""Going to sleep and waking once (assumed; vLLM's own measurements of waking are 0.1 to 0.4 s)."""
SENT_SHARE = 0.7
"""Share of a link's bandwidth that sending reaches (assumed, as of collectives)."""
HASHED_SHARE = 0.5
"""Share of the memory bandwidth that a hash reaches (assumed)."""


def token_seconds(shape: Shape, setup: Setup, hardware: Product) -> float:
    """One token of all sequences of an engine: `max(read, compute)` and what doesn't depend on
    either.

    Read are the weights and the caches, which hold the prompt and on average half of the
    completion.
    """
    engine = terms.engine_of(setup)
    at_once = terms.sequences(setup)
    cached = at_once * (setup.prompt + setup.completion / 2) * terms.token_bytes(shape, setup)
    read = (terms.weights(shape, setup) + cached) / (hardware.bandwidth * GIGA * READ_SHARE)
    flops = 2 * shape.parameters * at_once / engine.tensor_parallel
    launched = 0.0 if engine.graphs else shape.layers * EAGER_LAYER_SECONDS
    reduced = 2 * shape.layers * REDUCE_SECONDS if engine.tensor_parallel > 1 else 0.0
    return (
        max(read, flops / (hardware.teraflops * 1e12 * COMPUTE_SHARE), launched)
        + reduced
        + TOKEN_SECONDS
    )


def sync_seconds(shape: Shape, setup: Setup, hardware: Product, link: float) -> float:
    """One sync: every tensor gathered under ZeRO-3, sent or copied, and proven; and the wake before
    it.

    Args:
        shape: the policy's shape.
        setup: the run's settings.
        hardware: the trainer's GPU.
        link: bytes per second between ranks.
    """
    engine = terms.engine_of(setup)
    whole = shape.parameters * setup.compute_bytes
    memory = hardware.bandwidth * GIGA
    gathered = 0.0
    if setup.zero == 3:
        gathered = shape.parameters * setup.weight_bytes * (setup.world - 1) / setup.world / link
    if engine.kind == "Servers":
        network = (hardware.node_network or hardware.network) * GIGA * SENT_SHARE
        sent = engine.replicas * whole / network
    else:
        sent = 2 * whole / memory
    proven = 2 * whole / (memory * HASHED_SHARE)
    return (
        gathered
        + sent
        + proven
        + tensors(shape) * TENSOR_SECONDS
        + (WAKE_SECONDS if engine.sleeps else 0.0)
    )


@lru_cache(maxsize=64)
def tensors(shape: Shape) -> int:
    """Parameters of the model by count: matrices, and norms and biases of each layer, and the
    ends."""
    matrices = shape.layers * sum(linear.copies for linear in shape.linears)
    return matrices + sum(count for count, _ in shape.vectors) + (1 if shape.tied else 2)
