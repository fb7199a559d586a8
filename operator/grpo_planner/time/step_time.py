"""The time of one step, with and without a vLLM engine, from the constants of published runs.

The update is in training.py and the sampling in sampling.py. Here are the links between GPUs, the
sync of weights, the sum, and the range in which a step probably lies. Of ten published whole steps,
predicted without their source, eight lie between the two factors that the fit has stored. The page
docs/internals/step-times.md says what is assumed, and how far published steps are from the model.

The speed of links is that of the product table, unless an attempt of the job has measured its own.
What the job's ranks reached is more accurate than what such machines usually have.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from grpo_api.plan.learned import MeasuredLinks
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.quantity import MAX_COUNT

from ..hardware.inventory import Inventory, Node
from ..hardware.products import Product
from ..memory import engine as terms
from ..memory.setup import Setup
from ..memory.states import offloaded_base
from ..model.shapes import Shape
from ..result.formatting import brief_plan_name, distinct
from .constants import FITTED, Constants, stored_fit
from .lengths import longest
from .measured_runs import StepCorrection
from .sampling import generation_seconds
from .training import (
    GATHER_SECONDS,
    GIGA,
    LINK_EFFICIENCY,
    TrainingTime,
    communication_seconds,
    gathering_pass,
    micro_batch_seconds,
    offload_seconds,
    trained_length,
    update_seconds,
)

TENSOR_SECONDS = 0.6e-3
"""Sending one tensor, whatever its size: 0.18 s for the 310 tensors of 0.6 B on an H100
(trl#5892)."""
WAKE_SECONDS = 0.5
"""Going to sleep and waking once (assumed; vLLM's own measurements of waking are 0.1 to 0.4 s)."""
SENT_SHARE = 0.7
"""Share of a link's bandwidth that sending reaches (assumed, as of collectives)."""
HASHED_SHARE = 0.5
"""Share of the memory bandwidth that a hash reaches (assumed)."""


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


def link_bytes_per_second(hardware: Product, nodes: int, per_node: int) -> float:
    """What a rank sends and receives of a ring over the gang: a link's share, or all of a node's
    network cards.

    Every node's traffic passes its cards once, whatever the number of its GPUs.
    """
    speed = hardware.link
    if nodes > 1:
        between = hardware.node_network or per_node * hardware.network
        speed = min(speed, between)
    return speed * GIGA * LINK_EFFICIENCY


def assumed_link(hardware: Product, nodes: int, per_node: int) -> int | None:
    """The bytes per second of a rank's link as a plan publishes them, to compare with a
    measurement; None for one process, which has no link."""
    if nodes * per_node == 1:
        return None
    speed = link_bytes_per_second(hardware, nodes, per_node)
    return int(min(max(1.0, speed), MAX_COUNT))


def gathering_seconds(
    shape: Shape, setup: Setup, link: float, latency: float, constants: Constants
) -> float:
    """Under ZeRO-3 one call of generate gathers the whole model once, or layer by layer for every
    token."""
    if setup.zero != 3:
        return 0.0
    model = (
        setup.weight_bytes * shape.parameters * (setup.world - 1) / setup.world / link
        + shape.layers * latency
    )
    if setup.gather:
        return model
    tokens = longest(
        setup.mean_completion, setup.completion, constants.runaway, setup.generation_batch
    )
    return model * tokens


class SamplingTime(NamedTuple):
    """The parts of a step that depend on what samples."""

    generation: float
    gathering: float
    sync: float

    def as_measured(self, correction: StepCorrection | None) -> "SamplingTime":
        """The time as steps that were measured on these GPUs correct it."""
        if correction is None:
            return self
        factor = correction.generation
        return self._replace(generation=self.generation * factor, gathering=self.gathering * factor)


def training_time(
    shape: Shape, setup: Setup, hardware: Product, nodes: int, *, compute: float
) -> TrainingTime:
    """Time of one step without its sampling; `compute`: its update_seconds, other arguments as of
    step_time."""
    link = link_bytes_per_second(hardware, nodes, setup.world // nodes)
    latency = GATHER_SECONDS[nodes > 1]
    communication = communication_seconds(shape, setup, link, latency)
    return TrainingTime(compute, communication, offload_seconds(shape, setup, hardware))


def scoring_time(
    shape: Shape, setup: Setup, hardware: Product, nodes: int, constants: Constants = FITTED
) -> float:
    """What the training time has of one pass for log-probabilities; arguments as of step_time."""
    length = trained_length(setup, constants)
    seconds = micro_batch_seconds(shape, hardware, setup.micro_batch * length, length, constants)
    if setup.zero == 3:
        link = link_bytes_per_second(hardware, nodes, setup.world // nodes)
        gathered = gathering_pass(shape, setup, link, GATHER_SECONDS[nodes > 1])
        seconds += gathered
    return setup.accumulation * seconds / setup.iterations


def sampling_time(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    nodes: int,
    calls: float,
    *,
    generation: float,
    constants: Constants = FITTED,
) -> SamplingTime:
    """Time that one step takes to sample its completions; `generation`: its generation_seconds,
    other arguments as of step_time."""
    link = link_bytes_per_second(hardware, nodes, setup.world // nodes)
    if setup.engine:
        sync = setup.engine.syncs * sync_seconds(shape, setup, hardware, link, constants)
        return SamplingTime(generation, 0.0, sync)
    latency = GATHER_SECONDS[nodes > 1]
    gathering = gathering_seconds(shape, setup, link, latency, constants)
    return SamplingTime(generation, calls * gathering, 0.0)


def step_time(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    nodes: int,
    calls: float,
    *,
    servers: Product | None = None,
    measured: StepCorrection | None = None,
) -> StepTime:
    """Time of one optimizer step.

    Args:
        calls: calls of generate per optimizer step; below 1 where one batch feeds several steps.
        servers: the GPU of engines in pods of their own.
        measured: how steps that were measured on these GPUs correct it.
    """
    compute = update_seconds(shape, setup, hardware)
    training = training_time(shape, setup, hardware, nodes, compute=compute).as_measured(measured)
    generation = generation_seconds(shape, setup, servers or hardware, calls)
    sampling = sampling_time(shape, setup, hardware, nodes, calls, generation=generation)
    sampling = sampling.as_measured(measured)
    return StepTime(**training._asdict(), **sampling._asdict())


def sync_seconds(
    shape: Shape, setup: Setup, hardware: Product, link: float, constants: Constants = FITTED
) -> float:
    """One sync: the weights sent, proven in the engine, and the wake before it; ranks are `link`
    bytes per second apart.

    A base in host memory comes to the GPU twice: tensor by tensor to the engine, and at once before
    the policy is trained. Nothing goes to the host, since the copy there stays as it is.
    """
    whole = shape.parameters * setup.compute_bytes
    proven = 2 * whole / (hardware.bandwidth * GIGA * HASHED_SHARE)
    woken = WAKE_SECONDS if terms.engine_of(setup).sleeps else 0.0
    brought = 2 * offloaded_base(shape, setup) / (hardware.host_link * GIGA)
    return sending_seconds(shape, setup, hardware, link, constants) + proven + woken + brought


def sending_seconds(
    shape: Shape, setup: Setup, hardware: Product, link: float, constants: Constants
) -> float:
    """The weights on their way: every tensor gathered under ZeRO-3, and sent or copied."""
    engine = terms.engine_of(setup)
    whole = shape.parameters * setup.compute_bytes
    gathered = 0.0
    if setup.zero == 3:
        gathered = shape.parameters * setup.weight_bytes * (setup.world - 1) / setup.world / link
    sent = whole / (constants.sync_gb_per_s * GIGA)
    if engine.kind == "Servers":
        network = (hardware.node_network or hardware.network) * GIGA * SENT_SHARE
        sent = max(sent, engine.replicas * whole / network)
    return gathered + sent + tensors(shape) * TENSOR_SECONDS


@lru_cache(maxsize=64)
def tensors(shape: Shape) -> int:
    """Parameters of the model by count: matrices, and norms and biases of each layer, and the
    ends."""
    matrices = shape.layers * sum(linear.copies for linear in shape.linears)
    return matrices + sum(count for count, _ in shape.vectors) + (1 if shape.tied else 2)


def with_measured_links(inventory: Inventory, links: MeasuredLinks | None) -> Inventory:
    """The inventory whose nodes with these GPUs have the links that were measured; what is declared
    of them stays."""
    if links is None:
        return inventory
    return replace(inventory, nodes=tuple(_node(node, links) for node in inventory.nodes))


def _node(node: Node, links: MeasuredLinks) -> Node:
    """Ranks on one node measure the links between its GPUs; on several, of the network, which is
    never the faster."""
    if node.gpu_product != links.gpu_product:
        return node
    speed = links.bytes_per_second / GIGA / LINK_EFFICIENCY
    if links.nodes > 1:
        return node if node.node_gbps else replace(node, node_gbps=speed)
    return node if node.gpu_gbps else replace(node, gpu_gbps=speed)


class StepRange(NamedTuple):
    """Seconds that eight of ten steps are between."""

    low: float
    high: float


def step_range(seconds: float, spread: float | None = None) -> StepRange:
    """The range of a predicted step; `spread`: how far off it may be by runs that were measured on
    these GPUs, None where only published ones are known."""
    if spread is not None:
        return StepRange(seconds / (1 + spread), seconds * (1 + spread))
    fit = stored_fit()
    return StepRange(seconds * fit.low, seconds * fit.high)


def step_message(seconds: float, spread: float | None = None) -> str:
    """`35 to 60 s per step, from 51 published runs`, or `47 s per step, ±10%, measured on this
    cluster`."""
    # As the plan publishes it, of which the headline tells.
    seconds = round(seconds, 2)
    if spread is not None:
        return f"{_format(seconds)} s per step, ±{spread:.0%}, measured on this cluster"
    low, high = step_range(seconds)
    runs = stored_fit().runs
    return f"{_range(low, high)} s per step, from {runs} published runs"


def headline_message(plan: ExecutionPlan) -> str:
    """How a job is trained and how long a step takes, in few words."""
    seconds = plan.estimated_step_seconds
    if seconds is None:
        return brief_plan_name(plan)
    low, high = step_range(seconds, plan.step_spread)
    return f"{brief_plan_name(plan)}: {_range(low, high)} s per step"


def _range(low: float, high: float) -> str:
    texts = (_format(low), _format(high))
    return " to ".join(texts if texts[0] != texts[1] else distinct(low, high))


def _format(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
