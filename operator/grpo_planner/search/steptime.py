"""A coarse model of the time of one step: only for ranking candidates, never checked against a GPU.

Sources: FLOPs as 2 * parameters * tokens (Kaplan et al. 2020) and attention; ring collectives move (N - 1) / N of what
they share per rank (Rajbhandari et al. 2020); decoding is bound by memory or by kernel launches. docs/memory-model.md
lists the assumptions. All results are seconds.
"""

from typing import NamedTuple

from ..hardware.products import Product
from ..memory import engine as terms
from ..memory.setup import Setup
from ..memory.states import trained_bytes, trained_parameters
from ..model.shapes import Shape
from . import enginetime

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
    """Sending the model to generate: at once for every call, or under ZeRO-3 without gather for every token."""
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
    """FLOPs of one forward pass over `tokens` tokens in sequences of `length`: parameters and causal attention."""
    return 2 * shape.active_parameters * tokens + 2 * shape.layers * shape.query * length * tokens


def pass_seconds(shape: Shape, hardware: Product, tokens: float, length: int) -> float:
    """One forward pass over `tokens` tokens; few of them leave the GPU idle."""
    speed = UTILISATION * tokens / (tokens + HALF_SPEED_TOKENS)
    return forward_flops(shape, tokens, length) / (hardware.teraflops * 1e12 * speed)


def scoring_passes(setup: Setup) -> int:
    """Passes without gradients over the step's completions: the reference's, and the old policy's off policy."""
    return (setup.reference != "None") + setup.scores_old_policy


def compute_seconds(shape: Shape, setup: Setup, hardware: Product) -> float:
    """Training and log-probabilities of one step: forward, twice that backward (once under LoRA), recomputation."""
    passes = (2 if setup.lora else 3) + setup.checkpointing + scoring_passes(setup)
    return passes * setup.accumulation * pass_seconds(shape, hardware, setup.tokens, setup.length)


def decoded_parameters(shape: Shape, sequences: int) -> float:
    """Parameters that decoding one token of each sequence reads: of the experts, all that any token is sent to.

    With even routing a sequence misses an expert with probability 1 - k/E, and all of them with its power.
    """
    if not shape.experts:
        return shape.parameters
    missed = (1 - shape.active_experts / shape.experts) ** sequences
    return shape.parameters - shape.layers * shape.experts * missed * shape.expert_matrices


def generation_seconds(shape: Shape, setup: Setup, hardware: Product, calls: float) -> float:
    """`calls` calls of generate: the prompts' pass; then each token reads weights and cache, or waits for launches.

    The cache has the prompt and on average half of the completion.
    """
    sequences, held = setup.generation_batch, setup.prompt + setup.completion / 2
    cache = sequences * held * 2 * shape.layers * shape.key_value * setup.weight_bytes
    traffic = decoded_parameters(shape, sequences) * setup.compute_bytes + cache
    token = max(traffic / (hardware.bandwidth * GIGA * MEMORY_EFFICIENCY), shape.layers * LAUNCH_SECONDS)
    return calls * (pass_seconds(shape, hardware, sequences * setup.prompt, setup.prompt) + setup.completion * token)


def engine_seconds(shape: Shape, setup: Setup, hardware: Product, calls: float) -> float:
    """`calls` times as many completions as an engine samples at a time: their prompts' pass, then token by token."""
    engine, at_once = terms.of(setup), terms.sequences(setup)
    prefill = pass_seconds(shape, hardware, at_once * setup.prompt, setup.prompt) / engine.tensor_parallel
    return calls * (prefill + setup.completion * enginetime.token_seconds(shape, setup, hardware))


def link_bytes_per_second(hardware: Product, nodes: int, per_node: int) -> float:
    """What a rank sends and receives of a ring over the gang: a link's share, or all of a node's network cards.

    Every node's traffic passes its cards once, whatever the number of its GPUs.
    """
    between = hardware.node_network or per_node * hardware.network
    return (hardware.link if nodes == 1 else min(hardware.link, between)) * GIGA * LINK_EFFICIENCY


def gathering_seconds(shape: Shape, setup: Setup, link: float, latency: float, calls: float) -> float:
    """Under ZeRO-3 generate gathers the whole model once per call, or layer by layer for every token of every call."""
    if setup.zero != 3 or setup.engine:
        return 0.0
    model = setup.weight_bytes * shape.parameters * (setup.world - 1) / setup.world / link + shape.layers * latency
    return calls * model * (1 if setup.gather else setup.completion)


def communication_seconds(shape: Shape, setup: Setup, link: float, latency: float) -> float:
    """Gradients and weights of one step's update.

    DDP reduces all gradients once, in float32 with full weights and adapters alike. ZeRO-2 reduces them after every
    micro-batch and gathers the new weights once. ZeRO-3 reduces after every micro-batch, and gathers the weights for
    forward, backward and each scoring pass; half of that overlaps with computing.
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

    Each micro-batch after the first also brings the sum so far to the GPU to add to it. An offloaded reference comes to
    the GPU once, under ZeRO-3 in partitions for every micro-batch.
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


def step_time(
    shape: Shape, setup: Setup, hardware: Product, nodes: int, calls: float, *, servers: Product | None = None
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
    link, latency = link_bytes_per_second(hardware, nodes, setup.world // nodes), GATHER_SECONDS[nodes > 1]
    if setup.engine:
        generation = engine_seconds(shape, setup, servers or hardware, calls)
        sync = setup.engine.syncs * enginetime.sync_seconds(shape, setup, hardware, link)
    else:
        generation, sync = generation_seconds(shape, setup, hardware, calls), 0.0
    return StepTime(
        compute_seconds(shape, setup, hardware),
        generation,
        gathering_seconds(shape, setup, link, latency, calls),
        communication_seconds(shape, setup, link, latency),
        offload_seconds(shape, setup),
        sync,
    )
