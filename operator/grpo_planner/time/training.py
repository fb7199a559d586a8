"""Seconds of an update: forward and backward, log-probabilities, collectives and the host link.

Sources: FLOPs as 2 * parameters * tokens (Kaplan et al. 2020) and attention. Ring collectives move
(N - 1) / N of what they share per rank (Rajbhandari et al. 2020). The constants that published runs
decide are in constants.py; those here are assumed.
"""

from typing import NamedTuple

from ..hardware.products import Product
from ..memory.setup import Setup
from ..memory.states import trained_bytes, trained_parameters
from ..model.shapes import Shape
from .constants import FITTED, Constants
from .lengths import longest
from .measured_runs import StepCorrection

HALF_SPEED_TOKENS = 512
"""Tokens per micro-batch at which half of the utilisation is reached (assumed: published runs pack
their micro-batches)."""
LINK_EFFICIENCY = 0.7
"""Share of a link's bandwidth that collectives reach."""
GATHER_SECONDS = {False: 30e-6, True: 100e-6}
"""Latency of one collective, on one node and between several."""
HOST_ADAM_GB_PER_S = 25.0
"""Memory bandwidth of DeepSpeed's CPU Adam, per rank."""
BLACKWELL = 10
"""Major compute capability from which published software reaches less of peak and bandwidth."""
GIGA = 1e9


class TrainingTime(NamedTuple):
    """The parts of a step that do not depend on what samples."""

    compute: float
    communication: float
    offload: float

    def as_measured(self, correction: StepCorrection | None) -> "TrainingTime":
        """The time as steps that were measured on these GPUs correct it."""
        if correction is None:
            return self
        return TrainingTime(*(part * correction.training for part in self))


def forward_flops(shape: Shape, tokens: float, length: float) -> float:
    """FLOPs of one forward pass over `tokens` tokens in sequences of `length`: parameters and
    causal attention."""
    return 2 * shape.active_parameters * tokens + 2 * shape.layers * shape.query * length * tokens


def _efficiency(hardware: Product, constants: Constants) -> float:
    """Share of Hopper's efficiency that this GPU's generation reaches."""
    is_blackwell = hardware.capability is not None and hardware.capability[0] >= BLACKWELL
    return constants.blackwell if is_blackwell else 1.0


def reached_flops(hardware: Product, constants: Constants) -> float:
    """FLOP/s that matrix products reach on that GPU."""
    reached = constants.utilisation * _efficiency(hardware, constants)
    return hardware.teraflops * 1e12 * reached


def _moved_seconds(
    shape: Shape, hardware: Product, tokens: float, bytes_each: float, constants: Constants
) -> float:
    """Seconds in which `bytes_each` of every width, layer and token move through the memory."""
    moved = tokens * shape.layers * shape.hidden * bytes_each
    return moved / (hardware.bandwidth * GIGA * _efficiency(hardware, constants))


def expert_seconds(shape: Shape, hardware: Product, tokens: float, constants: Constants) -> float:
    """What experts take beside their products: routing, sorting and sending tokens, and products
    too small for the GPU; 0 for a dense model.

    It is bound by memory: on an H20, with a seventh of an H100's FLOP/s and more bandwidth, the
    experts of a 30B model take as long as on an H100.
    """
    if not shape.experts:
        return 0.0
    bytes_each = shape.active_experts * constants.expert_bytes
    return _moved_seconds(shape, hardware, tokens, bytes_each, constants)


def pass_seconds(
    shape: Shape, hardware: Product, tokens: float, length: float, constants: Constants
) -> float:
    """One forward pass over `tokens` tokens: matrix products, of which few tokens leave the GPU
    idle, and what lies between them, norms, rotations and sums, which is bound by memory.

    The latter grows with the width, the former with its square: narrow models reach less of a GPU.
    """
    filled = tokens / (tokens + HALF_SPEED_TOKENS)
    flops = forward_flops(shape, tokens, length)
    products = flops / (reached_flops(hardware, constants) * filled)
    moved = _moved_seconds(shape, hardware, tokens, constants.moved_bytes, constants)
    return products + moved + expert_seconds(shape, hardware, tokens, constants)


def micro_batch_seconds(
    shape: Shape,
    hardware: Product,
    tokens: float,
    length: float,
    constants: Constants,
    *,
    shared: int = 1,
    units: int = 1,
) -> float:
    """One forward pass of a micro-batch of `tokens` tokens, or the launch of its kernels where that
    takes longer.

    Args:
        length: tokens of one sequence.
        shared: GPUs that share one copy of the model. Each has a part of the products of as many
            micro-batches as there are GPUs, and launches the kernels of all of them.
        units: groups of a layer's weights that are gathered and launched one by one.
    """
    launched = shared * shape.layers * units * constants.layer_seconds
    return max(pass_seconds(shape, hardware, tokens, length, constants), launched)


def scoring_passes(setup: Setup) -> int:
    """Passes without gradients over a generation's completions: the reference's, and the old
    policy's."""
    return (setup.reference != "None") + setup.scores_old_policy


def trained_length(setup: Setup, constants: Constants) -> float:
    """Tokens of one sequence as it is trained on.

    TRL pads all completions of a process's generation to the longest of them, and trains on the
    padding too (trl 1.16, grpo_trainer.py, `_generate_and_score_completions`).
    """
    completions = setup.micro_batch * setup.accumulation
    return setup.padded_prompt + longest(
        setup.mean_completion, setup.completion, constants.runaway, completions
    )


def training_passes(setup: Setup, constants: Constants) -> float:
    """Forward passes that the forward and the backward of a micro-batch take, with recomputation.

    A backward takes two of full weights. That of LoRA leaves out the gradients of weights, and adds
    small products of which a GPU reaches little.
    """
    passes = constants.lora_passes if setup.has_lora else 3.0
    return passes + setup.checkpointing


def compute_seconds(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    length: float,
    constants: Constants,
    *,
    shared: int = 1,
    units: int = 1,
) -> float:
    """Training and log-probabilities of one step whose sequences have `length` tokens, and what an
    update takes beside its products; other arguments as of micro_batch_seconds."""
    passes = training_passes(setup, constants) + scoring_passes(setup) / setup.iterations
    tokens = setup.micro_batch * length
    seconds_per_pass = micro_batch_seconds(
        shape, hardware, tokens, length, constants, shared=shared, units=units
    )
    return passes * setup.accumulation * seconds_per_pass + constants.step_seconds


def update_seconds(
    shape: Shape, setup: Setup, hardware: Product, constants: Constants = FITTED
) -> float:
    """Compute seconds of one step whose sequences are as long as TRL pads them. How the model is
    sharded does not change them."""
    return compute_seconds(shape, setup, hardware, trained_length(setup, constants), constants)


def gathering_pass(shape: Shape, setup: Setup, link: float, latency: float) -> float:
    """All weights gathered layer by layer under ZeRO-3, for one pass."""
    share = (setup.world - 1) / setup.world
    return setup.weight_bytes * shape.parameters * share / link + shape.layers * latency


def communication_seconds(shape: Shape, setup: Setup, link: float, latency: float) -> float:
    """Gradients and weights of one step's update.

    DDP reduces all gradients once, in float32 with full weights and adapters alike. ZeRO-2 reduces
    them after every micro-batch and gathers the new weights once. ZeRO-3 reduces after every
    micro-batch, and gathers the weights for forward, backward and each scoring pass. None
    of it overlaps with computing: the published runs say no more than that.
    """
    share = (setup.world - 1) / setup.world
    gradients = trained_parameters(shape, setup) * trained_bytes(setup) * share / link
    if setup.zero == 0:
        return 2 * gradients
    if setup.zero == 2:
        return (setup.accumulation + 1) * gradients
    model = gathering_pass(shape, setup, link, latency)
    passes = 2 + scoring_passes(setup) / setup.iterations
    return setup.accumulation * (gradients + passes * model)


def offload_seconds(shape: Shape, setup: Setup, hardware: Product) -> float:
    """Gradients to the host and weights back over its link, and CPU Adam's 28 bytes per parameter.

    Each micro-batch after the first also brings the sum so far to the GPU to add to it. An
    offloaded reference comes to the GPU once for all iterations over a generation, under ZeRO-3 in
    partitions for every micro-batch.
    """
    seconds = 0.0
    if setup.offload:
        partition = trained_parameters(shape, setup) / setup.world
        moved = 2 * setup.weight_bytes * setup.accumulation
        seconds += partition * (moved / hardware.host_link + 28 / HOST_ADAM_GB_PER_S) / GIGA
    if setup.reference == "Offload":
        copies = setup.accumulation / setup.world if setup.zero == 3 else 1
        whole = shape.parameters * setup.weight_bytes / (hardware.host_link * GIGA)
        seconds += copies * whole / setup.iterations
    return seconds
