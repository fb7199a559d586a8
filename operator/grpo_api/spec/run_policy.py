"""`spec.placement`, `guard` and `restarts`: where a job runs, and when it is given up."""

from typing import Annotated, Literal

from pydantic import Field

from ..text.base import Model, Rule, exactly_one
from ..text.contract import MAX_JOB_NAME
from ..text.names import GPUProduct, LabelKey, Labels, LabelValue, Name, SubPath, inside_rule
from ..text.quantity import ByteQuantity

FailedResult = Literal[
    "OutOfMemory",
    "OutOfDisk",
    "Hang",
    "Diverged",
    "DivergedKL",
    "BadInput",
    "WeightsDiffer",
    "RewardError",
    "RendezvousTimeout",
    "WeightSyncTimeout",
    "EngineWeightsDiffer",
    "EngineFailed",
    "EngineMismatch",
    "EngineLost",
    "Preempted",
    "StoppedOnFinding",
    "Error",
]
"""The results of an Outcome (report.Result) other than Succeeded; a test holds the two together."""

FindingName = Literal[
    "EntropyCollapsed",
    "EntropyExploding",
    "NoSignal",
    "Truncating",
    "LengthExploding",
    "RewardFalling",
    "RewardHacking",
    "NotLearning",
    "KLRising",
    "StepsTooLarge",
    "WaitingForRewards",
    "EngineDrift",
    "Straggler",
    "CheckpointSlow",
    "CheckpointFailing",
    "NoReward",
]
"""What rank 0 may find in the steps of a run; docs/reference/findings.md."""

EndReason = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$")
]
"""A reason as Kubernetes writes it into the status of pods and containers."""

MOST_PROCESSES = 64
"""Training processes of a pod on CPUs, or of a gang on one machine."""
GPU_PROCESS_MILLICPU = 250
"""Least default CPU request per GPU, and that of plans which say none: its process mostly waits for
the GPU, and without a limit it may use what is idle."""


class GPURange(Model):
    """How many GPUs the plan may take."""

    RULES = (Rule("!has(self.max) || self.min <= self.max", "max must be at least min"),)

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Fewest GPUs. Unset: 1."""
    max: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most GPUs. Unset: as many as `objective` asks for."""


class Toleration(Model):
    """A Kubernetes toleration."""

    RULES = (
        Rule(
            "self.operator == 'Exists' && !has(self.value) || "
            "self.operator != 'Exists' && has(self.key)",
            "operator Exists takes no value; operator Equal needs key",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect NoExecute",
        ),
    )

    key: LabelKey | None = None
    """Taint key. Unset with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists or Equal. Unset: Equal."""
    value: LabelValue | None = None
    """Taint value for Equal. Unset: empty."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect. Unset: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=31536000)] | None = None
    """For NoExecute, seconds to stay. Unset: forever."""


Objective = Literal["Balanced", "Fastest", "FewestGPUs", "Cheapest"]
"""What a plan is chosen by."""


class PlacementSpec(Model):
    """Where the job may run. The plan chooses within these limits."""

    RULES = (
        Rule(
            "self.accelerator == 'GPU' || !has(self.gpus) && !has(self.gpuProduct) && "
            "!has(self.gpuMemory)",
            "gpus, gpuProduct and gpuMemory belong to accelerator GPU; remove them for CPU",
        ),
        Rule(
            "self.accelerator == 'CPU' || !has(self.processesPerNode)",
            "processesPerNode belongs to accelerator CPU; every GPU gets one process",
        ),
        Rule(
            (
                "!has(self.nodes) || !has(self.gpus) || !has(self.gpus.max) || self.gpus.max >= "
                "self.nodes"
            ),
            "gpus.max must be at least nodes: every node of the gang needs a GPU",
        ),
        Rule(
            "self.provisioning == 'WhenFree' || self.accelerator == 'GPU' && has(self.gpuProduct) "
            "&& has(self.gpusPerNode) && has(self.nodes) && size(self.nodeSelector) > 0",
            "provisioning CreatePods asks for nodes that nobody has seen: declare gpuProduct, "
            "gpusPerNode and nodes, and a nodeSelector that the autoscaler knows",
        ),
        Rule(
            "self.provisioning == 'WhenFree' || !has(self.gpus) && !has(self.queueName)",
            "provisioning CreatePods takes gpusPerNode on each of the nodes, without Kueue: "
            "remove gpus and queueName",
        ),
        Rule(
            "self.provisioning == 'CreatePods' || !has(self.gpusPerNode)",
            "gpusPerNode belongs to provisioning CreatePods; otherwise the plan chooses within "
            "gpus and nodes",
        ),
    )

    accelerator: Literal["GPU", "CPU"] = "GPU"
    """GPU, or CPU for small models and tests. Unset: GPU."""
    gpus: GPURange | None = None
    """How many GPUs. Unset: at least 1, at most what `objective` asks for."""
    nodes: Annotated[int, Field(ge=1, le=512)] | None = None
    """Exact number of nodes (one pod each). Unset: the plan chooses; 1 for CPU."""
    processes_per_node: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | None = None
    """Training processes per pod for accelerator CPU. Unset: 1. GPUs run one process each."""
    gpu_product: GPUProduct | None = None
    """Only GPUs with this `nvidia.com/gpu.product` label. A prefix or a short name such as `H100`
    will do. Unset: any one product."""
    gpu_memory: ByteQuantity | None = None
    """Memory of one GPU, for nodes without GPU-feature-discovery labels. Unset: from the labels."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that nodes must have. Unset: any node."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Tolerations of the pods; GPU taints (`nvidia.com/gpu`, `amd.com/gpu`) are always tolerated.
    Unset: none."""
    objective: Objective = "Balanced"
    """What the plan optimises. Balanced: more GPUs as long as they shorten a step at least as much
    as they raise its GPU-seconds. Cheapest: the least price of a step, on GPUs with a price
    (docs/explanation/usage.md). To all but Fastest a step counts as 5 % longer where it fills more
    than 80 % of a GPU, 25 % above 90 %, 30 % above 97 %, 25 % with an offloaded optimizer or
    several nodes. Unset: Balanced."""
    allow_slow: bool = False
    """Run although a step takes more than 6 hours, or all steps more than 90 days. Unset: false,
    such a plan is refused."""
    queue_name: Name | None = None
    """Kueue LocalQueue; Kueue then admits the job. Unset: the operator admits it when its whole
    gang fits."""
    priority_class_name: Name | None = None
    """PriorityClass of the pods and of the job's place in the queue. Unset: the cluster's
    default."""

    provisioning: Literal["WhenFree", "CreatePods"] = "WhenFree"
    """WhenFree: pods are created when their GPUs are free. CreatePods: at the gang's turn although
    nothing is free, so that a cluster autoscaler adds the declared nodes. Unset: WhenFree."""
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """For CreatePods, GPUs of one node, all of which a pod takes. Unset: the plan chooses."""
    provisioning_timeout_seconds: Annotated[int, Field(ge=30, le=86400)] = 900
    """For CreatePods, longest wait for the nodes; then the gang is released whole, and asks again
    after a pause that grows. Unset: 900 s."""

    @property
    def declared_gpus(self) -> int | None:
        """GPUs of the gang where the nodes are declared."""
        if not (self.nodes and self.gpus_per_node):
            return None
        return self.nodes * self.gpus_per_node

    def default_cpu(self, processes: int) -> str:
        """Return the CPU request, as a resource.Quantity, of a pod with `processes` processes if
        the spec sets none."""
        return (
            str(processes) if self.accelerator == "CPU" else f"{GPU_PROCESS_MILLICPU * processes}m"
        )


GRPOJobName = Annotated[
    str, Field(min_length=1, max_length=MAX_JOB_NAME, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


class ResumeFromSpec(Model):
    """Checkpoints of another run, with the newest of which this one begins; without any, its
    exported adapter."""

    RULES = (exactly_one("grpoJob", "path"), inside_rule("path", optional=True))

    grpo_job: GRPOJobName | None = None
    """GRPOJob of this namespace with a checkpoint volume. Its claim is mounted read-only and its
    plan is kept; this job waits while there is no such job, or it has not made a step. Unset: see
    path."""
    path: SubPath | None = None
    """Folder on this job's own checkpoint volume: of a run, `<job>-<uid>`, of one checkpoint, or of
    an exported adapter. Unset: see grpoJob."""


class GuardSpec(Model):
    """Conditions under which a run is stopped."""

    max_kl: Annotated[float, Field(gt=0, le=1e6)] | None = Field(default=None, alias="maxKL")
    """The run fails with DivergedKL when the mean KL of a step is above this for `maxKLSteps`
    steps. Unset: never."""
    max_kl_steps: Annotated[int, Field(ge=1, le=10000)] = Field(default=5, alias="maxKLSteps")
    """Consecutive steps above maxKL. Unset: 5."""
    on_divergence: Literal["Fail", "Rollback"] = "Fail"
    """What follows when a loss, a gradient or a weight is not finite (Diverged), or the KL is above
    maxKL (DivergedKL). Rollback: the run goes back to the newest checkpoint from before the batch
    that it diverged on and never trains on that batch, at most twice; without any checkpoint it
    begins at the start, without that batch. Unset: Fail."""
    stop_on: Annotated[list[FindingName], Field(max_length=16)] = []
    """Findings (docs/reference/findings.md) that end the run with StoppedOnFinding. Unset: none."""
    max_engine_mismatch: Annotated[float, Field(gt=0, le=100)] | None = None
    """The attempt ends with EngineMismatch when the engine's and the trainer's log-probabilities of
    the newest tokens differ by more than this, in nats, in the mean over 100 tokens or more.
    Unset: 0.01 where the policy computes in float32, 0.1 in bfloat16; with a kvCacheDtype of 8
    bits a larger difference is only printed."""
    weight_sync_timeout_seconds: Annotated[int, Field(ge=5, le=86400)] = 600
    """Longest time in which an engine takes new weights, or answers that it has them; then it is
    given up, and without any other the attempt ends with WeightSyncTimeout. Unset: 600 s."""
    hang_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800
    """An attempt without progress for this long is ended as Hang and restarted. While it trains,
    progress is a finished step, which may always take three times the plan's estimate; before and
    after, it is bytes read or written. Unset: 1800 s."""
    rendezvous_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 600
    """Longest wait of a started pod for its peers. Unset: 600 s."""


class ExitCodes(Model):
    """Exit codes of the training container, in the shape of a Job's onExitCodes."""

    operator: Literal["In", "NotIn"]
    """Whether the code must be one of the values or none of them."""
    values: Annotated[
        list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=255)
    ]
    """Exit codes, 1 to 255."""

    def has_code(self, code: int | None) -> bool:
        """Whether a program that ended with this code is meant; None: it didn't end by itself."""
        return bool(code) and (code in self.values) == (self.operator == "In")


class RestartRule(Model):
    """What follows an end that is described by exactly one of onExitCodes, onResults and
    onReasons."""

    RULES = (
        exactly_one(
            *("onExitCodes", "onResults", "onReasons"),
            message="set exactly one of onExitCodes, onResults, onReasons",
        ),
    )

    action: Literal["Restart", "RestartUncounted", "Fail"]
    """Restart counts against `limit`, RestartUncounted against `uncountedLimit`, Fail ends the
    job."""
    on_exit_codes: ExitCodes | None = None
    """The training container's exit code. Unset: another field says which ends."""
    on_results: Annotated[list[FailedResult], Field(min_length=1, max_length=17)] | None = None
    """How the trainer, or the operator in its place, says that it ended. Unset: another field says
    which ends."""
    on_reasons: Annotated[list[EndReason], Field(min_length=1, max_length=20)] | None = None
    """Kubernetes' word for the end: of the container (OOMKilled), of the pod (Evicted,
    UnexpectedAdmissionError) or of its disruption (PreemptionByScheduler, EvictionByEvictionAPI).
    Unset: another field says which ends."""


class RestartsSpec(Model):
    """How often, and after which ends, a gang is started again."""

    limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts after failures; preemption, drain, node loss and suspension don't count. Unset:
    3."""
    uncounted_limit: Annotated[int, Field(ge=0, le=10000)] = 100
    """Restarts after ends that don't count against `limit`. Unset: 100."""
    start_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800
    """Longest time from when all pods have nodes until all of them run, pulls of images included.
    Then the gang is released, and the job fails after more than `limit` (at most 10) such ends in a
    row. Unset: 1800 s."""
    rules: Annotated[list[RestartRule], Field(max_length=20)] = []
    """The first rule that an end matches decides what follows. Unset: failures restart and count,
    disruptions restart uncounted, and what the same input would give again fails the job."""
