"""What a job's attempts measured: the model's shape, the speed of the links, memory that a plan
lacked, and engines that failed.

The operator writes it into status.learned: shape and links once an attempt reports them, memory
after an OutOfMemory, engines after an EngineFailed or EngineMismatch. Every later plan of the job
uses it, also those of the CLI.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..report.preflight import PromptLengths
from ..spec.model import Architecture
from ..text.base import Model
from ..text.quantity import MAX_COUNT, Count

MAX_LENGTH = 1048576
"""Most tokens of a prompt or a completion, as in spec.training."""
MAX_REPLANS = 3
"""New plans that a job gets after OutOfMemory before it fails: then more than the plan is wrong."""
HOST = "host"
"""Key of host memory among the phases of device memory."""

MemoryKey = Literal["load", "sync", "generate", "reference", "forward", "backward", "step", "host"]


class LearnedMemory(Model):
    """What the memory model says of a plan, and the least that the plan turned out to need."""

    predicted_bytes: Count
    """The model's, for the plan that ran out of memory."""
    needed_bytes: Count
    """What it had allocated and asked for; more than there was."""

    @property
    def factor(self) -> float:
        """By how much the model is too low; at least 1."""
        return max(1.0, self.needed_bytes / max(1, self.predicted_bytes))


class Shortfall(Model):
    """One plan that ran out of memory."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that ran so."""
    where: MemoryKey
    """The phase of a step, or host."""
    tried: Annotated[str, Field(max_length=256)]
    """How it ran, in a few words."""
    needed_bytes: Count
    """What it needed at least: of a GPU, or of host memory per pod."""
    usable_bytes: Count
    """What there was; 0 where nobody knows."""
    checkpoint_step: Count | None = None
    """Step of the newest complete checkpoint by then, 0 for none; absent where it is not known."""


class MeasuredLinks(Model):
    """How fast the ranks of an attempt were connected."""

    gpu_product: Annotated[str, Field(max_length=128)]
    """GPU product of their nodes, as the label says."""
    nodes: Annotated[int, Field(ge=1)]
    """Nodes that they were on."""
    bytes_per_second: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Bus bandwidth of an all-reduce before the first step: what each rank sends and receives."""


class MeasuredStep(Model):
    """How long completions and steps of an attempt were, and what its plan would have said."""

    gpu_product: Annotated[str, Field(max_length=128)]
    """GPU product of its nodes."""
    completion_length: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
    """Mean tokens of a completion."""
    generation_seconds: Annotated[float, Field(ge=0)]
    """Seconds that a step sampled."""
    training_seconds: Annotated[float, Field(ge=0)]
    """Seconds that a step trained, with log-probabilities."""
    predicted_generation_seconds: Annotated[float, Field(ge=0)]
    """What the time model says of the same sampling, with that length."""
    predicted_training_seconds: Annotated[float, Field(ge=0)]
    """What it says of the same training."""

    @property
    def generation_factor(self) -> float:
        """By how much sampling takes longer than the model says."""
        return _factor(self.generation_seconds, self.predicted_generation_seconds)

    @property
    def training_factor(self) -> float:
        """By how much training takes longer than the model says."""
        return _factor(self.training_seconds, self.predicted_training_seconds)

    def is_near(self, other: "MeasuredStep") -> bool:
        """Whether a plan by the other would be much the same."""
        pairs = (
            (self.completion_length, other.completion_length),
            (self.generation_factor, other.generation_factor),
            (self.training_factor, other.training_factor),
        )
        is_same_product = self.gpu_product == other.gpu_product
        return is_same_product and all(
            abs(value - other_value) <= NEAR * other_value for value, other_value in pairs
        )


NEAR = 0.1
"""Share by which a step may differ from what is known before it is learned again: a status must not
be written for every step."""
MOST_FACTOR = 20.0
"""Largest factor that is believed: a step that waited for rewards or for a cold cache tells
nothing."""


def _factor(measured: float, predicted: float) -> float:
    """Measured by predicted, within what can be believed; 1 where either is missing."""
    if not measured or not predicted:
        return 1.0
    return min(MOST_FACTOR, max(1 / MOST_FACTOR, measured / predicted))


Rung = Literal["ModelRunnerV1", "Transformers"]
"""What samples the completions after an engine failed (spec.generation.fallback), first one first.
ModelRunnerV1: vLLM without model runner V2, CUDA graphs and sleep, as tests on CPUs run it."""
MAX_ENGINE_FAILURES = 2
"""Engine failures that a job answers: each rung follows one, and Transformers has no engine."""


class EngineFailure(Model):
    """An engine that did not start or computed other numbers, and the rung that answers it."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that it ended."""
    reason: Literal["EngineFailed", "EngineMismatch"]
    """The attempt's result."""
    message: Annotated[str, Field(max_length=512)]
    """Why, in the trainer's words."""
    rung: Rung
    """The rung that later attempts begin at; the next one where this one does not fit."""
    gpu_seconds: Annotated[float, Field(ge=0)] | None = None
    """Predicted GPU-seconds of a step by the plan that failed; absent where nobody can say."""


class LearnedPrompts(Model):
    """Tokens of the dataset's first prompts, as the preflight measured them."""

    mean: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
    """Mean."""
    p95: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
    """95th percentile."""

    @classmethod
    def from_report(cls, lengths: PromptLengths | None) -> "LearnedPrompts | None":
        """Those of a preflight's report; None where it measured none."""
        if lengths is None or not lengths.rows:
            return None
        mean, p95 = (min(MAX_LENGTH, max(1, round(n))) for n in (lengths.mean, lengths.p95))
        return cls(mean=mean, p95=p95)


class Learned(Model):
    """What a job has learned of its model, of its GPUs' links, of the memory that it needs and of
    engines that failed."""

    architecture: Architecture | None = None
    """The model's shape as the last attempt loaded it, before that as the preflight read it;
    `memory` is held against it."""
    has_vllm: bool | None = None
    """True if spec.image can import vLLM, as the preflight found; absent where nobody looked."""
    prompts: LearnedPrompts | None = None
    """Lengths of the prompts, for times and an engine's cache."""
    links: MeasuredLinks | None = None
    """The links of the last attempt on several GPUs; what is declared of nodes comes first."""
    step: MeasuredStep | None = None
    """Lengths and seconds of the last steps that differ from what was known."""
    memory: Annotated[dict[str, LearnedMemory], Field(max_length=8)] = Field(default_factory=dict)
    """By phase, bytes of one GPU; by host, bytes of one process."""
    shortfalls: Annotated[list[Shortfall], Field(max_length=MAX_REPLANS + 1)] = []
    """The plans that ran out of memory, oldest first; spec.retry empties the list."""
    engine_failures: Annotated[list[EngineFailure], Field(max_length=MAX_ENGINE_FAILURES)] = []
    """The engines that failed, oldest first. spec.retry empties this list."""

    @property
    def rung(self) -> Rung | None:
        """The rung that a plan begins at; None while no engine has failed."""
        return self.engine_failures[-1].rung if self.engine_failures else None

    def factor(self, key: str) -> float:
        """By how much the memory model is too low there; 1 where nothing was learned."""
        learned_memory = self.memory.get(key)
        return learned_memory.factor if learned_memory else 1.0

    def last_shortfall_of(self, attempt: int) -> Shortfall | None:
        """Return this attempt's shortfall if it is the latest one; None otherwise."""
        return next(
            (shortfall for shortfall in self.shortfalls[-1:] if shortfall.attempt == attempt), None
        )

    def last_engine_failure_of(self, attempt: int) -> EngineFailure | None:
        """Return this attempt's engine failure if it is the latest one; None otherwise."""
        return next(
            (failure for failure in self.engine_failures[-1:] if failure.attempt == attempt), None
        )

    def has_failed_plan_of(self, attempt: int) -> bool:
        """Whether this attempt's plan would fail again: it lacked memory, or its engine failed."""
        return bool(self.last_shortfall_of(attempt) or self.last_engine_failure_of(attempt))
