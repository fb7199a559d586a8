"""Stops training on SIGTERM: all ranks agree at the end of a step, and save at the next generation boundary if the
grace period allows it.

The ranks of a gang get SIGTERM at different times, or only some of them get it, while a checkpoint and a stop need all
of them at the same step. This is the rule alone; the step's exchange brings it what the ranks say.
"""

import math
from dataclasses import dataclass

from grpo_api.plan import TrainingPlan

GRACE_MARGIN_SECONDS = 5.0
"""Time kept free before the kubelet's SIGKILL, to write the outcome."""
SAVE_STEPS = 3.0
"""A checkpoint is taken to last as long as this many steps, until one was measured."""


@dataclass(slots=True)
class Preemption:
    """Decides, from what all ranks say, whether to go on, to save and stop, or to stop at once."""

    grace_seconds: float
    boundary: int
    """Optimizer steps between two generations: only there is a resume exact."""
    can_save: bool
    save_seconds: float | None = None
    """Duration of the last checkpoint."""

    @classmethod
    def of(cls, plan: TrainingPlan) -> "Preemption":
        """The rule of a plan."""
        return cls(plan.grace_period_seconds, generation_boundary(plan), plan.checkpoint_directory is not None)

    def decide(self, step: int, waited: float, step_seconds: float) -> str:
        """`continue` to the boundary, `save` and stop here, or `stop` without saving.

        Args:
            step: finished optimizer steps.
            waited: seconds since the first rank got SIGTERM.
            step_seconds: mean duration of a step.
        """
        if not self.can_save:
            return "stop"
        left = self.grace_seconds - GRACE_MARGIN_SECONDS - waited
        steps = -step % self.boundary
        saving = SAVE_STEPS * step_seconds if self.save_seconds is None else self.save_seconds
        if left < steps * step_seconds + saving:
            return "stop"
        return "continue" if steps else "save"


def generation_boundary(plan: TrainingPlan) -> int:
    """Optimizer steps after which a step ends where a generation does: resume is exact only there, since TRL keeps the
    rollouts of a generation in memory only (grpo_trainer.py, `_prepare_inputs`)."""
    execution = plan.execution
    micro_steps = execution.steps_per_generation * plan.training.num_iterations
    return math.lcm(micro_steps, execution.gradient_accumulation) // execution.gradient_accumulation
