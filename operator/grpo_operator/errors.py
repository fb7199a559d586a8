"""What can go wrong on the way to the API server, as one drawn tree, and every reason that a user can read.

Exists so that a caller catches the class that it can handle and nothing wider, and so that a reason is spelled once.
Raised by cluster.py; caught by the work queue (retry), the watcher (relist) and the reconciler (read again).

    OperatorError
    ├── ConfigurationError       the operator was started with settings that can't work
    └── ClusterError             the API server did not do what was asked
        ├── Unavailable          no answer, 429 or 5xx, after the retry budget: the same request may work later
        └── Refused              an answer that repeating won't change: 400, 401, 403, 422
            ├── NotFound         404
            ├── Conflict         409 of an update: the object has changed since it was read
            ├── AlreadyExists    409 of a create: the name is taken
            └── Expired          410: the resource version of a watch or list is too old
"""

from enum import StrEnum


class OperatorError(Exception):
    """Every error of this package."""


class ConfigurationError(OperatorError):
    """The operator was started with settings that can't work."""


class ClusterError(OperatorError):
    """The API server did not do what was asked."""

    def __init__(self, message: str, code: int = 0) -> None:
        """Keeps the HTTP status, 0 when there was no answer."""
        super().__init__(message)
        self.code = code


class Unavailable(ClusterError):
    """No answer, 429 or 5xx: the same request may work later."""

    def __init__(self, message: str, code: int = 0, retry_after: float | None = None) -> None:
        """Keeps the pause that the server asked for, in seconds."""
        super().__init__(message, code)
        self.retry_after = retry_after


class Refused(ClusterError):
    """An answer that repeating won't change."""


class NotFound(Refused):
    """The object is not there."""


class Conflict(Refused):
    """The object has changed since it was read."""


class AlreadyExists(Refused):
    """The name is taken."""


class Expired(Refused):
    """The resource version is too old to continue from."""


class Reason(StrEnum):
    """CamelCase reasons of conditions and events, other than the results of an Outcome."""

    ADMITTED = "Admitted"
    INVALID_SPEC = "InvalidSpec"
    NOT_SUPPORTED = "NotSupported"
    NO_IMAGE = "NoImage"
    PLANNER_FAILED = "PlannerFailed"
    WAITING_FOR_GPUS = "WaitingForGPUs"
    WAITING_IN_LINE = "WaitingInLine"
    WAITING_IN_QUEUE = "WaitingInQueue"
    NAME_TAKEN = "NameTaken"
    REFUSED = "Refused"
    BACKING_OFF = "BackingOff"
    PLANNED = "Planned"
    PODS_PENDING = "PodsPending"
    UNSCHEDULABLE = "Unschedulable"
    SCHEDULING_TIMEOUT = "SchedulingTimeout"
    ALL_PODS_BOUND = "AllPodsBound"
    STARTING = "Starting"
    ALL_PODS_RUNNING = "AllPodsRunning"
    POD_WAITING = "PodWaiting"
    RESTARTING = "Restarting"
    FINISHED = "Finished"
    AS_EXPECTED = "AsExpected"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    NOT_SUSPENDED = "NotSuspended"
    SHARED_VOLUME = "SharedVolume"
    NO_CHECKPOINT_VOLUME = "NoCheckpointVolume"
    ADAPTER_IF_NEEDED = "AdapterIfNeeded"
    SUCCEEDED = "Succeeded"
    RESTART_LIMIT = "RestartLimit"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    HANG = "Hang"
    DISRUPTED = "Disrupted"
    POD_DELETED = "PodDeleted"
    JOB_DELETED = "JobDeleted"
    NO_OUTCOME = "NoOutcome"
