"""Defines the paths, ports, names and tokens on which the operator, the pods and the API's rules
must agree.

The operator and the trainer share no code but this package, so each of these values is written here
once. Rules of the API use them to keep a user's spec from taking what the operator and the trainer
need.
"""

import re
from pathlib import PurePath

GROUP = "grpo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GRPOJob"
PLURAL = "grpojobs"
CLASS_KIND, CLASS_PLURAL = "GRPOJobClass", "grpojobclasses"
DEFAULT_CLASS_ANNOTATION = f"{CLASS_PLURAL.removesuffix('es')}.{GROUP}/is-default-class"
"""On a GRPOJobClass: `true` makes it that of jobs which name none, as of StorageClasses."""
LEADER_KIND = "OperatorLeader"
"""What names the pod of the operator that leads, for the chart's fence."""
LEADER_PLURAL = "operatorleaders"

MANAGED_BY = f"{GROUP}/operator"
"""Value of spec.managedBy that names this operator, as does none; a job with another value is left
alone."""

MULTIKUEUE = "kueue.x-k8s.io/multikueue"
"""Value of spec.managedBy of a job that Kueue sends to another cluster, and whose status it copies
from there."""

LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""On a GRPOJob: its LocalQueue."""

NODE_GBPS_LABEL = f"{GROUP}/node-gbps"
"""On a node, by its administrator: its network, GB/s per direction, all cards together."""

GPU_GBPS_LABEL = f"{GROUP}/gpu-gbps"
"""On a node: between two of its GPUs, GB/s per direction."""

GPU_PRICE_LABEL = f"{GROUP}/gpu-hour-price"
"""On a node: the price of one of its GPUs for an hour, in the cluster's currency."""

PLAN_ANNOTATION = f"{GROUP}/plan"
"""Annotation of the pod template that carries the TrainingPlan as JSON."""

PLAN_PATH = "/etc/grpo/plan.json"
"""Where the pod finds the annotation as a file (downward API)."""

PLAN_ENV = "GRPO_PLAN"
"""Environment variable with the plan's path; set to PLAN_PATH in pods, to any file on a laptop."""

INDEX_ENV = "JOB_COMPLETION_INDEX"
"""Set by the Job controller: the pod's index is its node rank."""

ENV_PREFIX = "GRPO_"
"""Environment variables of the contract begin with it."""

RANK_ENV = (
    INDEX_ENV,
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that say which process of the gang this is: the Job controller's, and what the trainer
sets for torch."""

THREADS_ENV = "OMP_NUM_THREADS"
"""How many threads a process computes with on CPUs; the pod has it where the spec says how many
cores there are, else the trainer sets it by the cores that it finds."""

ALLOCATOR_ENV = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The two names under which torch reads the settings of its allocator on GPUs; the first is known
to every version."""

EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""The setting of torch's allocator under which memory that is freed in one size can be used in
another."""

EXPANDABLE_SEGMENTS_PATTERN = r"expandable_segments[ \t]*:[ \t]*True"
"""How torch lets the setting be spelt."""


def has_hidden_segments(variable: str, settings: str) -> bool:
    """Whether settings of torch's allocator turn on expandable segments where vLLM does not see it.

    An engine that sleeps allocates from a pool that can't have such segments (pytorch issue
    147851). vLLM turns them off meanwhile, but looks for them in the first of ALLOCATOR_ENV alone,
    and only as EXPANDABLE_SEGMENTS spells them (vllm 0.30, device_allocator/cumem.py).
    """
    has_segments = re.search(EXPANDABLE_SEGMENTS_PATTERN, settings) is not None
    is_visible = variable == ALLOCATOR_ENV[0] and EXPANDABLE_SEGMENTS in settings
    return has_segments and not is_visible


RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's thresholds in bytes, read when a process starts. With its own, which grow, a sharded
start keeps more than the whole model in host memory."""

TERMINATION_LOG = "/dev/termination-log"
"""Where the kubelet reads the Outcome of an ended container."""

TERMINATION_LOG_ENV = "GRPO_TERMINATION_LOG"
"""Overrides TERMINATION_LOG outside a pod."""

TERMINATION_BYTES = 4096
"""How much of TERMINATION_LOG the kubelet keeps."""

ATTEMPT_PREFIX = "attempt-"
"""Folder of an attempt below the job's checkpoint directory; its number follows."""

CHECKPOINT_PREFIX = "checkpoint-"
"""Folder of a checkpoint below its attempt's; its step follows. The name is transformers'
(PREFIX_CHECKPOINT_DIR)."""

EXPORT_FOLDER = "export"
"""Folder of the finished model or adapter below the job's checkpoint directory, published whole."""

PROGRESS_PORT = 8080
"""Rank 0 serves /progress, /metrics and /healthz here."""

TRACE_QUERY = "traceEvery"
"""`/progress?traceEvery=N` also says when the attempt's first and every Nth step began and
ended."""

PROGRESS_BIND_ENV = "GRPO_PROGRESS_BIND"
"""Overrides the address, as `host:port`, outside a pod; unset: every address of the pod at
PROGRESS_PORT."""

RENDEZVOUS_PORT = 29500
"""Rank 0 accepts the process group here."""

ENGINE_PORT = 8000
"""An engine pod serves completions, weight syncs, /metrics and /healthz here."""

ENGINE_BIND_ENV = "GRPO_ENGINE_BIND"
"""Overrides the address of an engine, as `host:port`, outside a pod; unset: every address of the
pod at its port."""

WEIGHTS_PORT = 29600
"""Rank 0 accepts engine pods here for the transfer of weights."""

ENGINE_SUFFIX = "-engine"
"""What the Job of an attempt's engines adds to the name of the attempt's Job."""

MODEL_MOUNT = "/models"
DATA_MOUNT = "/data"
CHECKPOINT_MOUNT = "/checkpoints"
REWARD_MOUNT = "/rewards"
CACHE_MOUNT = "/hub-cache"
"""What was fetched of the hub, read-write."""
RESUME_MOUNT = "/resume"
"""Another job's checkpoints, read-only."""
SIGNING_MOUNT = "/etc/grpo-signing"
SIGNING_KEY = f"{SIGNING_MOUNT}/key.pem"
"""The private key of spec.export.signingKeySecretRef, mounted as this file alone."""
SIGNING_KEY_ENV = "GRPO_SIGNING_KEY"
"""Overrides SIGNING_KEY outside a pod."""
DATA_MOUNT_ENV = "GRPO_DATA"
"""Overrides DATA_MOUNT outside a pod."""
REWARD_MOUNT_ENV = "GRPO_REWARDS"
"""Overrides REWARD_MOUNT outside a pod."""
SCRATCH = "/tmp"

CHECKPOINT_SCRATCH = f"{SCRATCH}/checkpoints"
"""Where a pod keeps its part of a checkpoint while it is on its way to or from
spec.checkpoint.store."""

RESUME_SCRATCH = f"{SCRATCH}/resume"
"""Where a pod keeps what it begins with of another job's checkpoints on an object store."""

CHECKPOINT_STORE_ENV = f"{ENV_PREFIX}CHECKPOINT_STORE_"
"""Environment variables that begin so are the client's settings for spec.checkpoint.store, of its
secret."""
RESUME_STORE_ENV = f"{ENV_PREFIX}RESUME_STORE_"
"""The same for the store of the job that spec.resumeFrom.grpoJob names."""

RESERVED_MOUNTS = (
    MODEL_MOUNT,
    DATA_MOUNT,
    CHECKPOINT_MOUNT,
    REWARD_MOUNT,
    RESUME_MOUNT,
    CACHE_MOUNT,
    SIGNING_MOUNT,
    SCRATCH,
    str(PurePath(PLAN_PATH).parent),
    "/dev",
    "/proc",
    "/sys",
)
"""Folders of the training container that belong to the operator or to the kernel."""

CONTAINER = "trainer"
"""Name of the training container."""

PLAN_VOLUME = "plan"
SCRATCH_VOLUME = "scratch"
SHARED_MEMORY_VOLUME = "shared-memory"
MODEL_VOLUME = "model"
DATA_VOLUME = "data"
CHECKPOINT_VOLUME = "checkpoints"
RESUME_VOLUME = "resume"
CACHE_VOLUME = "hub-cache"
SIGNING_VOLUME = "signing-key"
REWARD_VOLUME_PREFIX = "reward-"
RESERVED_VOLUMES = (
    PLAN_VOLUME,
    SCRATCH_VOLUME,
    SHARED_MEMORY_VOLUME,
    MODEL_VOLUME,
    DATA_VOLUME,
    CHECKPOINT_VOLUME,
    RESUME_VOLUME,
    CACHE_VOLUME,
    SIGNING_VOLUME,
)
"""Names of the pods' own volumes, beside those of rewards."""

RESERVED_LABELS = (
    f"{GROUP}/",
    "batch.kubernetes.io/",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "job-name",
    "controller-uid",
)
"""Labels and annotations of pods, or with a slash at the end all below a prefix, that the operator
and the Job controller find their pods by."""

DATASET_TOKEN_ENV = "GRPO_DATASET_TOKEN"
"""Hub token of spec.dataset.tokenSecretRef; unset: anonymous."""

EXPORT_TOKEN_ENV = "GRPO_EXPORT_TOKEN"
"""Hub token of spec.export.hub.tokenSecretRef."""


IMAGE_ENV = "GRPO_IMAGE"
"""The training image as the pod's template names it: a container can't see what it was started
from."""


def reward_mount(position: int) -> str:
    """Folder of the volume or ConfigMap of the reward at this position (from 0) of spec.rewards."""
    return f"{REWARD_MOUNT}/{position}"


def reward_token_env(position: int) -> str:
    """Environment variable with the token of the reward at this position (from 0) of
    spec.rewards."""
    return f"GRPO_REWARD_TOKEN_{position}"


def tracking_token_env(tracker: str) -> str:
    """Environment variable with the token of a tracker of spec.tracking. Only the tracker's own
    process gets it by the name that the tracker's library reads."""
    return f"GRPO_TRACKING_TOKEN_{tracker.upper()}"


TRACKERS_ENV = "GRPO_TRACKERS"
TRACKERS_FOLDER = "/opt/trackers"
"""Folder of the image with the trackers' packages, which the training processes never see; TRL
imports some where it finds them. Elsewhere where TRACKERS_ENV says so."""

MAX_JOB_NAME = 52
"""Longest name of a GRPOJob: its Jobs add `-<attempt>`, their pods `-<index>-<5 random>`, within 63
characters."""
