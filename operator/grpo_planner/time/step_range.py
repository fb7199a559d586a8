"""Gives the range in which a step's time probably lies. It uses the errors of published runs, or
measurements on this cluster.

Of ten published whole steps, predicted without their source, eight lie between the two factors that
the fit has stored.
"""

from typing import NamedTuple

from grpo_api.plan.plan import ExecutionPlan

from ..result.formatting import brief_plan_name, distinct
from .constants import stored_fit


class StepRange(NamedTuple):
    """Seconds that eight of ten steps are between."""

    low: float
    high: float


def step_range(seconds: float, spread: float | None = None) -> StepRange:
    """The range of a predicted step; `spread`: how far off it may be by runs that were measured on
    these GPUs, None where only published ones are known."""
    if spread is not None:
        return StepRange(seconds / (1 + spread), seconds * (1 + spread))
    fit = stored_fit()
    return StepRange(seconds * fit.low, seconds * fit.high)


def step_message(seconds: float, spread: float | None = None) -> str:
    """`35 to 60 s per step, from 51 published runs`, or `47 s per step, ±10%, measured on this
    cluster`."""
    # As the plan publishes it, of which the headline tells.
    seconds = round(seconds, 2)
    if spread is not None:
        return f"{_format(seconds)} s per step, ±{spread:.0%}, measured on this cluster"
    low, high = step_range(seconds)
    runs = stored_fit().runs
    return f"{_range(low, high)} s per step, from {runs} published runs"


def headline_message(plan: ExecutionPlan) -> str:
    """How a job is trained and how long a step takes, in few words."""
    seconds = plan.estimated_step_seconds
    if seconds is None:
        return brief_plan_name(plan)
    low, high = step_range(seconds, plan.step_spread)
    return f"{brief_plan_name(plan)}: {_range(low, high)} s per step"


def _range(low: float, high: float) -> str:
    texts = (_format(low), _format(high))
    return " to ".join(texts if texts[0] != texts[1] else distinct(low, high))


def _format(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
