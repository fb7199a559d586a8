"""Stops a run that diverges.

A run ends at a loss or gradient that is not finite, at a KL beyond spec.guard.maxKL, and when its
engine samples from another distribution than the policy's (spec.guard.maxEngineMismatch). Without
this check such a run trains on without an error.

Adam's moments keep a NaN for ever, so every later checkpoint is worthless, at any beta. The
gradient's norm is therefore judged before the optimizer steps, the loss before a checkpoint of its
step, and the weights before each generation, checkpoint and export (weights/policy_checks.py).
These numbers are the same on all ranks, which stop together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.report.training_metrics import ENGINE_MISMATCH
from grpo_api.spec.run_policy import GuardSpec

from ..runtime.errors import Diverged, DivergedKL, EngineMismatch

_TOLD = ("reward", "kl")
"""Metrics for the message: TRL has logged them by the time of the gradient, and they may show the
reason."""


def require_finite_metric(
    metric: str, value: float, step: int, metrics: Mapping[str, Sequence[float]] | None = None
) -> None:
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
        f"{metric} is {value} at step {step}{f' ({last})' if last else ''}, and nothing was saved "
        "since. Look for "
        "rewards of extreme size, lower training.learningRate, or go on without this batch by "
        "guard.onDivergence: "
        "Rollback",
        step,
    )


class LossGuard(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Ends the run at a loss that is not finite although its gradient was: before the step can be
    saved."""

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Judge the step's loss, of which TRL logs the same mean on every rank.

        Raises:
            Diverged: it is not finite.
        """
        logs = logs or {}
        if "loss" in logs:
            numbers = {name: [value] for name, value in logs.items() if isinstance(value, float)}
            require_finite_metric("the loss", logs["loss"], state.global_step, numbers)


class KLGuard(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Ends the run when the KL stays above guard.maxKL; a KL that is not a finite number counts as
    above."""

    def __init__(self, guard: GuardSpec) -> None:
        self._guard = guard
        self._above = 0

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Count the steps above the limit. TRL logs the same mean on every rank, so all of them
        stop together.

        Raises:
            DivergedKL: maxKLSteps steps in a row were above maxKL.
        """
        kl = (logs or {}).get("kl")
        if self._guard.max_kl is None or kl is None:
            return
        self._above = self._above + 1 if not kl <= self._guard.max_kl else 0
        if self._above >= self._guard.max_kl_steps:
            raise DivergedKL(
                f"the KL was above guard.maxKL = {self._guard.max_kl} for {self._above} steps, "
                f"{kl:.4g} at step "
                f"{state.global_step}; lower training.learningRate, or raise training.beta or "
                "guard.maxKL",
                # the KL of a step is that of the policy before it: the step before the first of
                # these went too far
                state.global_step - self._above,
            )


class EngineGuard(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Ends the run when the engine and the trainer disagree on how likely the tokens were that the
    engine sampled."""

    def __init__(self, guard: GuardSpec) -> None:
        self._limit = guard.max_engine_mismatch

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Judge the last generation, of which TRL logs the same mean on every rank; no number
        counts as above.

        Raises:
            EngineMismatch: the mean difference is above guard.maxEngineMismatch.
        """
        found = (logs or {}).get(ENGINE_MISMATCH.trl)
        if self._limit is not None and found is not None and not found <= self._limit:
            raise EngineMismatch(
                f"at step {state.global_step} the log-probabilities of the engine's tokens were "
                f"{found:.4g} nats apart "
                f"from the trainer's in the mean, guard.maxEngineMismatch is {self._limit}; its "
                "weights were proven to "
                "be the trainer's, so it computes otherwise: set "
                "generation.engineArguments.kvCacheDtype to auto, "
                "training.dtype to float32, or generation.engine to Transformers, or raise the "
                "limit"
            )
