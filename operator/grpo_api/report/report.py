"""All that a trainer may say back: Progress while it runs, and Outcome when it ends, also as
an exit code.

The typed way back of the contract between operator and pod: the trainer writes it, the operator and
the CLI read it.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ..spec.model import Architecture
from ..text.base import Model
from ..text.quantity import MAX_COUNT, Count
from ..text.timing import Account, Clock, Seconds
from .artifacts import Checkpoint, Export
from .revisions import Generations, Revisions

MESSAGE_CHARACTERS = 3072
"""Longest message of an Outcome; the rest of a termination message is for its other fields."""
MAX_PROBLEM = 512
"""Longest text of what is wrong with a run that goes on."""
MAX_STEPS = 4
"""Most steps, beside the attempt's first, of which a Progress tells when they were: of every Nth,
more than pass between two questions. Reading one takes nearly half as long as reading the rest of a
Progress."""
MAX_METRICS = 16
"""Most metrics that an Outcome carries."""
LOAD = "load"
"""What comes before the first step, as a phase of memory; it takes its time once, so it is not a
phase of a step."""
STEP_PHASES = ("sync", "generate", "reward", "reference", "forward", "backward", "step")
"""The phases of a step, in its order, the sync of an engine's weights first; keys of
`Progress.memory` and values of the metrics' label `step_phase`."""


Stage = Literal[
    "PullingImage", "Mounting", "Importing", "Connecting", "WaitingForHub", "Downloading",
    "Loading", "Compiling", "Proving", "Training", "Generating", "Scoring", "Saving", "Exporting",
    "Evaluating",
]  # fmt: skip
"""What an attempt does; hang_timeouts.py says for how long. The operator sees the first two on the
pods, rank 0 reports the others. Compiling is the construction of a colocated engine; some of
Proving follows it."""
STEP_STAGES = ("Training", "Generating", "Scoring")
"""Stages within a step: only a finished step is progress of them."""
WaitTarget = Literal["Hub", "Rewards", "Store", "Engines"]
"""What a run may have to wait for."""

MAX_FINDINGS = 32
MetricKey = Annotated[str, Field(min_length=1, max_length=128)]
MetricValue = Annotated[float, Field(allow_inf_nan=True)]
"""What was logged: NaN and infinity are values, too."""
_AS_TEXT = ConfigDict(ser_json_inf_nan="strings")
"""JSON has no word for them: they become the texts NaN, Infinity and -Infinity."""


class Result(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "Succeeded"
    OUT_OF_MEMORY = "OutOfMemory"
    OUT_OF_DISK = "OutOfDisk"
    HANG = "Hang"
    DIVERGED = "Diverged"
    DIVERGED_KL = "DivergedKL"
    BAD_INPUT = "BadInput"
    WEIGHTS_DIFFER = "WeightsDiffer"
    REWARD_ERROR = "RewardError"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    WEIGHT_SYNC_TIMEOUT = "WeightSyncTimeout"
    ENGINE_WEIGHTS_DIFFER = "EngineWeightsDiffer"
    ENGINE_FAILED = "EngineFailed"
    ENGINE_MISMATCH = "EngineMismatch"
    ENGINE_LOST = "EngineLost"
    STOPPED_ON_FINDING = "StoppedOnFinding"
    PREEMPTED = "Preempted"
    ERROR = "Error"


EXIT_CODES = {
    Result.SUCCEEDED: 0,
    Result.ERROR: 1,
    Result.OUT_OF_MEMORY: 40,
    Result.HANG: 41,
    Result.DIVERGED_KL: 42,
    Result.BAD_INPUT: 43,
    Result.WEIGHTS_DIFFER: 44,
    Result.REWARD_ERROR: 45,
    Result.RENDEZVOUS_TIMEOUT: 46,
    Result.DIVERGED: 47,
    Result.WEIGHT_SYNC_TIMEOUT: 48,
    Result.ENGINE_WEIGHTS_DIFFER: 49,
    Result.ENGINE_MISMATCH: 50,
    Result.ENGINE_LOST: 51,
    Result.ENGINE_FAILED: 52,
    Result.OUT_OF_DISK: 53,
    Result.STOPPED_ON_FINDING: 54,
    Result.PREEMPTED: 143,
}
"""Exit code of a training process per result; 143 is 128 + SIGTERM. Codes outside are the kernel's
or the shell's."""


MAX_FRAMES = 24
FRAME_CHARACTERS = 160


class Standstill(Model):
    """Where a process stood that made no progress."""

    silent_seconds: Seconds
    """Time without a sign of life of this rank, by its own clock."""
    waiting: bool = False
    """Whether it waited for other ranks, in a collective: then the cause is another."""
    frames: Annotated[
        list[Annotated[str, Field(max_length=FRAME_CHARACTERS)]], Field(max_length=MAX_FRAMES)
    ] = []
    """Of its main thread's stack, innermost first."""


class MemoryShortage(Model):
    """What a process lacked memory for."""

    phase: (
        Literal["load", "sync", "generate", "reward", "reference", "forward", "backward", "step"]
        | None
    ) = None
    """The phase of a step, or load for all before the first; absent where the process could not
    say."""
    memory: Literal["Device", "Host"] = "Device"
    """Whose memory it was."""
    requested_bytes: Count = 0
    """Size of the allocation that failed; 0 where the error did not name it."""
    allocated_bytes: Count = 0
    """Peak of what the process had by then in that phase, on the device or the host."""


EngineCause = Literal["NotStarted", "Missing", "Unprovable"]
"""Why an engine failed. NotStarted: vLLM raised an error, hung or crashed before its first
completions. Missing: the image has no vLLM. Unprovable: the weights of this model in an engine
can't be proven."""


class Outcome(Model):
    """How a process ended: the termination message, and a durable file beside the checkpoints."""

    model_config = _AS_TEXT

    result: Result
    """The class of the end."""
    rank: Count = 0
    """Global rank of the process that says so."""
    step: Count = 0
    """Last finished optimizer step."""
    total_steps: Count = 0
    """Steps of the whole run; 0 if the process ended before it knew."""
    attempt: Count = 0
    """The attempt that ended."""
    diverged_on: Generations | None = None
    """For Diverged and DivergedKL: what the run trained on when it did, and may go on without."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(min_length=1, max_length=32, pattern="^[a-z0-9_]+$")], MetricValue
        ],
        Field(max_length=MAX_METRICS),
    ] = Field(default_factory=dict)
    """Last value per metric, by the keys of grpo_api.report.training_metrics. status.outcome has
    those that are finite."""
    revisions: Revisions = Field(default_factory=dict)
    """Commits and fingerprint of what was trained, as far as known."""
    message: Annotated[str, Field(max_length=MESSAGE_CHARACTERS)] = ""
    """What happened and what to do, in a sentence."""
    standstill: Standstill | None = None
    """Where it stood, if it had made no progress for a while."""
    shortage: MemoryShortage | None = None
    """For OutOfMemory: what there was no memory for, where the process could say so."""
    engine_cause: EngineCause | None = None
    """For EngineFailed: why; absent where the process could not say."""
    checkpoint_step: Count | None = None
    """For OutOfMemory: step of the newest complete checkpoint, 0 for none; absent where it is not
    known."""
    account: Account | None = None
    """What the process did with its time."""
    export: Export | None = None
    """The exported model; absent where none was kept. In the status it is status.export."""
    checkpoint: Checkpoint | None = None
    """The run's newest complete checkpoint, where it is known. In the status it is
    status.checkpoint."""


class StepTime(Model):
    """When a step was: rank 0's time by part at its beginning and at its end."""

    step: Count
    """Its number, from 1."""
    began: Clock
    """When the step before it was over."""
    ended: Clock
    """When it was over, and the checkpoint written after it, if there was one."""


class Wait(Model):
    """What a run waits for, because it does not answer."""

    target: Annotated[str, Field(max_length=32)]
    """Hub, Rewards, Store or Engines."""
    seconds: Seconds
    """For how long, by the clock of the process that reports it."""
    why: Annotated[str, Field(max_length=MAX_PROBLEM)]
    """Who does not answer, and how the last try failed."""


class Finding(Model):
    """What is wrong with a run, by the numbers of its steps (grpo_api/findings/)."""

    finding: Annotated[str, Field(max_length=64, pattern="^[A-Z][A-Za-z]*$")]
    """Its name, such as EntropyCollapsed; docs/reference/findings.md lists them."""
    since: Count
    """Step from which on the run was beyond the limit."""
    confidence: Annotated[float, Field(ge=0, le=1)]
    """0.5 at the limit, towards 1 far beyond it."""
    evidence: Annotated[dict[MetricKey, float], Field(max_length=16)] = Field(default_factory=dict)
    """The numbers that show it."""
    advice: Annotated[str, Field(max_length=MAX_PROBLEM)] = ""
    """What people change then."""
    pod: Annotated[str, Field(max_length=253)] | None = None
    """Pod of the rank that is meant."""
    node: Annotated[str, Field(max_length=253)] | None = None
    """Its node."""


MAX_URL = 512
URL_PATTERN = r"^https?://[-.a-zA-Z0-9]+(:[0-9]{1,5})?(/[-._~%+=,/#a-zA-Z0-9]*)?$"
"""A page that a user may open: a pod's word is not trusted, so no user, no query and no script."""
MAX_TRACKER_PROBLEM = 300


class TrackerReport(Model):
    """A tracker and the current attempt."""

    name: Annotated[str, Field(min_length=1, max_length=32, pattern="^[a-z]+$")]
    """As in spec.tracking."""
    run_id: Annotated[str, Field(max_length=256)] = ""
    """Its id of the run; empty until it has answered."""
    url: Annotated[str, Field(max_length=MAX_URL, pattern=URL_PATTERN)] | None = None
    """Its page, if it has one."""
    lost_rows: Count = 0
    """Steps that it did not get."""
    problem: Annotated[str, Field(max_length=MAX_TRACKER_PROBLEM)] = ""
    """Why; empty while it gets them."""


class Progress(Model):
    """`GET /progress` of rank 0. Keys that the step did not log are absent, never zero."""

    model_config = _AS_TEXT

    attempt: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """The attempt that reports."""
    step: Count = 0
    """Finished optimizer steps."""
    total_steps: Count = 0
    """Steps of the whole run; 0 until known."""
    epoch: Annotated[float, Field(ge=0.0)] | None = None
    """Passes over the dataset."""
    stage: Annotated[str, Field(max_length=32)] = "Importing"
    """One of Stage; images of other versions may have others."""
    stage_seconds: Seconds = 0.0
    """For how long, by the clock of the process that reports it."""
    waiting: Wait | None = None
    """What it waits for longest; absent while all that it asks answer."""
    events: Count = 0
    """Signs of progress so far, of all ranks whose reports have reached rank 0: finished steps,
    changes of stage, parts of long work. A reader compares two values of this count, so the clocks
    need not agree."""
    fetched_bytes: Count = 0
    """Bytes on the disk of the model or dataset that is being fetched of the hub, or was last."""
    expected_bytes: Count = 0
    """Bytes that will be there once it is complete; 0 where nobody knows."""
    fetched_bytes_per_second: Count = 0
    """How fast they came in the last half minute; 0 while nothing is downloaded."""
    revisions: Revisions = Field(default_factory=dict)
    """Commits and fingerprint of what is trained, once known."""
    architecture: Architecture | None = None
    """The shape of the model, once it is loaded; absent where it is no decoder of the usual
    kind."""
    resumed_from_step: Count = 0
    """Step of the checkpoint that the attempt began at; 0 for a fresh start."""
    checkpoint: Checkpoint | None = None
    """The run's newest complete checkpoint; absent for none, and until the attempt knows."""
    checkpoint_problem: Annotated[str, Field(max_length=MAX_PROBLEM)] = ""
    """Why the last checkpoint could not be written; empty once one could."""
    rdma_problem: Annotated[str, Field(max_length=MAX_PROBLEM)] = ""
    """Why the ranks' data does not go by RDMA although the job asks for it; empty where nothing
    shows that."""
    findings: Annotated[list[Finding], Field(max_length=MAX_FINDINGS)] = []
    """What is wrong with the run at the last step, the most urgent first."""
    last_step_time: Seconds | None = None
    """Unix time of the last finished step, in seconds."""
    seconds_per_step: Seconds | None = None
    """Mean of the recent steps."""
    metrics: Annotated[dict[MetricKey, MetricValue], Field(max_length=1024)] = Field(
        default_factory=dict
    )
    """Last value per metric, by the keys of grpo_api.report.training_metrics; as text where that
    was no finite number."""
    memory: Annotated[dict[MetricKey, Count], Field(max_length=64)] = Field(default_factory=dict)
    """Largest of all ranks, in bytes: peak of what torch allocated on the GPU by phase, most that
    it `reserved`, and what was used of the `device` and of the `host` after the last step. On CPUs
    there is only `host`."""
    startup_seconds: Annotated[dict[MetricKey, Seconds], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Time from container start to first step, by part."""
    account: Account | None = None
    """What rank 0 did with its time so far."""
    trackers: Annotated[list[TrackerReport], Field(max_length=8)] = Field(default_factory=list)
    """How the trackers of spec.tracking follow the run."""
    steps: Annotated[list[StepTime], Field(max_length=MAX_STEPS + 1)] = Field(default_factory=list)
    """Steps that are over, oldest first: the attempt's first and the newest of every Nth; empty
    unless asked for."""

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the last step at the pace of the recent ones; None until the steps are known
        and were timed."""
        if not self.seconds_per_step or not self.total_steps:
            return None
        return self.seconds_per_step * max(0, self.total_steps - self.step)
