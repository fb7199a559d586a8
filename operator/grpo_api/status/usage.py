"""What became of the time of a job's GPUs: `status.usage`, which `grpo usage` prints and the
operator exports.

What each state means is in docs/explanation/usage.md. The sums follow from one record per attempt.
A record follows from what the API server reports of the attempt's pods, and what rank 0 reports of
its time.
"""

from typing import Annotated

from pydantic import Field

from ..text.base import Model
from ..text.timing import HOUR, Beginning, Clock, Seconds, Time

MAX_RECORDS = 6
"""Attempts with a record of their own: those that may still be corrected. Older ones are summed
up."""
MAX_PODS = 512
"""Most pods of a record: those of the largest gang."""

Amount = Annotated[float, Field(ge=0.0, le=1e15)]


class GPUSeconds(Model):
    """GPU-seconds by what they were spent on."""

    loading: Amount = 0.0
    """Until rank 0 had loaded model and data."""
    proving: Amount = 0.0
    """From there to the first step."""
    generating: Amount = 0.0
    """Generating completions."""
    scoring: Amount = 0.0
    """Waiting for rewards."""
    training: Amount = 0.0
    """The rest of the steps."""
    saving: Amount = 0.0
    """Checkpoints and the export."""
    lost: Amount = 0.0
    """From the last sealed checkpoint to the end of an attempt that did not succeed."""
    other: Amount = 0.0
    """Spent on nothing that the trainer knows of: images, start and end of containers, silence."""

    @property
    def total(self) -> float:
        """GPU-seconds of all states."""
        states: dict[str, float] = self.model_dump()
        return sum(states.values())

    @property
    def productive_seconds(self) -> float:
        """GPU-seconds of steps that count."""
        return self.generating + self.scoring + self.training

    @property
    def effective_share(self) -> str:
        """Effective training time ratio: the productive share of what was held; empty without
        any."""
        return f"{self.productive_seconds / self.total:.3f}" if self.total else ""

    def plus(self, more: "GPUSeconds") -> "GPUSeconds":
        """The sum, state by state, to the millisecond."""
        mine, others = self.model_dump(by_alias=False), more.model_dump(by_alias=False)
        return GPUSeconds(**{state: round(mine[state] + others[state], 3) for state in mine})


class PodTime(Model):
    """How long one pod of an attempt has held its GPUs."""

    name: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    bound_time: Time
    """When it was bound, by the operator's clock."""
    seconds: Seconds | None = None
    """From there to the end of its container; absent while it holds them."""


class EngineUsage(Model):
    """GPUs of an attempt's engines in pods of their own: the time of all of them is divided as the
    gang's is."""

    gpus: Annotated[int, Field(ge=1)]
    """GPUs of all engines."""
    replicas: Annotated[int, Field(ge=1)]
    """Engines, which have equally many of them."""
    gpu_product: Annotated[str, Field(max_length=128)] = ""
    """Their product."""
    gpu_hour_price: Amount | None = None
    """Price of one for an hour when the attempt was planned; absent without one."""
    pods: Annotated[list[PodTime], Field(max_length=MAX_PODS)] = []
    """Pods that were bound, by name; those that have ended and are gone are only counted."""
    gone_seconds: Seconds = 0.0
    """Seconds of these."""


class AttemptUsage(Model):
    """One attempt's GPUs, as long as it held them without a break."""

    attempt: Annotated[int, Field(ge=1)]
    """Its number."""
    gpus: Annotated[int, Field(ge=1)]
    """GPUs of the whole gang."""
    nodes: Annotated[int, Field(ge=1)]
    """Its pods, which have equally many of them."""
    gpu_product: Annotated[str, Field(max_length=128)] = ""
    """Their product."""
    gpu_hour_price: Amount | None = None
    """Price of one for an hour when the attempt was planned; absent without one."""
    start_time: Time
    """When the operator committed the attempt, or saw it begin again."""
    ended: Annotated[str, Field(max_length=128)] = ""
    """Result of its outcome, or why the gang gave its GPUs back; empty while it is to run."""
    pods: Annotated[list[PodTime], Field(max_length=MAX_PODS)] = []
    """Pods that were bound, by name; those that have ended and are gone are only counted."""
    gone_seconds: Seconds = 0.0
    """Seconds of these."""
    engines: EngineUsage | None = None
    """Its engines' GPUs; absent where they have none of their own."""
    lead_seconds: Seconds | None = None
    """From bound to the start of rank 0's clock, as far as known."""
    clock: Clock = Clock()
    """Rank 0's time, as it last reported it."""
    sealed: Clock = Clock()
    """The same at the last checkpoint that it sealed."""
    began_at: Beginning | None = None
    """Where it began: what earlier attempts did after that is lost. Absent until known."""

    @property
    def all_pods(self) -> list[PodTime]:
        """Its pods and those of its engines."""
        return [*self.pods, *(self.engines.pods if self.engines else ())]


class UsageSum(Model):
    """Attempts that have no record any more."""

    attempts: Annotated[int, Field(ge=0)] = 0
    """How many there are."""
    gpu_seconds: GPUSeconds = GPUSeconds()
    """Their GPU-seconds."""
    cost: Amount | None = None
    """Their cost."""


class Usage(Model):
    """What a job's GPUs did, and what they cost."""

    as_of: Time
    """The moment until which time is counted: that of the last news of the job."""
    gpu_seconds: GPUSeconds = GPUSeconds()
    """Of all attempts, by state."""
    held_gpu_seconds: Amount = 0.0
    """All of them together."""
    effective: Annotated[str, Field(max_length=16)] = ""
    """Effective training time ratio: the share of generating, scoring and training in them; empty
    without any."""
    cost: Amount | None = None
    """Price of the GPU-seconds of attempts whose product has a price, in its currency; absent
    without any."""
    queued_seconds: Seconds = 0.0
    """Seconds in which the job was to run and held no GPU, without the wait that goes on."""
    waiting_since: Time | None = None
    """Since when it waits; absent while it holds GPUs, is suspended or has ended."""
    attempts: Annotated[list[AttemptUsage], Field(max_length=2 * MAX_RECORDS)] = []
    """What the sums are made of, oldest first."""
    earlier: UsageSum = UsageSum()
    """The attempts before these."""

    @property
    def description(self) -> str:
        """The sums in a sentence for people."""
        held_seconds = self.held_gpu_seconds
        shares = []
        for state, seconds in self.gpu_seconds.model_dump(by_alias=False).items():
            if seconds and held_seconds:
                shares.append(f"{state} {100 * seconds / held_seconds:.0f} %")
        parts = ", ".join(shares) or "none"
        effective = self.effective or "0"
        cost = "" if self.cost is None else f"; cost {self.cost:.2f}"
        return f"{held_seconds / HOUR:.2f} GPU-hours, effective {effective}: {parts}{cost}"
