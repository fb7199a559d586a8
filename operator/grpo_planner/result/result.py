"""PlanResult: the planner's whole answer, as `grpo plan -o json` prints it;
docs/reference/plan-schema.json
is its schema."""

from enum import StrEnum
from typing import Literal

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.base import Model


class PlanReason(StrEnum):
    """Why there is a plan, or none; also the reason of condition Planned."""

    PLANNED = "Planned"
    WAITING_FOR_GPUS = "WaitingForGPUs"
    INVALID_BATCH_SPLIT = "InvalidBatchSplit"
    UNKNOWN_MODEL = "UnknownModel"
    UNSUPPORTED_MODEL = "UnsupportedModel"
    INVALID_COMBINATION = "InvalidCombination"
    NO_GPUS = "NoGPUs"
    NOT_ENOUGH_GPUS = "NotEnoughGPUs"
    OUT_OF_DEVICE_MEMORY = "OutOfDeviceMemory"
    OUT_OF_HOST_MEMORY = "OutOfHostMemory"
    OUT_OF_EPHEMERAL_STORAGE = "OutOfEphemeralStorage"
    ONLY_ADAPTER_FITS = "OnlyAdapterFits"
    TOO_SLOW = "TooSlow"
    PLAN_EXCLUDED = "PlanExcluded"
    NO_FALLBACK = "NoFallback"


SPEC_ERRORS = frozenset(
    {
        PlanReason.INVALID_BATCH_SPLIT,
        PlanReason.INVALID_COMBINATION,
        PlanReason.UNKNOWN_MODEL,
        PlanReason.UNSUPPORTED_MODEL,
    }
)
"""Reasons that hold on whatever hardware: only another spec has a plan."""


class Rejection(Model):
    """Why a candidate was not chosen."""

    reason: Literal["DeviceMemory", "HostMemory", "Slower", "NoBetter", "NotNeeded"]
    """DeviceMemory and HostMemory: it does not fit. Slower, NoBetter: the objective prefers
    another. NotNeeded: it would train an adapter only, or keep moments in 8 bits, and that is not
    needed to fit."""
    message: str
    """The same with its numbers, as a sentence fragment."""
    phase: str = ""
    """The phase that needs most memory."""
    need_bytes: int = 0
    """What it needs, on the device or the host."""
    have_bytes: int = 0
    """What there is."""


class Candidate(ExecutionPlan):
    """One way to run the job as a plan with a verdict."""

    rejected: Rejection | None = None
    """Why it was not chosen; null for the chosen one."""

    @classmethod
    def from_plan(cls, plan: ExecutionPlan) -> "Candidate":
        """The chosen plan, which has been checked when it was made."""
        return cls.model_construct(**dict(plan), rejected=None)


class Change(Model):
    """A field with another value."""

    path: str
    """Field to change, such as `spec.training.maxCompletionLength`."""
    value: str
    """Its new value as YAML, which `--what-if` takes; `null` removes the field."""


class Fix(Model):
    """Changes of the spec, one or two, after which the job can be planned; verified by planning
    it."""

    changes: list[Change]
    """What to change, all of it together."""
    message: str
    """What it costs and what the plan then is."""


class Hardware(Model):
    """The smallest hardware that would do, by GPU memory in all, in steps of at most 10 minutes
    where any has such; verified by planning the job on it."""

    nodes: int
    """Nodes."""
    gpus_per_node: int
    """GPUs of each."""
    gpu_product: str
    """Label of the GPUs."""
    host_memory_bytes: int
    """Host memory that each node must have."""
    message: str
    """The same as a sentence, with what the plan there needs."""


class PlanResult(Model):
    """The planner's answer."""

    feasible: bool
    """Whether there is a plan on the nodes at hand, busy or not."""
    fits_now: bool = False
    """Whether the chosen plan fits the GPUs that are free now."""
    reason: PlanReason
    """One word for programs."""
    message: str
    """A sentence for the user, with numbers."""
    chosen: ExecutionPlan | None = None
    """The plan; null when nothing fits."""
    rule: str = ""
    """What decided on its number of GPUs; empty where nothing was compared."""
    candidates: list[Candidate] = []
    """What is worth comparing: the chosen one first, then what fits, then what does not."""
    changes: list[str] = []
    """What differs from what the user might expect to be trained."""
    fixes: list[Fix] = []
    """When nothing fits: the three cheapest changes that would make it fit, or the cheapest two
    together."""
    hardware: Hardware | None = None
    """When nothing fits: the smallest hardware that would do; null where none that is looked at
    does."""
    architecture: Literal["Exact", "Catalogue", "Estimated"] | None = None
    """Where the model's shape came from; null when it is unknown."""

    def with_disk_request(self, disk: int) -> "PlanResult":
        """Return the result with every plan's pods requesting `disk` bytes of ephemeral storage; 0
        changes nothing."""
        if not (disk and self.chosen):
            return self
        change = {"ephemeral_storage_bytes": disk}
        plan = self.chosen.model_copy(update=change)
        candidates = [candidate.model_copy(update=change) for candidate in self.candidates]
        return self.model_copy(update={"chosen": plan, "candidates": candidates})


class SpecRejected(ValueError):
    """The spec can't be planned at all; `reason` and the message say why."""

    def __init__(self, reason: PlanReason, message: str) -> None:
        """Keeps the reason beside the message."""
        super().__init__(message)
        self.reason = reason
