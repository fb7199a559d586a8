"""Finds the cause among the failed results of several pods; the others are its symptoms.

When one rank of a gang dies, its peers lose their connections and the survivors are terminated. The
first failure that is reported is therefore often only a symptom. A pod's supervisor ranks the
results of its processes by this order, and the operator ranks those of its pods by the same one.
"""

import re
from collections.abc import Collection, Iterable
from enum import IntEnum

from .report import Outcome, Result, Standstill
from .termination_message import truncate_to_fit

DIVERGED = frozenset({Result.DIVERGED, Result.DIVERGED_KL})
"""Results that another batch might not give: see spec.guard.onDivergence."""
PERMANENT = DIVERGED | {
    Result.BAD_INPUT,
    Result.WEIGHTS_DIFFER,
    Result.ENGINE_MISMATCH,
    Result.STOPPED_ON_FINDING,
}
"""Results that the same input would give again: no restart."""
LOST_PEER_MESSAGE = "lost the connection to another rank"
"""What a rank's Error says that has no other cause than the end of another."""


class CausePriority(IntEnum):
    """How likely an end is the cause of its peers' ends; the lowest is blamed."""

    PERMANENT = 1
    SPECIFIC = 2
    DISRUPTION = 3
    HANG = 4
    ERROR = 5
    RENDEZVOUS = 6
    LOST_PEER = 7
    TERMINATED = 8


_TIERS = {
    Result.OUT_OF_MEMORY: CausePriority.SPECIFIC,
    Result.OUT_OF_DISK: CausePriority.SPECIFIC,
    Result.REWARD_ERROR: CausePriority.SPECIFIC,
    Result.ENGINE_FAILED: CausePriority.SPECIFIC,
    Result.ENGINE_WEIGHTS_DIFFER: CausePriority.SPECIFIC,
    Result.WEIGHT_SYNC_TIMEOUT: CausePriority.SPECIFIC,
    Result.ENGINE_LOST: CausePriority.SPECIFIC,
    Result.HANG: CausePriority.HANG,
    Result.RENDEZVOUS_TIMEOUT: CausePriority.RENDEZVOUS,
    Result.PREEMPTED: CausePriority.TERMINATED,
}


def cause_priority(
    result: Result, message: str = "", *, reported: bool = True, disrupted: bool = False
) -> CausePriority:
    """Return how likely a failure is the cause of its peers' failures.

    Args:
        result: of the failure; for Succeeded the answer means nothing.
        message: of its Outcome.
        reported: an Outcome says so; false where it was concluded from how the process ended.
        disrupted: the cluster ended the pod (eviction, preemption, node loss), not the program.
    """
    if reported and result in PERMANENT:
        return CausePriority.PERMANENT
    usual_tier = _TIERS.get(result, CausePriority.ERROR)
    if result is Result.ERROR and LOST_PEER_MESSAGE in message:
        usual_tier = CausePriority.LOST_PEER
    # A specific result names its own cause, which a disruption of the pod does not explain.
    if disrupted and usual_tier is not CausePriority.SPECIFIC:
        return CausePriority.DISRUPTION
    return usual_tier


def attribute_hang(hang: Outcome, outcomes: Iterable[Outcome]) -> Outcome:
    """Return the hang, attributed to the rank that all others waited for; unchanged if no outcome
    has a standstill.

    All ranks of a gang run into the same time limit, and the first to report it has mostly waited
    for another. The rank to blame was in no collective. Among several such ranks it is the one
    without progress for the longest time, and among equals one that did not report the hang itself.
    """
    silent = [(outcome, outcome.standstill) for outcome in outcomes if outcome.standstill]
    if not silent:
        return hang
    culprit, standstill = min(silent, key=lambda pair: _suspicion(*pair))
    where = f" in {standstill.frames[0]}" if standstill.frames else ""
    # The innermost frame is mostly a library's; the trainer's own frame says what the rank was
    # doing.
    trainer_frame = next(
        (frame for frame in standstill.frames[1:] if frame.startswith("grpo_trainer/")), ""
    )
    called_from = f", called from {trainer_frame}" if trainer_frame else ""
    silence = f"rank {culprit.rank} has been silent longest, for {standstill.silent_seconds:.0f} s"
    blamed = hang.model_copy(
        update={"rank": culprit.rank, "step": culprit.step, "standstill": standstill}
    )
    return truncate_to_fit(blamed, f"{silence}{where}{called_from}; {hang.message}")


ENGINE_START = "grpo_trainer/engine_pod/engine_start.py:"
"""Begins the frame of every call of vLLM until it has sampled once."""


def is_engine_start(frames: Iterable[str]) -> bool:
    """True if a thread with these frames is in vLLM, which has not sampled yet."""
    return any(frame.startswith(ENGINE_START) for frame in frames)


_ENGINE_CALL = re.compile(r"grpo_trainer/generation/colocated\.py:[0-9]+ in _call")
"""The frame from which a rank calls vLLM."""


def _is_in_vllm(standstill: Standstill) -> bool:
    """True if a rank stood in vLLM: no frame of the trainer is within the one that calls it."""
    own = (frame for frame in standstill.frames if frame.startswith("grpo_trainer/"))
    return _ENGINE_CALL.fullmatch(next(own, "")) is not None


def blame_engine_of_gang(
    hang: Outcome, outcomes: Collection[Outcome], *, is_repeated: bool
) -> Outcome:
    """The attributed hang, as the engine's where no rank can be its cause outside of vLLM.

    Before vLLM has sampled, its ranks then all wait for each other, for one that does not is known
    by itself. Later every rank that does not wait is in vLLM. A single hang after steps is no
    reason for another engine, which is slower for the rest of the run.

    `outcomes` are those of all pods. One alone does not know what the others do. `is_repeated`: the
    attempt before this one has hung, too.
    """
    standstills = [outcome.standstill for outcome in outcomes if outcome.standstill]
    if hang.standstill is None or len(standstills) < len(outcomes):
        return hang
    busy = [standstill for standstill in standstills if not standstill.waiting]
    is_in_start = is_engine_start(hang.standstill.frames) and not busy
    is_in_vllm = all(map(_is_in_vllm, busy or [hang.standstill]))
    if is_in_start:
        cause, what = "NotStarted", "before its first completions: its ranks wait for each other"
    elif is_in_vllm and (is_repeated or not hang.step):
        cause, what = None, "after its first completions"
    else:
        return hang
    changes = {"result": Result.ENGINE_FAILED, "engine_cause": cause}
    return truncate_to_fit(hang.model_copy(update=changes), f"vLLM hangs {what}: {hang.message}")


def _suspicion(outcome: Outcome, still: Standstill) -> tuple[bool, float, bool, int]:
    """Lowest for the rank that the others waited for."""
    return still.waiting, -still.silent_seconds, outcome.result is Result.HANG, outcome.rank
