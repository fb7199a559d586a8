"""Ends a run at the first number that is not finite, before anything is sealed.

Adam's moments keep a NaN for ever: one step with such a gradient, and every checkpoint after it is worth nothing, at
any beta. So the gradient's norm is judged before the optimizer steps, the loss before a checkpoint of its step, and
the weights themselves before each generation, checkpoint and export (weights/finite.py). All of these numbers are the
same on all ranks, which therefore stop together.
"""

import math
from collections.abc import Mapping, Sequence

from .errors import Diverged

_TOLD = ("reward", "kl")
"""Metrics for the message: TRL has logged them by the time of the gradient, and they may show the reason."""


def require_finite(metric: str, value: float, step: int, metrics: Mapping[str, Sequence[float]] | None = None) -> None:
    """Raise Diverged if `value` is infinite or not a number.

    Args:
        metric: what it is, as in "the gradient norm".
        value: the same on all ranks.
        step: the optimizer step that it belongs to, from 1.
        metrics: TRL's numbers of that step; the message contains the latest reward and KL.

    Raises:
        Diverged: it is infinite or no number.
    """
    if math.isfinite(value):
        return
    known = {key: metrics.get(key) for key in _TOLD} if metrics else {}
    last = ", ".join(f"{key} {values[-1]:.4g}" for key, values in known.items() if values)
    raise Diverged(
        f"{metric} is {value} at step {step}{f' ({last})' if last else ''}, and nothing was saved since. Look for "
        "rewards of extreme size, lower training.learningRate, or go on without this batch by guard.onDivergence: "
        "Rollback",
        step,
    )
