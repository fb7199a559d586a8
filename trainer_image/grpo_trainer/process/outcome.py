"""How a process says its end: the Outcome for an exception, written to the termination message and beside the
checkpoints.

Exists because an exit code alone is ambiguous (a process can abort after success) and a termination message dies with
its pod. Used by `__main__`, the supervisor and the watchdog.
"""

import os
from pathlib import Path

from grpo_api.contract import TERMINATION_LOG, TERMINATION_LOG_ENV
from grpo_api.plan import TrainingPlan
from grpo_api.report import EXIT_CODES, Outcome, Result

from ..errors import TrainingError
from ..files import write_atomically
from ..gang.placement import Placement

MESSAGE_LIMIT = 3072
_OUT_OF_MEMORY = (
    "MemoryError",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
    "DefaultCPUAllocator",
)
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "NCCL communicator was")


def classify(error: BaseException) -> tuple[Result, str]:
    """Result and message of an exception: our own errors say theirs, memory errors are recognised, the rest is Error.

    CUDA's allocator raises torch.OutOfMemoryError (a RuntimeError), the CPU's a plain RuntimeError: both by their text.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TrainingError):
        return error.result, str(error)
    if isinstance(error, MemoryError | RuntimeError | OSError) and _mentions(text, _OUT_OF_MEMORY):
        return Result.OUT_OF_MEMORY, text
    if _mentions(text, _LOST_PEER):
        return Result.ERROR, f"lost the connection to another rank, which probably failed first: {text}"
    return Result.ERROR, text


def _mentions(text: str, markers: tuple[str, ...]) -> bool:
    return any(marker in text for marker in markers)


def bounded(message: str) -> str:
    """The message cut in the middle to what a termination message holds, both ends kept."""
    if len(message.encode()) <= MESSAGE_LIMIT:
        return message
    half = MESSAGE_LIMIT // 2 - 8
    raw = message.encode()
    return raw[:half].decode(errors="ignore") + " […] " + raw[-half:].decode(errors="ignore")


def make_outcome(plan: TrainingPlan, rank: int, result: Result, message: str, step: int = 0) -> Outcome:
    """An Outcome of this attempt."""
    return Outcome(result=result, rank=rank, step=step, attempt=plan.job.attempt, message=bounded(message))


def termination_log() -> Path:
    """File that the kubelet reads when the container ends."""
    return Path(os.environ.get(TERMINATION_LOG_ENV, TERMINATION_LOG))


def announce(outcome: Outcome) -> int:
    """Write the termination message and return the exit code.

    The kubelet's file is a bind mount, which can't be renamed over: it is written in place.
    """
    text = outcome.model_dump_json()
    path = termination_log()
    if path.parent.is_dir():
        path.write_text(text, encoding="utf-8")
    print(f"outcome: {text}", flush=True)
    return EXIT_CODES[outcome.result]


def attempt_folder(plan: TrainingPlan) -> Path | None:
    """Folder of this attempt's checkpoints and outcomes; None without a shared volume."""
    if plan.checkpoint_directory is None:
        return None
    return Path(plan.checkpoint_directory) / f"attempt-{plan.job.attempt}"


def keep(plan: TrainingPlan, outcome: Outcome, place: Placement) -> None:
    """Write the durable outcome of this rank into the attempt's folder."""
    folder = attempt_folder(plan)
    if folder is not None and folder.is_dir():
        write_atomically(folder / f"outcome-rank-{place.rank}.json", outcome.model_dump_json())


def finished_attempt(plan: TrainingPlan) -> Outcome | None:
    """The durable success of an earlier attempt, whose process may have died after writing it."""
    if plan.checkpoint_directory is None:
        return None
    for path in sorted(Path(plan.checkpoint_directory).glob("attempt-*/outcome-rank-0.json")):
        outcome = Outcome.model_validate_json(path.read_text(encoding="utf-8"))
        if outcome.result is Result.SUCCEEDED:
            return outcome
    return None
