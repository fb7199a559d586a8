"""How a pod ended, and which of several ends is the cause of the others.

Exists because the first pod of a gang to fail is often only a symptom: when one rank dies, its peers lose their
connections, and the Job controller deletes the survivors. Pure. Used by records (one pod) and observe (the gang).

Trust, in this order (design: "The contract between operator and pod"): the Outcome in the termination message, the
container's and pod's state as the kubelet wrote it, the exit code. Only an Outcome can say Succeeded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any

from pydantic import ValidationError

from grpo_api.report import EXIT_CODES, Outcome, Result

_RESULTS = {code: result for result, code in EXIT_CODES.items() if result is not Result.SUCCEEDED}
_SIGTERM = EXIT_CODES[Result.PREEMPTED]
MAX_MESSAGE = 3072
PERMANENT = frozenset({Result.BAD_INPUT, Result.WEIGHTS_DIFFER, Result.DIVERGED_KL})
"""Results that the same input would give again: no restart."""


class Tier(IntEnum):
    """How likely an end is the cause of its peers' ends; the lowest is blamed."""

    PERMANENT = 1
    SPECIFIC = 2
    DISRUPTION = 3
    HANG = 4
    ERROR = 5
    RENDEZVOUS = 6
    TERMINATED = 7


@dataclass(frozen=True, slots=True)
class PodEnd:
    """The end of one pod. `reported`: an Outcome says so, it is not concluded from the container's state."""

    outcome: Outcome
    finished_at: float | None
    reported: bool
    disrupted: bool = False
    """The cluster ended the pod (eviction, preemption, node loss), not the program."""
    exit_code: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the trainer itself said that it was done."""
        return self.reported and self.outcome.result is Result.SUCCEEDED

    @property
    def tier(self) -> Tier:
        """Where the end stands in the search for the cause."""
        result = self.outcome.result
        if self.reported and result in PERMANENT:
            return Tier.PERMANENT
        if result in (Result.OUT_OF_MEMORY, Result.REWARD_ERROR):
            return Tier.SPECIFIC
        if self.disrupted:
            return Tier.DISRUPTION
        return _TIERS.get(result, Tier.ERROR)

    @property
    def certain(self) -> bool:
        """Whether no later end of a peer could be the cause of this one.

        A trainer that lost a peer reports Error, Hang or RendezvousTimeout, and one that is told to end reports
        Preempted; a process that died without a report died of itself.
        """
        return self.tier <= Tier.DISRUPTION or not (self.reported or self.tier is Tier.TERMINATED)


_TIERS = {
    Result.HANG: Tier.HANG,
    Result.RENDEZVOUS_TIMEOUT: Tier.RENDEZVOUS,
    Result.PREEMPTED: Tier.TERMINATED,
}


def root_cause(ends: Iterable[PodEnd]) -> PodEnd | None:
    """The end to blame: the lowest tier, then the earliest, then the lowest rank."""
    failed = [end for end in ends if not end.succeeded]
    return min(failed, key=lambda e: (e.tier, e.finished_at or 0.0, e.outcome.rank), default=None)


def pod_end(status: Mapping[str, Any]) -> PodEnd | None:
    """The end that a pod's status tells of, None while its container may still run."""
    target: Mapping[str, Any] = next((c for c in status.get("conditions") or () if c["type"] == "DisruptionTarget"), {})
    disrupted = target.get("status") == "True"
    why = ": ".join(str(part[k]) for part in (target, status) for k in ("reason", "message") if part.get(k))
    ended = [c["state"]["terminated"] for c in status.get("containerStatuses") or () if "terminated" in c["state"]]
    if ended:
        return _container_end(ended[0], disrupted, why)
    if status.get("phase") != "Failed":
        return None
    broken = next((c for c in status.get("initContainerStatuses") or () if _exit_code(c)), None)
    if broken and not why:
        message = f"init container {broken['name']} ended with exit code {_exit_code(broken)}; see its log"
        return PodEnd(Outcome(result=Result.ERROR, message=_cut(message)), None, False)
    # no container ran: the kubelet refused or evicted the pod, which says nothing about the program
    return PodEnd(Outcome(result=Result.PREEMPTED, message=_cut(why or "the pod failed")), None, False, disrupted=True)


def _exit_code(container: Mapping[str, Any]) -> int:
    """Exit code of a container that has ended, else 0."""
    return int((container.get("state") or {}).get("terminated", {}).get("exitCode", 0))


def _container_end(terminated: Mapping[str, Any], disrupted: bool, why: str) -> PodEnd:
    code, finished = terminated["exitCode"], terminated.get("finishedAt")
    at = datetime.fromisoformat(finished).timestamp() if finished else None
    reported = _reported(terminated.get("message") or "")
    if reported:
        return PodEnd(reported, at, True, disrupted, code)
    if terminated.get("reason") == "OOMKilled":
        message = "the kernel killed the container at its memory limit (OOMKilled); raise spec.resources.limits.memory"
        return PodEnd(Outcome(result=Result.OUT_OF_MEMORY, message=message), at, False, disrupted, code)
    if code == 0:
        result, message = Result.ERROR, "the container ended with exit code 0 but left no outcome, so it is not done"
    else:
        result = _RESULTS.get(code, Result.ERROR)
        message = f"the container ended with exit code {code} and left no outcome"
    detail = "; ".join(part for part in (why, (terminated.get("message") or "").strip()) if part)
    return PodEnd(
        Outcome(result=result, message=_cut(f"{message}: {detail}" if detail else message)), at, False, disrupted, code
    )


def _reported(message: str) -> Outcome | None:
    """The Outcome in a termination message; None when it holds something else, such as a kubelet's own words."""
    try:
        return Outcome.model_validate_json(message, extra="ignore")
    except ValidationError:
        return None


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
