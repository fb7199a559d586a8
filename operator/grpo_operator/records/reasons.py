"""Every reason in conditions and events, spelled once, but for an Outcome's results."""

from enum import StrEnum

from grpo_api.findings.diagnosis import UNSEEN
from grpo_planner.result.result import PlanReason


class Reason(StrEnum):
    """CamelCase reasons of conditions and events, other than the results of an Outcome."""

    ADMITTED = "Admitted"
    INVALID_SPEC = "InvalidSpec"
    NOT_SUPPORTED = "NotSupported"
    NO_IMAGE = "NoImage"
    JOB_CLASS_NOT_FOUND = "JobClassNotFound"
    REFUSED_BY_JOB_CLASS = "RefusedByJobClass"
    POD_SECURITY_FORBIDS = "PodSecurityForbids"
    STORAGE_NOT_SHARED = "StorageNotShared"
    STORAGE_CLASS_NOT_FOUND = "StorageClassNotFound"
    PLANNER_FAILED = "PlannerFailed"
    WAITING_FOR_GPUS = PlanReason.WAITING_FOR_GPUS.value
    WAITING_IN_QUEUE = "WaitingInQueue"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    PRIORITY_CLASS_NOT_FOUND = "PriorityClassNotFound"
    SERVICE_ACCOUNT_NOT_FOUND = "ServiceAccountNotFound"
    WAITING_FOR_KUEUE = "WaitingForKueue"
    EVICTED = "Evicted"
    WORKLOAD_REPLACED = "WorkloadReplaced"
    NO_KUEUE = "NoKueue"
    CHECKING = "Checking"
    PASSED = "Passed"
    NOT_CHECKED = "NotChecked"
    PREFLIGHT_FAILED = "PreflightFailed"
    PREFLIGHT_BLOCKED = "PreflightBlocked"
    WAITING_FOR_CHECKPOINT = "WaitingForCheckpoint"
    RESOLVED = "Resolved"
    NAME_TAKEN = "NameTaken"
    FAILED_CREATE = "FailedCreate"
    PLANNED = PlanReason.PLANNED.value
    PODS_PENDING = "PodsPending"
    UNSCHEDULABLE = "Unschedulable"
    SCHEDULING_TIMEOUT = "SchedulingTimeout"
    PODS_NOT_CREATED = "PodsNotCreated"
    START_TIMEOUT = "StartTimeout"
    ALL_PODS_BOUND = "AllPodsBound"
    STARTING = "Starting"
    ALL_PODS_RUNNING = "AllPodsRunning"
    POD_WAITING = "PodWaiting"
    NODE_NOT_READY = "NodeNotReady"
    PROGRESS_UNKNOWN = "ProgressUnknown"
    WAITING_FOR_HUB = "WaitingForHub"
    WAITING_FOR_REWARDS = "WaitingForRewards"
    WAITING_FOR_STORE = "WaitingForStore"
    WAITING_FOR_ENGINES = "WaitingForEngines"
    CHECKPOINT_NOT_WRITTEN = "CheckpointNotWritten"
    ENGINES_LOST = "EnginesLost"
    RDMA_UNUSED = "RDMAUnused"
    NETWORK_SLOW = "NetworkSlow"
    TRACKER_LOSES_ROWS = "TrackerLosesRows"
    FAILED_DELETE = "FailedDelete"
    RESTARTING = "Restarting"
    RETRYING = "Retrying"
    RESTART_BACKOFF = "RestartBackoff"
    FINISHED = "Finished"
    NOT_FINISHED = "NotFinished"
    AS_EXPECTED = "AsExpected"
    NO_FINDINGS = "NoFindings"
    UNSEEN = UNSEEN
    TOO_FEW_STEPS = "TooFewSteps"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    NOT_SUSPENDED = "NotSuspended"
    STATUS_UNREADABLE = "StatusUnreadable"
    READABLE = "Readable"
    SHARED_VOLUME = "SharedVolume"
    OBJECT_STORE = "ObjectStore"
    NO_CHECKPOINT_VOLUME = "NoCheckpointVolume"
    ADAPTER_IF_NEEDED = "AdapterIfNeeded"
    MODEL_RUNNER_V1 = "ModelRunnerV1"
    TRANSFORMERS = "Transformers"
    PROMPTS_TOO_LONG = "PromptsTooLong"
    SUCCEEDED = "Succeeded"
    RESTART_LIMIT = "RestartLimit"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


UNCHECKED = frozenset(
    {
        Reason.CHECKING,
        Reason.PREFLIGHT_FAILED,
        Reason.PREFLIGHT_BLOCKED,
        Reason.WAITING_FOR_HUB,
        Reason.WAITING_FOR_STORE,
        Reason.WAITING_FOR_REWARDS,
    }
)
"""Why a job may not start yet, as its preflight says."""
RELEASES = frozenset(
    {
        Reason.SCHEDULING_TIMEOUT,
        Reason.PODS_NOT_CREATED,
        Reason.START_TIMEOUT,
        Reason.WAITING_FOR_HUB,
    }
)
"""Why a gang that never trained gave its place back; it queues again after a pause."""
WAITS = {
    "Hub": Reason.WAITING_FOR_HUB,
    "Rewards": Reason.WAITING_FOR_REWARDS,
    "Store": Reason.WAITING_FOR_STORE,
    "Engines": Reason.WAITING_FOR_ENGINES,
}
"""Reasons by what rank 0 waits for."""
UNCREATED = frozenset(
    {
        Reason.NAME_TAKEN,
        Reason.FAILED_CREATE,
        Reason.STORAGE_NOT_SHARED,
        Reason.STORAGE_CLASS_NOT_FOUND,
    }
)
"""What keeps the Job of an attempt from being created; the message has the details."""
