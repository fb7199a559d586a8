"""Stops training on SIGTERM: all ranks agree at the end of a step, and save there if the grace
period allows it.

The ranks of a gang get SIGTERM at different times, or only some of them get it. But a checkpoint
and a stop need all of them at the same step. This is the rule alone; the step's exchange brings it
what the ranks say.
"""

from dataclasses import dataclass

GRACE_MARGIN_SECONDS = 5.0
"""Time kept free before the kubelet's SIGKILL, to write the outcome."""
SAVE_STEPS = 3.0
"""A checkpoint is taken to last as long as this many steps, until one was measured."""


@dataclass(slots=True)
class Preemption:
    """Decides, from what all ranks say, whether to save before the stop."""

    grace_seconds: float
    can_save: bool
    save_seconds: float | None = None
    """Duration of the last checkpoint."""

    def decide(self, seconds_since_sigterm: float, step_seconds: float) -> str:
        """`save` and stop, or `stop` without saving, so long after the first rank got SIGTERM, in a
        run whose steps take `step_seconds`."""
        seconds_left = self.grace_seconds - GRACE_MARGIN_SECONDS - seconds_since_sigterm
        saving = SAVE_STEPS * step_seconds if self.save_seconds is None else self.save_seconds
        if self.can_save and seconds_left >= saving:
            return "save"
        return "stop"
