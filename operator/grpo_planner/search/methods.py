"""Methods: the ways of training that a job's pins allow, before any size or GPU is considered.

What is trained, how it is sharded and where the reference stays restrict each other. For example,
an adapter has its own reference, a Sharded one needs ZeRO-3, and 8-bit AdamW excludes ZeRO. All
such rules are here, so that the search can take every method that it is given.
"""

from dataclasses import dataclass
from typing import Literal

from grpo_api.job import GRPOJobSpec

from ..memory.setup import Strategy, ZeroStage
from ..result.formatting import sharding
from ..result.result import PlanReason, SpecRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of training: what is trained, how it is sharded and where the reference is."""

    lora: bool = False
    """An adapter is trained instead of all parameters."""
    zero: ZeroStage = 0
    offload: bool = False
    """Optimizer state and gradients live in host memory (ZeRO only)."""
    strategy: Strategy
    """The reference strategy as the user and the trainer know it."""
    reference: Strategy
    """The same as the memory model sees it: a Sharded reference with offload is `Offload`."""
    eight_bit: bool = False
    """AdamW's moments in 8 bits."""

    @property
    def tier(self) -> Literal[0, 1, 2]:
        """How far it departs from training all parameters with AdamW: 0 not, 1 in 8 bits, 2 an
        adapter only."""
        if self.lora:
            return 2
        return 1 if self.eight_bit else 0

    @property
    def may_offload_base(self) -> bool:
        """True if a frozen base lies whole on each GPU, which it may leave to a waking engine."""
        return self.lora and not self.zero

    @property
    def name(self) -> str:
        """For tables: `full ZeRO-2+offload, Clone`."""
        trained = "full 8-bit" if self.eight_bit else "full"
        if self.lora:
            trained = "LoRA"
        return f"{trained} {sharding(self.zero, offload=self.offload)}, {self.strategy}"


def methods(spec: GRPOJobSpec) -> list[Method]:
    """All methods that the spec's pins allow, simplest first; empty where the pins exclude one
    another."""
    allowed = [] if spec.is_adapter_requested else _full_methods(spec)
    if _adapter_allowed(spec):
        # Without a KL term nothing reads a reference.
        strategy: Strategy = "None" if spec.training.beta == 0 else "Adapter"
        eight_bit = spec.training.optimizer == "AdamW8bit"
        allowed.append(
            Method(lora=True, strategy=strategy, reference=strategy, eight_bit=eight_bit)
        )
        # ZeRO gives the optimizer one flat tensor, in which bitsandbytes can't find the embeddings
        # that it has to keep in 32 bits.
        if not eight_bit:
            allowed.append(Method(lora=True, zero=3, strategy=strategy, reference=strategy))
    return allowed


def conflicting_pins(spec: GRPOJobSpec) -> SpecRejected:
    """Why pins that exclude one another are rejected, with all of them named."""
    values = {
        "reference.strategy": spec.reference.strategy,
        "adapter.use": spec.adapter.use,
        "training.optimizer": spec.training.optimizer,
    }
    pins = [
        f"{path} {value}" for path, value in values.items() if value not in ("Auto", "IfNeeded")
    ]
    if spec.reference.offload:
        pins.append("reference.offload")
    if spec.reference.sync:
        pins.append("reference.sync")
    return SpecRejected(
        PlanReason.INVALID_COMBINATION,
        f"no way of training honours {', '.join(pins)} together: 8-bit AdamW doesn't combine with "
        "ZeRO, which gives "
        "the optimizer one flat tensor in which bitsandbytes can't keep embeddings and small "
        "tensors in 32 bits, and "
        "an adapter's reference is its own frozen base; set one of them to its default",
    )


def _adapter_allowed(spec: GRPOJobSpec) -> bool:
    """True if an adapter is consented to and its reference, the frozen base, is what was asked
    for."""
    # An adapter's reference is its own frozen base: it can neither move nor leave the GPU.
    if spec.adapter.use == "Never" or spec.reference.sync or spec.reference.offload:
        return False
    return spec.reference.strategy in ("Auto", "Adapter", "None")


def _full_methods(spec: GRPOJobSpec) -> list[Method]:
    """Methods that train all parameters."""
    # Offload is DeepSpeed's, so stage 0 has none. Stage 1 sends as many bytes as stage 2 and shards
    # less (Rajbhandari et al., arXiv 1910.02054, section 7).
    stages: list[tuple[ZeroStage, bool]] = [
        (0, False),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ]
    return [
        Method(
            zero=zero, offload=offload, strategy=strategy, reference=reference, eight_bit=eight_bit
        )
        for zero, offload in stages
        for strategy, reference in _references(spec, zero)
        for eight_bit in _eight_bit(spec, zero)
    ]


def _references(spec: GRPOJobSpec, zero: ZeroStage) -> list[tuple[Strategy, Strategy]]:
    """(strategy, its place in memory) that a stage can have: none without beta, no copy under
    ZeRO-3."""
    if spec.training.beta == 0:
        return [("None", "None")]
    wanted, offload = spec.reference.strategy, spec.reference.offload
    choices: list[tuple[Strategy, Strategy]] = []
    # A Clone under ZeRO-3 would be the one whole copy on a GPU that has room for a part only.
    if zero == 3:
        choices.append(("Sharded", "Offload" if offload else "Sharded"))
        if wanted == "Offload" or not offload:
            choices.append(("Offload", "Offload"))
    else:
        choices += [] if offload else [("Clone", "Clone")]
        choices.append(("Offload", "Offload"))
    return [choice for choice in choices if wanted in ("Auto", choice[0])]


def _eight_bit(spec: GRPOJobSpec, zero: ZeroStage) -> list[bool]:
    """Optimizers to try: 8-bit AdamW doesn't combine with ZeRO (docs/internals/memory-model.md,
    "Several ranks")."""
    if spec.training.optimizer == "AdamW8bit":
        return [] if zero else [True]
    return [False, True] if spec.training.optimizer == "Auto" and not zero else [False]
