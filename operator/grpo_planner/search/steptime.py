"""A coarse model of the time of one step: only for ranking candidates, never checked against a GPU.

Sources: FLOPs as 2 * parameters * tokens (Kaplan et al. 2020) and attention; ring all-reduce traffic; decoding is
bound by memory or by kernel launches. docs/memory-model.md lists the assumptions. All results are seconds.
"""

from ..hardware.products import NETWORK_GB_PER_S, Product
from ..memory.setup import Setup
from ..memory.states import trained_parameters
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
PCIE_GB_PER_S = 22.0
"""Between host and device."""
HOST_ADAM_GB_PER_S = 25.0
"""Memory bandwidth of DeepSpeed's CPU Adam, per rank."""
GIGA = 1e9


def forward_flops(shape: Shape, setup: Setup, tokens: float) -> float:
    """FLOPs of one forward pass over `tokens` tokens: parameters and causal attention."""
    return 2 * shape.active_parameters * tokens + 2 * shape.layers * shape.query * setup.length * tokens


def compute_seconds(shape: Shape, setup: Setup, hardware: Product) -> float:
    """Training and log-probabilities of one step: forward, twice that backward (once under LoRA), recomputation."""
    tokens = setup.tokens * setup.accumulation
    passes = (2 if setup.lora else 3) + setup.checkpointing + (setup.reference != "None") + setup.scores_old_policy
    speed = UTILISATION * setup.tokens / (setup.tokens + HALF_SPEED_TOKENS)
    return passes * forward_flops(shape, setup, tokens) / (hardware.teraflops * 1e12 * speed)


def generation_seconds(shape: Shape, setup: Setup, hardware: Product, calls: float) -> float:
    """`calls` calls of generate: each token reads weights and half of the final cache, or waits for launches."""
    cache = setup.generation_batch * setup.length / 2 * 2 * shape.layers * shape.key_value * setup.weight_bytes
    traffic = shape.active_parameters * setup.compute_bytes + cache
    token = max(traffic / (hardware.bandwidth * GIGA * MEMORY_EFFICIENCY), shape.layers * LAUNCH_SECONDS)
    return calls * setup.completion * token


def link_bytes_per_second(hardware: Product, nodes: int) -> float:
    """Bandwidth of the slowest link of a ring over the gang."""
    link = hardware.link if nodes == 1 else min(hardware.link, NETWORK_GB_PER_S)
    return link * GIGA * LINK_EFFICIENCY


def communication_seconds(shape: Shape, setup: Setup, hardware: Product, nodes: int) -> float:
    """All-reduce of gradients once per step; ZeRO-3 also gathers weights twice per micro-batch and for the reference.

    Half of ZeRO-3's traffic overlaps with computing. Without gather, generation gathers the model for every token.
    """
    share = (setup.world - 1) / setup.world
    gradients = 2 * trained_parameters(shape, setup) * share
    link = link_bytes_per_second(hardware, nodes)
    if setup.zero != 3:
        return 2 * gradients / link
    model = setup.weight_bytes * shape.parameters * share
    passes = 2 + 0.5 * (setup.reference != "None")
    seconds = 0.5 * (gradients + passes * model * setup.accumulation) / link
    return seconds + (0 if setup.gather else setup.completion * model / link)


def offload_seconds(shape: Shape, setup: Setup) -> float:
    """Gradients down and weights up over PCIe, and CPU Adam's 28 bytes per parameter; the reference's copy."""
    seconds = 0.0
    if setup.offload:
        own = trained_parameters(shape, setup) / setup.world
        seconds += own * (4 / PCIE_GB_PER_S + 28 / HOST_ADAM_GB_PER_S) / GIGA
    if setup.reference == "Offload":
        seconds += shape.parameters * setup.weight_bytes / (PCIE_GB_PER_S * GIGA)
    return seconds


def step_seconds(shape: Shape, setup: Setup, hardware: Product, nodes: int, calls: float) -> float:
    """Time of one optimizer step.

    Args:
        shape: the policy's shape.
        setup: the run's settings.
        hardware: the GPU.
        nodes: nodes that the gang runs on.
        calls: calls of generate per optimizer step; below 1 where one batch feeds several steps.
    """
    return (
        compute_seconds(shape, setup, hardware)
        + generation_seconds(shape, setup, hardware, calls)
        + communication_seconds(shape, setup, hardware, nodes)
        + offload_seconds(shape, setup)
    )
