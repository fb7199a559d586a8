"""Paths, ports and names that the operator and the pods must agree on, each written down once.

Exists because the two sides share no code but this package. The operator's manifests and the trainer import it.
"""

GROUP = "grpo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GRPOJob"
PLURAL = "grpojobs"

MANAGED_BY = f"{GROUP}/operator"
"""Value of spec.managedBy that names this operator, as does none; a job with another value is left alone."""

PLAN_ANNOTATION = f"{GROUP}/plan"
"""Annotation of the pod template that carries the TrainingPlan as JSON."""

PLAN_PATH = "/etc/grpo/plan.json"
"""Where the pod finds the annotation as a file (downward API)."""

PLAN_ENV = "GRPO_PLAN"
"""Environment variable with the plan's path; set to PLAN_PATH in pods, to any file on a laptop."""

INDEX_ENV = "JOB_COMPLETION_INDEX"
"""Set by the Job controller: the pod's index is its node rank."""

TERMINATION_LOG = "/dev/termination-log"
"""Where the kubelet reads the Outcome of an ended container."""

TERMINATION_LOG_ENV = "GRPO_TERMINATION_LOG"
"""Overrides TERMINATION_LOG outside a pod."""

TERMINATION_BYTES = 4096
"""How much of TERMINATION_LOG the kubelet keeps."""

ATTEMPT_PREFIX = "attempt-"
"""Folder of an attempt below the job's checkpoint directory; its number follows."""

CHECKPOINT_PREFIX = "checkpoint-"
"""Folder of a checkpoint below its attempt's; its step follows. The name is transformers' (PREFIX_CHECKPOINT_DIR)."""

PROGRESS_PORT = 8080
"""Rank 0 serves /progress, /metrics and /healthz here."""

PROGRESS_BIND_ENV = "GRPO_PROGRESS_BIND"
"""Overrides the address, as `host:port`, outside a pod; unset: every address of the pod at PROGRESS_PORT."""

RENDEZVOUS_PORT = 29500
"""Rank 0 accepts the process group here."""

MODEL_MOUNT = "/models"
DATA_MOUNT = "/data"
CHECKPOINT_MOUNT = "/checkpoints"
REWARD_MOUNT = "/rewards"
DATA_MOUNT_ENV = "GRPO_DATA"
"""Overrides DATA_MOUNT outside a pod."""
SCRATCH = "/tmp"

DATASET_TOKEN_ENV = "GRPO_DATASET_TOKEN"
"""Hub token of spec.dataset.tokenSecret; unset: anonymous."""


def reward_mount(position: int) -> str:
    """Folder of the volume or ConfigMap of the reward at this position (from 0) of spec.rewards."""
    return f"{REWARD_MOUNT}/{position}"


def reward_token_env(position: int) -> str:
    """Environment variable with the token of the reward at this position (from 0) of spec.rewards."""
    return f"GRPO_REWARD_TOKEN_{position}"


MAX_JOB_NAME = 52
"""Longest name of a GRPOJob: its Jobs add `-<attempt>`, their pods `-<index>-<5 random>`, within 63 characters."""
