"""Why this plan and no other, in a sentence with the two numbers that decided.

A table of candidates holds the answer, but not on its first line.
"""

from grpo_api.plan.plan import ExecutionPlan

from .result import Candidate, PlanResult
from .words import named


def why(result: PlanResult) -> str:
    """What decided for the chosen plan; empty where nothing was compared."""
    chosen = result.chosen
    if chosen is None or chosen.memory is None:
        return ""
    others = result.candidates[1:]
    if chosen.method == "LoRA" and (missed := _nearest(others, "Full")):
        return f"an adapter, because {_lacks(missed, 'training all parameters')}"
    fitting = [other for other in others if _is_outdone(other)]
    if not fitting:
        missed = next((other for other in others if _misses(other)), None)
        return f"nothing else fits: {_lacks(missed, f'the nearest, {named(missed)},')}" if missed else ""
    rival = min(fitting, key=_step_seconds)
    assert rival.rejected is not None, "it was not chosen"
    return (
        f"{_step_seconds(chosen):.1f} s per step; {named(rival)} would take {_step_seconds(rival):.1f} s: "
        f"{rival.rejected.message}"
    )


def _step_seconds(plan: ExecutionPlan) -> float:
    return plan.estimated_step_seconds or 0


def _is_outdone(candidate: Candidate) -> bool:
    return candidate.rejected is not None and candidate.rejected.reason in ("Slower", "NoBetter")


def _misses(candidate: Candidate) -> bool:
    return candidate.rejected is not None and candidate.rejected.reason in ("DeviceMemory", "HostMemory")


def _nearest(candidates: list[Candidate], method: str) -> Candidate | None:
    """The first candidate of a method that doesn't fit, which is the one that lacks least."""
    for other in candidates:
        if other.method == method and _misses(other):
            return other
    return None


def _lacks(candidate: Candidate, what: str) -> str:
    """`training all parameters needs 94.4 GiB at forward, has 78.9 GiB`."""
    assert candidate.rejected is not None, "it doesn't fit"
    return f"{what} {candidate.rejected.message}"
