"""Exceptions that end a training process, each with the Result that the operator acts on.

    TrainingError
    ├── BadInput the plan, model, data or checkpoint can't be used; a restart won't help
    ├── WeightsDiffer ranks or restarts don't have the weights that they should
    ├── RewardError a reward function failed, or none gave a reward
    ├── EngineWeightsDiffer an engine does not have the weights that it was sent
    ├── EngineMismatch guard.maxEngineMismatch was exceeded
    ├── EngineNotStarted vLLM did not come to its first completions
    │   ├── EngineMissing the image has no vLLM
    │   └── EngineUnprovable this model's weights in an engine can't be proven
    ├── WeightSyncTimeout no engine took new weights in time
    ├── EngineLost no engine is left to sample from
    ├── RendezvousTimeout the peers did not come
    ├── Diverged the loss, the gradient or the weights are not finite
    │   └── DivergedKL guard.maxKL was exceeded
    ├── StoppedOnFinding rank 0 found what guard.stopOn names
    ├── Transient the machine or a service failed, and a restart may succeed
    │   ├── DriftedApart ranks that began with the same weights hold different ones
    │   ├── HubUnavailable the hub sent nothing for the longest wait that is allowed
    │   └── DiskFailed a volume could not be written or read
    │       └── StoreFailed an object store could not be written or read
    │           └── Denied it refuses the request and would refuse it again
    └── Preempted SIGTERM

Our code raises one of these classes where it finds the problem. Errors of torch and Python are
recognised by their text. A hang raises nothing: the watchdog ends the process.
"""

from grpo_api.report.report import EngineCause, Result
from grpo_api.report.revisions import Generations
from grpo_api.report.root_cause import LOST_PEER_MESSAGE

_HOST_MEMORY = ("Cannot allocate memory", "DefaultCPUAllocator")
_OUT_OF_MEMORY = ("MemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", *_HOST_MEMORY)
_DISK = ("(os error ", "inline_container.cc", "iostream error")
"""What Rust's libraries (safetensors, tokenizers) and torch.save say of a disk; only Python's own
raise OSError."""
_AWAY = (
    "Input/output error",
    "Stale file handle",
    "Connection timed out",
    "Transport endpoint is not connected",
)
"""What the C library says of a network file system that fails: Rust's libraries and Arrow raise no
errno."""
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
    "NCCL communicator was",
    "Broken pipe",
    "Connection was likely closed",
    "Socket closed ",
)
"""What gloo, NCCL and torch's store say of a process that is gone."""


class TrainingError(Exception):
    """A known end of a training process; the message is a sentence that a user can act on."""

    result: Result = Result.ERROR


class BadInput(TrainingError):
    """The plan, model, data or checkpoint can't be used as declared."""

    result = Result.BAD_INPUT


class WeightsDiffer(TrainingError):
    """A rank's weights are not the ones that the run must start from."""

    result = Result.WEIGHTS_DIFFER


class RewardError(TrainingError):
    """A reward function raised or failed for too many completions, or none gave a reward."""

    result = Result.REWARD_ERROR


class EngineWeightsDiffer(TrainingError):
    """An engine's weights are not the trainer's, although they were sent."""

    result = Result.ENGINE_WEIGHTS_DIFFER


class EngineMismatch(TrainingError):
    """The engine's log-probabilities are not the trainer's."""

    result = Result.ENGINE_MISMATCH


class EngineNotStarted(TrainingError):
    """vLLM raised an error, hung or crashed before its first completions."""

    result = Result.ENGINE_FAILED
    cause: EngineCause = "NotStarted"


class EngineMissing(EngineNotStarted):
    """vLLM can't be imported."""

    cause = "Missing"


class EngineUnprovable(EngineNotStarted):
    """An engine computes with weights of this model that can't be read back."""

    cause = "Unprovable"


class WeightSyncTimeout(TrainingError):
    """No engine took new weights, or proved that it has them, in guard.weightSyncTimeoutSeconds."""

    result = Result.WEIGHT_SYNC_TIMEOUT


class EngineLost(TrainingError):
    """No engine was left to sample from, and none came back in guard.weightSyncTimeoutSeconds."""

    result = Result.ENGINE_LOST


class RendezvousTimeout(TrainingError):
    """The process group did not form in time."""

    result = Result.RENDEZVOUS_TIMEOUT


class Diverged(TrainingError):
    """A number that training goes on from is not finite."""

    result = Result.DIVERGED

    def __init__(self, message: str, step: int = 0) -> None:
        """`step` is the optimizer step, from 1, whose batch is to blame; 0 for none."""
        super().__init__(message)
        self.step = step
        self.diverged_on: Generations | None = None
        """What that step trained on, once it is known."""


class DivergedKL(Diverged):
    """The KL stayed above guard.maxKL."""

    result = Result.DIVERGED_KL


class StoppedOnFinding(TrainingError):
    """Rank 0 found what guard.stopOn names."""

    result = Result.STOPPED_ON_FINDING


class Transient(TrainingError):
    """The machine or something outside failed, and may not do so again: the gang restarts from its
    last checkpoint."""


class DriftedApart(Transient):
    """Ranks that were proven to begin with the same weights hold different ones."""


class HubUnavailable(Transient):
    """The hub gave no answer for as long as it is waited for."""


class DiskFailed(Transient):
    """A volume took no more, or gave no more: it is full, has reached a quota, or is away for a
    moment."""


class StoreFailed(DiskFailed):
    """An object store took nothing, or gave nothing, for as long as it is waited for."""


class Denied(StoreFailed):
    """An object store refuses what it is asked for, and would do so again."""


class Preempted(TrainingError):
    """The pod received SIGTERM; the run continues from its last checkpoint."""

    result = Result.PREEMPTED


def is_disk_error(error: Exception) -> bool:
    """Whether an exception, raised where files are read or written, is the disk's."""
    if isinstance(error, OSError):
        return True
    # Our own errors name their cause by their class; their text may quote a path or a disk's
    # message.
    return not isinstance(error, TrainingError) and _mentions(str(error), _DISK)


def is_volume_away(error: Exception) -> bool:
    """Whether an error means that a volume did not answer, which says nothing of what is on it."""
    return _mentions(str(error), _AWAY)


def classify_error(error: BaseException) -> tuple[Result, str]:
    """Result and message of an exception: our own errors say theirs, memory errors are recognised,
    the rest is Error.

    CUDA's allocator raises torch.OutOfMemoryError (a RuntimeError), the CPU's a plain RuntimeError:
    both by their text.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TrainingError):
        return error.result, str(error)
    if isinstance(error, MemoryError | RuntimeError | OSError) and _mentions(text, _OUT_OF_MEMORY):
        return Result.OUT_OF_MEMORY, text
    if _mentions(text, _LOST_PEER):
        return (
            Result.ERROR,
            f"{LOST_PEER_MESSAGE}, which probably failed first: {text}",
        )
    return Result.ERROR, text


def is_host_shortage(error: BaseException) -> bool:
    """Whether an error that is classified as OutOfMemory is of the host's memory.

    torch.OutOfMemoryError comes from its own allocator alone. cuBLAS, NCCL, Triton and vLLM's sleep
    want memory of the device, too, and raise a RuntimeError.
    """
    return isinstance(error, MemoryError | OSError) or _mentions(str(error), _HOST_MEMORY)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another rank is gone, which then reports why."""
    return _mentions(f"{type(error).__name__}: {error}", _LOST_PEER)


def engine_cause(error: BaseException) -> EngineCause | None:
    """Why the engine failed; None where the error is of another kind."""
    return error.cause if isinstance(error, EngineNotStarted) else None


def _mentions(text: str, markers: tuple[str, ...]) -> bool:
    return any(marker in text for marker in markers)
