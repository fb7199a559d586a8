"""Demand: what a job asks of the planner, with its pins, worked out once before the search.

Exists so that the search sees numbers and allowed methods instead of a spec. Used by search.py and plan.py.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from grpo_api.job import GRPOJobSpec
from grpo_api.quantity import parse_quantity, quantity_bytes
from grpo_api.rewards import ModelReward

from .architecture import Resolved, Source, by_name_and_size
from .memory.activations import no_grad_transient
from .memory.device import MARGIN
from .memory.setup import Precision, Setup, Strategy
from .products import Product
from .result import PlanReason, PlanRefused
from .shapes import Shape

MOST_SEQUENCES = 16
"""Largest micro-batch that is tried: beyond it nothing gets faster."""


@dataclass(frozen=True, slots=True)
class Method:
    """One family of candidates: what is trained, how it is sharded and where the reference is."""

    lora: bool
    zero: Literal[0, 2, 3]
    offload: bool
    strategy: Strategy
    reference: Strategy
    """The strategy as the memory model sees it: a Sharded reference with offload is `Offload`."""
    eight_bit: bool

    @property
    def tier(self) -> int:
        """How far it departs from training all parameters with AdamW: 0 not, 1 in 8 bits, 2 an adapter only."""
        return 2 if self.lora else int(self.eight_bit)

    @property
    def name(self) -> str:
        """For tables: `full ZeRO-2+offload, Clone`."""
        parts = "LoRA" if self.lora else "full 8-bit" if self.eight_bit else "full"
        sharding = f"ZeRO-{self.zero}" if self.zero else "DDP"
        return f"{parts} {sharding}{'+offload' if self.offload else ''}, {self.strategy}"


@dataclass(frozen=True)
class Demand:
    """A job's model and pins."""

    spec: GRPOJobSpec
    shape: Shape
    source: Source
    label: str
    notes: tuple[str, ...]
    reward_models: tuple[ModelReward, ...]
    reward_shapes: tuple[Shape, ...]

    @cached_property
    def reward_bytes(self) -> int:
        """Weights of all reward models: every process holds them whole, in their own dtype."""
        pairs = zip(self.reward_models, self.reward_shapes, strict=True)
        return sum(shape.parameters * (2 if reward.dtype == "bfloat16" else 4) for reward, shape in pairs)

    @property
    def margin(self) -> float:
        """Share of the allocated bytes kept free; wider for estimated shapes and for experts, whose routing varies."""
        return MARGIN["Estimated"] if self.shape.experts else MARGIN[self.source]

    @property
    def most_gpus(self) -> int | None:
        """placement.gpus.max, None when open."""
        return self.spec.placement.gpus.max if self.spec.placement.gpus else None

    @property
    def fewest_gpus(self) -> int:
        """placement.gpus.min, and at least one per node."""
        return max(self.spec.placement.gpus.min if self.spec.placement.gpus else 1, self.spec.placement.nodes or 1)

    @property
    def pod_cpu(self) -> float | None:
        """CPU cores that one pod requests where the spec says so."""
        cpu = self.spec.resources.requested.get("cpu")
        return None if cpu is None else float(parse_quantity(cpu))

    @property
    def pod_memory(self) -> int | None:
        """Host memory that one pod requests where the spec says so, in bytes."""
        memory = self.spec.resources.requested.get("memory")
        return None if memory is None else quantity_bytes(memory)

    @property
    def most_memory(self) -> int | None:
        """Host memory that one pod may use, in bytes: its limit; without one its request, as more is not promised."""
        limit = self.spec.resources.limits.get("memory")
        return self.pod_memory if limit is None else quantity_bytes(limit)

    @cached_property
    def scoring_bytes(self) -> int:
        """Temporaries of the largest reward model's pass over one of its batches."""
        training, widest = self.spec.training, 0
        for reward, shape in zip(self.reward_models, self.reward_shapes, strict=True):
            precision: Precision = "bfloat16" if reward.dtype == "bfloat16" else "float32"
            setup = Setup(precision, training.max_prompt_length, training.max_completion_length, reward.batch_size)
            widest = max(widest, round(no_grad_transient(shape, setup)))
        return widest

    def precision(self, method: Method, hardware: Product) -> Precision | None:
        """Dtypes of a method on a GPU; None when a pinned bfloat16 is not to be had.

        Full training without ZeRO keeps float32 weights under autocast: in bfloat16 weights, small updates round away.
        """
        pinned = self.spec.training.dtype
        if not hardware.bfloat16:
            return None if pinned == "bfloat16" else "float32"
        if pinned == "float32":
            return "float32" if method.zero else "mixed"
        narrow = method.zero or method.lora or pinned == "bfloat16"
        return "bfloat16" if narrow else "mixed"


def build_demand(spec: GRPOJobSpec, resolved: Resolved) -> Demand:
    """The demand of a job.

    Raises:
        PlanRefused: a reward model's size is unknown.
    """
    notes, models, shapes = [resolved.note] if resolved.note else [], [], []
    for index, reward in enumerate(spec.rewards):
        if reward.model is None:
            continue
        scorer = by_name_and_size(reward.model.name, reward.model.parameters, f"spec.rewards[{index}].model")
        notes += [scorer.note] if scorer.note else []
        models.append(reward.model)
        shapes.append(scorer.shape)
    return Demand(
        spec, resolved.shape, resolved.source, resolved.label, tuple(notes), tuple(models), tuple(shapes)
    )  # fmt: skip


def methods(spec: GRPOJobSpec) -> list[Method]:
    """All families that the spec's pins allow, simplest first."""
    found = [] if _adapter_only(spec) else _full_methods(spec)
    if _adapter_allowed(spec):
        strategy: Strategy = "None" if spec.training.beta == 0 else "Adapter"
        eight_bit = spec.training.optimizer == "AdamW8bit"
        found.append(Method(True, 0, False, strategy, strategy, eight_bit))
        if not eight_bit:
            found.append(Method(True, 3, False, strategy, strategy, False))
    return found


def refuse_pins(spec: GRPOJobSpec) -> PlanRefused:
    """The refusal of pins that exclude one another."""
    pins = [f"reference.strategy {spec.reference.strategy}", f"adapter.use {spec.adapter.use}"]
    pins.append(f"training.optimizer {spec.training.optimizer}")
    if spec.reference.offload:
        pins.append(f"reference.offload.target {spec.reference.offload.target}")
    if spec.reference.sync:
        pins.append("reference.sync")
    return PlanRefused(
        PlanReason.INVALID_COMBINATION,
        f"no way of training honours {', '.join(pins)} together: 8-bit AdamW doesn't combine with ZeRO-3, NVMe needs "
        "it, and an adapter's reference is its own frozen base; set one of them to its default",
    )


def _adapter_only(spec: GRPOJobSpec) -> bool:
    """Whether the user asked for an adapter."""
    return spec.adapter.use == "Always" or spec.reference.strategy == "Adapter"


def _adapter_allowed(spec: GRPOJobSpec) -> bool:
    """Whether an adapter is consented to and its reference, the frozen base, is what was asked for."""
    if spec.adapter.use == "Never" or spec.reference.sync or spec.reference.offload:
        return False
    return spec.reference.strategy in ("Auto", "Adapter", "None")


def _full_methods(spec: GRPOJobSpec) -> list[Method]:
    """Families that train all parameters."""
    found = []
    stages: list[tuple[Literal[0, 2, 3], bool]] = [(0, False), (2, False), (2, True), (3, False), (3, True)]
    for zero, offload in stages:
        for strategy, reference in _references(spec, zero):
            bits = _eight_bit(spec, zero)
            found += [Method(False, zero, offload, strategy, reference, eight_bit) for eight_bit in bits]
    return found


def _references(spec: GRPOJobSpec, zero: int) -> list[tuple[Strategy, Strategy]]:
    """(strategy, its place in memory) that a stage can have: none without beta, no copy under ZeRO-3."""
    if spec.training.beta == 0:
        return [("None", "None")]
    wanted, offload = spec.reference.strategy, spec.reference.offload
    choices: list[tuple[Strategy, Strategy]] = []
    if zero == 3:
        choices.append(("Sharded", "Offload" if offload else "Sharded"))
        if wanted == "Offload":
            choices.append(("Offload", "Offload"))
    elif not offload:
        choices += [("Clone", "Clone"), ("Offload", "Offload")]
    elif offload.target == "CPU":
        choices.append(("Offload", "Offload"))
    return [choice for choice in choices if wanted in ("Auto", choice[0])]


def _eight_bit(spec: GRPOJobSpec, zero: int) -> list[bool]:
    """Optimizers to try: 8-bit AdamW is bitsandbytes' own and doesn't combine with ZeRO's partitions."""
    if spec.training.optimizer == "AdamW8bit":
        return [] if zero else [True]
    return [False, True] if spec.training.optimizer == "Auto" and not zero else [False]
