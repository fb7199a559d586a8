"""GRPOJob's status: conditions, the plan, progress, metrics and what became of the pods.

The half of the object that only the operator writes, and that kubectl, the CLI and dashboards read.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from ..plan.learned import Learned
from ..plan.plan import ExecutionPlan
from ..report.artifacts import Export, Where
from ..report.preflight import PreflightReport
from ..report.report import MAX_FINDINGS, Finding, Outcome, TrackerReport
from ..report.revisions import Generations, Revisions
from ..spec.checkpoint import ObjectStoreSpec
from ..text.base import MapList, Model
from ..text.contract import CLASS_KIND
from ..text.quantity import Count
from ..text.timing import Time
from .usage import Usage


class PreflightStatus(Model):
    """The preflight of one version of the spec. Another spec or another image is checked again."""

    digest: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{64}$")]
    """sha256 of the image and of the parts of the spec that were checked."""
    tries: Count = 0
    """Preflights that have ended; the pause before the next one doubles with each."""
    job_uid: Annotated[str, Field(max_length=64)] | None = None
    """uid of the Job of the last one that has ended."""
    time: Time | None = None
    """When that was."""
    report: PreflightReport | None = None
    """What the last one reported; absent where it made no report."""
    cause: Annotated[str, Field(max_length=512)] | None = None
    """Why there is no report."""
    blocked_since: Time | None = None
    """Since when something keeps the preflight, and not the job, from running."""
    given_up: bool = False
    """True if the job may start without having been checked."""


class ConditionType(StrEnum):
    """The conditions of a GRPOJob; they are the truth that `phase` is derived from."""

    ADMITTED = "Admitted"
    CHECKED = "Checked"
    PLANNED = "Planned"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    DEGRADED = "Degraded"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    READABLE = "Readable"
    RECOVERABLE = "Recoverable"
    HEALTHY = "Healthy"
    TRAINS_ADAPTER_ONLY = "TrainsAdapterOnly"
    ENGINE_FALLBACK = "EngineFallback"
    PROMPTS_DROPPED = "PromptsDropped"
    FINISHED = "Finished"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


class Phase(StrEnum):
    """The one word of the printer column, derived from the conditions."""

    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(Model):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is true."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that it was judged on."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[
        str,
        Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
    ]
    """One CamelCase word for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """A sentence that a user can act on."""


class ProgressStatus(Model):
    """How far the run is."""

    attempt: Annotated[int, Field(ge=1)] | None = None
    """The attempt that reported it."""
    step: Annotated[int, Field(ge=0)] = 0
    """Finished optimizer steps."""
    total_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of the whole run."""
    percent: Annotated[int, Field(ge=0, le=100)] = 0
    """Share of the steps that are finished."""
    summary: Annotated[str, Field(max_length=64)] = ""
    """`step/totalSteps`, for the printer column."""
    eta_seconds: Annotated[int, Field(ge=0)] | None = None
    """Predicted time to the end."""
    eta: Annotated[str, Field(max_length=16)] = ""
    """The same for the printer column, such as `1h12m`."""
    last_step_time: Time | None = None
    """When the last step finished."""
    stage: Annotated[str, Field(max_length=32)] | None = None
    """What the current attempt does, such as Downloading or Training; absent while none runs.
    Within a step it is that of the first report on it."""
    stage_since: Time | None = None
    """Since when, by the operator's clock."""
    fetched_bytes: Count | None = None
    """While it downloads: what is on the disk."""
    fetched_bytes_per_second: Count | None = None
    """While it downloads: how fast it comes."""
    expected_bytes: Count | None = None
    """While it downloads: what will be there, where known."""
    stage_end: Time | None = None
    """When the stage ends at this speed."""


class MetricsStatus(Model):
    """The run's last metrics, as text with four significant digits; NaN, +Inf or -Inf for what is
    no finite number."""

    kl: Annotated[str, Field(max_length=32)] | None = None
    """Mean KL between policy and reference."""
    reward: Annotated[str, Field(max_length=32)] | None = None
    """Mean weighted reward."""
    reward_std: Annotated[str, Field(max_length=32)] | None = None
    """Mean standard deviation of rewards within a group."""
    loss: Annotated[str, Field(max_length=32)] | None = None
    """Training loss."""
    grad_norm: Annotated[str, Field(max_length=32)] | None = None
    """Norm of the gradient before clipping."""
    completion_length: Annotated[str, Field(max_length=32)] | None = None
    """Mean tokens per completion."""
    engine_mismatch: Annotated[str, Field(max_length=32)] | None = None
    """Mean difference between the engine's and the trainer's log-probability of a token; absent
    without an engine."""
    weights_version: Count | None = None
    """Number of the weights that the engines sample with; absent without an engine."""
    phase_seconds: (
        Annotated[dict[str, Annotated[str, Field(max_length=32)]], Field(max_length=8)] | None
    ) = None
    """Seconds of the last reported step, slowest rank: sync, generate, reward, reference, forward,
    backward, step."""


class CheckpointStatus(Model):
    """The newest complete checkpoint, as the trainer reported it: a further attempt continues from
    it."""

    step: Count
    """Finished optimizer steps."""
    time: Time
    """When it was sealed, by the trainer's or the volume's clock."""
    bytes: Count
    """Size of all its files."""
    where: Where
    """Where it is; on a volume `pvc://CLAIM/FOLDER`."""


MAX_SHOWN_PODS = 512
"""Most pods that the status lists."""


class PodStatus(Model):
    """One pod of the current attempt."""

    name: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    index: Annotated[int, Field(ge=0)]
    """Its node rank, or the engine's number."""
    engine: bool | None = None
    """True for the pod of an engine; absent for one that trains."""
    node: Annotated[str, Field(max_length=253)] = ""
    """The Kubernetes node; empty while unbound."""
    phase: Annotated[str, Field(max_length=32)]
    """The pod's phase; Deleted once it is gone and reported no end."""
    reason: Annotated[str, Field(max_length=256)] = ""
    """Why it waits or ended."""


class PhaseMemory(Model):
    """Predicted against measured peak of allocated bytes on one GPU."""

    predicted_bytes: Annotated[int, Field(ge=0)]
    """The plan's."""
    measured_bytes: Annotated[int, Field(ge=0)]
    """torch.cuda.max_memory_allocated, the largest of all ranks."""
    ratio: Annotated[str, Field(max_length=16)]
    """Predicted / measured."""


class MemoryMeasurement(PhaseMemory):
    """Predicted against measured GPU memory: the highest peak, and each phase's."""

    phases: Annotated[dict[str, PhaseMemory], Field(max_length=8)] = Field(default_factory=dict)
    """By phase: load, sync, generate, reference, forward, backward, step."""
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    """torch.cuda.max_memory_reserved, the largest of all ranks."""
    predicted_device_bytes: Annotated[int, Field(ge=0)] = 0
    """What the plan says that the device must have: the peak, context, communicators and margin."""
    device_bytes: Annotated[int, Field(ge=0)] = 0
    """Used memory of the fullest GPU after the last step, as the driver reports it."""


MAX_ENDS = 10
"""Ends of attempts that the status remembers: enough to reach the longest pause between
restarts."""
MAX_AVOIDED_NODES = 16


class AttemptEnd(Model):
    """How one attempt ended."""

    attempt: Annotated[int, Field(ge=1)]
    """Its number."""
    reason: Annotated[str, Field(max_length=128)]
    """The result of its outcome, or why the gang was released."""
    counted: bool = False
    """Whether the restart after it counts against restarts.limit."""
    running_seconds: Annotated[int, Field(ge=0)] = 0
    """How long the whole gang ran."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node that the attempt ended on without an outcome of the trainer; empty with one, or if no
    node is known."""
    end_time: Time
    """When the operator saw it."""


MAX_ROLLBACKS = 2
"""Rollbacks of one run: a third batch on which it diverges is no accident of the data."""


class Rollback(Model):
    """An attempt that diverged, and what later ones leave out for it (spec.guard.onDivergence)."""

    attempt: Annotated[int, Field(ge=1)]
    """Its number."""
    reason: Annotated[str, Field(max_length=128)]
    """Diverged or DivergedKL."""
    skipped: Generations
    """What it diverged on."""


class ResumeSource(Model):
    """Where the checkpoints of spec.resumeFrom.grpoJob are."""

    grpo_job: Annotated[str, Field(max_length=63)]
    """The other GRPOJob."""
    uid: Annotated[str, Field(max_length=64)]
    """Its uid."""
    claim_name: Annotated[str, Field(max_length=253)] | None = None
    """The PersistentVolumeClaim with its checkpoints; absent where they are on an object store."""
    sub_path: Annotated[str, Field(max_length=512)] | None = None
    """Folder of the volume that it mounts."""
    store: ObjectStoreSpec | None = None
    """The object store with its checkpoints."""
    folder: Annotated[str, Field(max_length=253)]
    """Its folder there."""


class AppliedJobClass(Model):
    """A GRPOJobClass as an attempt uses it."""

    name: Annotated[str, Field(max_length=253)]
    """Its name."""
    generation: Annotated[int, Field(ge=0)]
    """Its generation."""
    spec: Annotated[
        dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    ]
    """Its spec then."""

    def __str__(self) -> str:
        """`GRPOJobClass h100 (generation 3)`, for messages; a file has no generation."""
        generation = f" (generation {self.generation})" if self.generation else ""
        return f"{CLASS_KIND} {self.name}{generation}"


class GRPOJobStatus(Model):
    """Written by the operator only."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this status answers."""
    phase: Phase | None = None
    """One word, derived from the conditions."""
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Reason of the first condition that is not well; absent while all are."""
    conditions: Annotated[list[Condition], Field(max_length=32), MapList("type")] = []
    """The state of the job."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Gang starts so far; the current attempt's number."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts after failures, as far as they count against restarts.limit."""
    uncounted_restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts after disruptions and other ends that don't count; see restarts.uncountedLimit."""
    retry: Annotated[int, Field(ge=0)] = 0
    """The spec.retry that was last acted on, or seen while the job had not failed."""
    ends: Annotated[list[AttemptEnd], Field(max_length=MAX_ENDS)] = []
    """How the last attempts ended, oldest first."""
    rollbacks: Annotated[list[Rollback], Field(max_length=MAX_ROLLBACKS)] = []
    """Attempts that diverged and were gone back from, oldest first; later ones leave out what they
    did so on. spec.retry keeps it."""
    avoided_nodes: Annotated[
        list[Annotated[str, Field(max_length=253)]], Field(max_length=MAX_AVOIDED_NODES)
    ] = []
    """Nodes that further attempts are kept away from: two in a row ended there without an outcome,
    or a rank on it was a straggler for long. A suspension clears it."""
    start_time: Time | None = None
    """When the first attempt was committed."""
    completion_time: Time | None = None
    """When the job succeeded or failed."""
    active_seconds: Annotated[int, Field(ge=0)] = 0
    """Time of finished attempts, for activeDeadlineSeconds."""
    attempt_start_time: Time | None = None
    """Since when the current attempt counts for activeDeadlineSeconds; absent while none is
    active."""
    passed_over: Annotated[int, Field(ge=0)] | None = None
    """Younger jobs of its priority that have started while this one waited for GPUs; absent for
    none."""
    job_uid: Annotated[str, Field(max_length=64)] | None = None
    """uid of the current attempt's Job, once it was created."""
    plan: ExecutionPlan | None = None
    """How the current attempt runs, and why."""
    job_class: AppliedJobClass | None = None
    """The current attempt's class."""
    resume_from: ResumeSource | None = None
    """What spec.resumeFrom.grpoJob was found to be, before the first attempt."""
    preflight: PreflightStatus | None = None
    """The preflight before the first attempt; absent without one."""
    learned: Learned | None = None
    """What the preflight and the attempts found; every later plan counts on it."""
    revisions: Revisions | None = None
    """Commits that the attempts use, as the first of them found them, and the fingerprint of the
    data."""
    progress: ProgressStatus | None = None
    """How far the run is."""
    metrics: MetricsStatus | None = None
    """The last metrics."""
    findings: Annotated[list[Finding], Field(max_length=MAX_FINDINGS)] | None = None
    """What is wrong with the run at its last reported step; absent where nothing is."""
    memory: MemoryMeasurement | None = None
    """Predicted against measured memory."""
    checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint."""
    export: Export | None = None
    """The trained model, once it is exported."""
    tracking: Annotated[list[TrackerReport], Field(max_length=8), MapList("name")] | None = None
    """The run in the trackers of spec.tracking."""
    outcome: Outcome | None = None
    """How the last attempt ended."""
    usage: Usage | None = None
    """What became of the GPUs' time; absent for a job on CPUs."""
    pods: Annotated[list[PodStatus], Field(max_length=MAX_SHOWN_PODS)] = []
    """Pods of the current attempt by index, those that train first; of an engine that was made
    again the last."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, if it has been written."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the condition is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"
