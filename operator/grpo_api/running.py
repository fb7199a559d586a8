"""`spec.placement`, `checkpoint`, `guard`, `restarts` and `podOverrides`: where a job runs and how it is kept alive.

Exists to keep the parts of the spec readable one by one. Imported by job.py and plan.py.
"""

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field

from .base import ATOMIC_LIST, SUB_PATH_RULE, ByteQuantity, Model, Name, Path, Quantity, Rule, SubPath, map_list, unique
from .contract import (
    CHECKPOINT_MOUNT,
    DATA_MOUNT,
    GROUP,
    INDEX_ENV,
    MODEL_MOUNT,
    PLAN_ENV,
    PLAN_PATH,
    REWARD_MOUNT,
    SCRATCH,
    TERMINATION_LOG_ENV,
)
from .model import SecretKey, VolumeClaim

_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[a-zA-Z0-9]([-._a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$"
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?)?$")]
RESERVED_MOUNTS = (
    MODEL_MOUNT,
    DATA_MOUNT,
    CHECKPOINT_MOUNT,
    REWARD_MOUNT,
    SCRATCH,
    str(PurePath(PLAN_PATH).parent),
    "/dev",
    "/proc",
    "/sys",
)
"""Folders of the containers that belong to the operator or to the kernel."""
RESERVED_ENV = (PLAN_ENV, INDEX_ENV, TERMINATION_LOG_ENV)
"""Environment variables that carry the contract between operator and pod."""
GPU_PROCESS_MILLICPU = 250
"""Default CPU request per GPU: its process mostly waits for the GPU, and without a limit it may use what is idle."""
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]


class GPURange(Model):
    """How many GPUs the plan may take."""

    RULES = (
        Rule(
            "!has(self.max) || self.max >= self.min",
            "max must be at least min",
            lambda gpus: gpus.max is None or gpus.max >= gpus.min,
        ),
    )

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Fewest GPUs. Unset: 1."""
    max: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most GPUs. Unset: as many as `objective` asks for."""


class Toleration(Model):
    """A Kubernetes toleration."""

    RULES = (
        Rule(
            "self.operator == 'Exists' ? !has(self.value) : has(self.key)",
            "operator Exists takes no value; operator Equal needs key",
            lambda toleration: toleration.value is None if toleration.operator == "Exists" else bool(toleration.key),
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect NoExecute",
            lambda toleration: toleration.toleration_seconds is None or toleration.effect == "NoExecute",
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


class PlacementSpec(Model):
    """Where the job may run. The plan chooses within these limits."""

    RULES = (
        Rule(
            "self.accelerator == 'GPU' || (!has(self.gpus) && !has(self.gpuProduct) && !has(self.gpuMemory))",
            "gpus, gpuProduct and gpuMemory belong to accelerator GPU; remove them for CPU",
            lambda place: place.accelerator == "GPU" or not (place.gpus or place.gpu_product or place.gpu_memory),
        ),
        Rule(
            "self.accelerator == 'CPU' || !has(self.processesPerNode)",
            "processesPerNode belongs to accelerator CPU; every GPU gets one process",
            lambda place: place.accelerator == "CPU" or place.processes_per_node is None,
        ),
        Rule(
            "!has(self.nodes) || !has(self.gpus) || !has(self.gpus.max) || self.gpus.max >= self.nodes",
            "gpus.max must be at least nodes: every node of the gang needs a GPU",
            lambda place: not (place.nodes and place.gpus and place.gpus.max) or place.gpus.max >= place.nodes,
        ),
    )

    accelerator: Literal["GPU", "CPU"] = "GPU"
    """GPU, or CPU for small models and tests. Unset: GPU."""
    gpus: GPURange | None = None
    """How many GPUs. Unset: at least 1, at most what `objective` asks for."""
    nodes: Annotated[int, Field(ge=1, le=512)] | None = None
    """Exact number of nodes (one pod each). Unset: the plan chooses; 1 for CPU."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """Training processes per pod for accelerator CPU. Unset: 1. GPUs run one process each."""
    gpu_product: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[-._a-zA-Z0-9]+$")] | None = None
    """Only GPUs with this `nvidia.com/gpu.product` label (a prefix will do). Unset: any one product."""
    gpu_memory: ByteQuantity | None = None
    """Memory of one GPU, for nodes without GPU-feature-discovery labels. Unset: from the labels."""
    cpu: Quantity | None = None
    """CPU request of each pod, no limit. Unset: a quarter core per GPU; for accelerator CPU a core per process."""
    memory: ByteQuantity | None = None
    """Memory request and limit of each pod. Unset: a request of what the plan predicts for the host, and no limit."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that nodes must have. Unset: any node."""
    tolerations: Annotated[list[Toleration], Field(max_length=32, json_schema_extra=ATOMIC_LIST)] = []
    """Tolerations of the pods; GPU taints (`nvidia.com/gpu`, `amd.com/gpu`) are always tolerated. Unset: none."""
    objective: Literal["Balanced", "Fastest", "FewestGPUs"] = "Balanced"
    """What the plan optimises. Balanced: the fastest, but fewer GPUs where they cost at most 5 %. Unset: Balanced."""
    queue_name: Name | None = None
    """Kueue LocalQueue; Kueue then admits the job. Unset: the operator admits it when its whole gang fits."""
    priority_class_name: Name | None = None
    """PriorityClass of the pods and of the job's place in the line. Unset: the cluster's default."""

    def cpu_request(self, processes: int) -> str:
        """CPU request of a pod with so many processes, as a resource.Quantity."""
        default = str(processes) if self.accelerator == "CPU" else f"{GPU_PROCESS_MILLICPU * processes}m"
        return self.cpu or default


class VolumeClaimTemplate(Model):
    """A claim that the operator creates for the job."""

    storage_class_name: Name | None = None
    """StorageClass. Unset: the cluster's default."""
    size: ByteQuantity
    """Requested size such as `100Gi`."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteMany for gangs of several nodes. Unset: ReadWriteMany."""
    retain: bool = True
    """Keep the claim and its checkpoints when the job is deleted. Unset: true."""


class CheckpointSpec(Model):
    """Where and how often the run saves its state."""

    RULES = (
        Rule(
            "!(has(self.volume) && has(self.volumeClaimTemplate))",
            "set at most one of volume, volumeClaimTemplate",
            lambda checkpoint: not (checkpoint.volume and checkpoint.volume_claim_template),
        ),
    )

    volume: VolumeClaim | None = None
    """Volume shared by all nodes of the gang, mounted at /checkpoints. Unset: see volumeClaimTemplate."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """A claim of the job's own, created with it. Unset and no `volume`: the run can't be recovered after a failure, and
    condition Recoverable=False says so."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Steps between checkpoints (raised to the next generation boundary, so that resume is exact). Unset: 100."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest complete checkpoints that are kept. Unset: 2."""


class GuardSpec(Model):
    """Conditions under which a run is stopped."""

    max_kl: Annotated[float, Field(gt=0, le=1e6)] | None = Field(default=None, alias="maxKL")
    """The run fails with DivergedKL when the mean KL of a step is above this for `maxKLSteps` steps. Unset: never."""
    max_kl_steps: Annotated[int, Field(ge=1, le=10000)] = Field(default=5, alias="maxKLSteps")
    """Consecutive steps above maxKL. Unset: 5."""
    hang_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800
    """An attempt without a finished step for this long is ended as Hang and restarted. Unset: 1800 s."""
    rendezvous_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 600
    """Longest wait of a started pod for its peers. Unset: 600 s."""


class RestartsSpec(Model):
    """How often a failed gang is started again."""

    limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts after failures; preemption, eviction, node loss and suspension don't count. Unset: 3."""


class EnvVar(Model):
    """An environment variable of the training containers."""

    RULES = (
        Rule(
            "!(has(self.value) && has(self.secret))",
            "set at most one of value and secret",
            lambda env: env.value is None or env.secret is None,
        ),
        Rule(
            f"!(self.name in {list(RESERVED_ENV)})",
            f"the operator sets {', '.join(RESERVED_ENV)} itself: remove it",
            lambda env: env.name not in RESERVED_ENV,
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value. Unset: from `secret`, or empty."""
    secret: SecretKey | None = None
    """Take the value from a Secret. Unset: `value`."""


class ExtraVolume(Model):
    """A further claim mounted into the training containers."""

    RULES = (
        SUB_PATH_RULE,
        Rule(
            f"!{list(RESERVED_MOUNTS)}.exists(taken, (self.mountPath + '/').startsWith(taken + '/'))",
            f"mountPath must lie outside of {', '.join(RESERVED_MOUNTS)}: the operator mounts there itself",
            lambda volume: not any(f"{volume.mount_path}/".startswith(f"{taken}/") for taken in RESERVED_MOUNTS),
        ),
    )

    claim_name: Name
    """Name of the claim."""
    mount_path: Path
    """Folder in the containers."""
    sub_path: SubPath | None = None
    """Folder inside the volume. Unset: the volume's root."""
    read_only: bool = True
    """Mount read-only. Unset: true."""


class PodOverrides(Model):
    """The few settings of the pods that a user may change."""

    RULES = (
        Rule(
            f"!(has(self.labels) && self.labels.exists(key, key.startsWith('{GROUP}/'))) && "
            f"!(has(self.annotations) && self.annotations.exists(key, key.startsWith('{GROUP}/')))",
            f"labels and annotations under {GROUP}/ are the operator's: use another prefix",
            lambda pod: not any(key.startswith(f"{GROUP}/") for key in (*pod.labels, *pod.annotations)),
        ),
    )

    labels: Labels = Field(default_factory=dict)
    """Further labels of the pods. Unset: none."""
    annotations: Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Further annotations of the pods. Unset: none."""
    service_account_name: Name | None = None
    """Service account; its token is never mounted. Unset: the namespace's default."""
    image_pull_secrets: Annotated[list[Name], Field(max_length=16, json_schema_extra=ATOMIC_LIST)] = []
    """Names of pull secrets. Unset: none."""
    runtime_class_name: Name | None = None
    """RuntimeClass, such as `nvidia`. Unset: the cluster's default."""
    scheduler_name: Name | None = None
    """Scheduler. Unset: the cluster's default."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    """Time between SIGTERM and SIGKILL, in which a checkpoint may be written. Unset: 60 s."""
    shared_memory: ByteQuantity | None = None
    """Size of /dev/shm. Unset: half of the pod's memory at most."""
    volumes: Annotated[
        list[ExtraVolume],
        Field(max_length=16, json_schema_extra=map_list("mountPath")),
        unique("mount_path"),
    ] = []
    """Further claims. Unset: none."""
