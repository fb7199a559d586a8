"""How long each stage of an attempt may go without progress before it counts as a hang.

Three readers share this table. The trainer's watchdog ends a rank by it, and the operator ends a
gang whose watchdog did not. The planner warns where a step is estimated to take longer than
guard.hangTimeoutSeconds.
"""

from ..report.report import STEP_STAGES
from ..spec.run_policy import GuardSpec
from .plan import STEP_ESTIMATES, ExecutionPlan

CONNECTING_SECONDS = 60.0
"""Time for the process group and its first all-reduce; both take seconds where the network
works."""
CONNECTING_SECONDS_PER_RANK = 0.1
"""NCCL's bootstrap grows with the gang (assumed, not measured)."""


def hang_timeout_seconds(stage: str, guard: GuardSpec, execution: ExecutionPlan) -> float:
    """Seconds without progress after which an attempt hangs.

    Progress is a finished step in the stages of a step; everywhere else it is a change of stage,
    bytes that were read or written, or a finished part of the work, on any rank: who waits for a
    peer that works does not hang.
    """
    if stage in ("Importing", "Starting"):  # older images say Starting
        return float(
            guard.hang_timeout_seconds + guard.rendezvous_timeout_seconds
        )  # late peers have an end of their own
    if stage == "Connecting":
        return CONNECTING_SECONDS + CONNECTING_SECONDS_PER_RANK * execution.world_size
    if stage in STEP_STAGES:
        return max(
            float(guard.hang_timeout_seconds),
            STEP_ESTIMATES * (execution.estimated_step_seconds or 0.0),
        )
    return float(guard.hang_timeout_seconds)
