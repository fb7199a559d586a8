"""Between what a step's time probably is: by the errors of published runs, or by own measurements.

Of ten published whole steps, predicted without their source, eight lie between the two factors that
the fit has stored.
"""

from typing import NamedTuple

from grpo_api.plan.plan import ExecutionPlan

from ..result.formatting import brief_plan_name
from .constants import stored_fit

MEASURED = 0.1
"""Share by which a step differs from what this job's own steps on these GPUs say (assumed)."""


class StepRange(NamedTuple):
    """Seconds that eight of ten steps are between."""

    low: float
    high: float


def step_range(seconds: float, *, is_measured: bool) -> StepRange:
    """The range of a predicted step; `is_measured`: by steps of the job on these GPUs."""
    if is_measured:
        return StepRange(seconds * (1 - MEASURED), seconds * (1 + MEASURED))
    fit = stored_fit()
    return StepRange(seconds * fit.low, seconds * fit.high)


def step_message(seconds: float, *, is_measured: bool) -> str:
    """`35 to 60 s per step, from 51 published runs`."""
    if is_measured:
        return f"{_format(seconds)} s per step, ±{MEASURED:.0%}, measured on this cluster"
    low, high = step_range(seconds, is_measured=False)
    runs = stored_fit().runs
    return f"{_format(low)} to {_format(high)} s per step, from {runs} published runs"


def headline_message(plan: ExecutionPlan) -> str:
    """How a job is trained and how long a step takes, in few words."""
    seconds = plan.estimated_step_seconds
    if seconds is None:
        return brief_plan_name(plan)
    low, high = step_range(seconds, is_measured=plan.step_basis == "Measured")
    return f"{brief_plan_name(plan)}: {_format(low)} to {_format(high)} s per step"


def _format(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
