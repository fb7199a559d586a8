"""Stops a run that diverges.

A run ends at a loss or gradient that is not finite, and at a KL beyond spec.guard.maxKL. It ends
when its engine samples from another distribution than the policy's (spec.guard.maxEngineMismatch).
The next attempt then has another engine (spec.generation.fallback). A run also ends when no
completion has a reward, generation after generation, and at the findings of spec.guard.stopOn.
Without this check such a run trains on without an error.

Adam's moments keep a NaN for ever, so every later checkpoint is worthless, at any beta. The
gradient's norm is therefore judged before the optimizer steps, and the loss before a checkpoint of
its step. The weights are judged before each generation, checkpoint and export
(weights/policy_checks.py). These numbers are the same on all ranks, which stop together.
"""

import logging
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from grpo_api.findings.run_numbers import has_generation, has_reward
from grpo_api.findings.step_row import step_row
from grpo_api.plan.plan import MISMATCH_LIMITS, ComputeDtype
from grpo_api.report.report import Finding
from grpo_api.report.training_metrics import COMPLETION_LENGTH, ENGINE_MISMATCH
from grpo_api.spec.generation import EnginePlan
from grpo_api.spec.run_policy import GuardSpec
from grpo_api.text.messages import shorten

from ..gang import ranks
from ..runtime.errors import Diverged, DivergedKL, EngineMismatch, RewardError, StoppedOnFinding

log = logging.getLogger(__name__)

_TOLD = ("reward", "kl")
"""Metrics for the message: TRL has logged them by the time of the gradient, and they may show the
reason."""


def require_finite_metric(
    metric: str, value: float, step: int, metrics: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Raise Diverged if `value`, the same on all ranks, is infinite or no number. `step` is the
    optimizer step, from 1, and `metrics` are TRL's numbers of it, whose latest reward and KL the
    message contains."""
    if math.isfinite(value):
        return
    message_metrics = {key: metrics.get(key) for key in _TOLD} if metrics else {}
    last = ", ".join(f"{key} {values[-1]:.4g}" for key, values in message_metrics.items() if values)
    raise Diverged(
        f"{metric} is {value} at step {step}{f' ({last})' if last else ''}, and nothing was saved "
        "since. Look for rewards of extreme size, lower training.learningRate, or go on without "
        "this batch by guard.onDivergence: Rollback",
        step,
    )


class LogReader(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Reads what TRL logs: numbers of a step, of an evaluation, or of the run's end."""

    def on_log(
        self, _: Any, state: TrainerState, *__: Any, logs: dict[str, Any], **___: Any
    ) -> None:
        """See TrainerCallback."""
        self.read_logs(logs, state.global_step)

    @abstractmethod
    def read_logs(self, logs: Mapping[str, Any], step: int) -> None:
        """Take what was logged at a step."""


class LossGuard(LogReader):
    """Ends the run at a loss that is not finite although its gradient was: before the step can be
    saved."""

    def read_logs(self, logs: Mapping[str, Any], step: int) -> None:
        """Raise Diverged if the step's loss, of which TRL logs the same mean on every rank, is not
        finite."""
        if "loss" in logs:
            numbers = {name: [value] for name, value in logs.items() if isinstance(value, float)}
            require_finite_metric("the loss", logs["loss"], step, numbers)


class KLGuard(LogReader):
    """Ends the run when the KL stays above guard.maxKL; a KL that is not a finite number counts as
    above."""

    def __init__(self, guard: GuardSpec) -> None:
        self._guard = guard
        self._above = 0

    def read_logs(self, logs: Mapping[str, Any], step: int) -> None:
        """Count the steps above the limit. TRL logs the same mean on every rank, so all of them
        stop together.

        Raises:
            DivergedKL: maxKLSteps steps in a row were above maxKL.
        """
        kl = logs.get("kl")
        if self._guard.max_kl is None or kl is None:
            return
        self._above = self._above + 1 if not kl <= self._guard.max_kl else 0
        if self._above >= self._guard.max_kl_steps:
            raise DivergedKL(
                f"the KL was above guard.maxKL = {self._guard.max_kl} for {self._above} steps, "
                f"{kl:.4g} at step {step}; lower training.learningRate, or raise "
                "training.beta or guard.maxKL",
                # the KL of a step is that of the policy before it: the step before the first of
                # these went too far
                step - self._above,
            )


SILENT_GENERATIONS = 3
"""Generations in a row without any reward that end a run: fewer may be a pause of a service."""


class RewardGuard(LogReader):
    """Ends the run when no completion has a reward from any function, in several generations in a
    row: all their advantages are 0, and the run would end as a success that learned nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` of the reward functions."""
        self._names = names
        self._silent_steps: list[int] = []
        """Steps of the generations in a row that had no reward."""

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Count the generations before a restart, which the checkpoint brings."""
        for logged in state.log_history:
            self._count(logged)

    def read_logs(self, logs: Mapping[str, Any], step: int) -> None:
        """Count a generation. TRL logs the same means on every rank, so all of them stop together.

        Raises:
            RewardError: it is one too many without a reward.
        """
        has_counted = self._count({**logs, "step": step})
        if has_counted and len(self._silent_steps) >= SILENT_GENERATIONS:
            count = len(self._silent_steps)
            names = shorten(", ".join(self._names), 120)
            raise RewardError(
                f"no completion has had a reward since step {self._silent_steps[0]}, in {count} "
                f"generations: none of {names} gave one; look at the columns and services that "
                "they read"
            )

    def _count(self, logged: Mapping[str, Any]) -> bool:
        """Take a logged step; True if it has a generation without a reward."""
        row = step_row(logged)
        # A checkpoint also has the logs of evaluations and of a run's end.
        if row is None or "loss" not in logged or not has_generation(row):
            return False
        if has_reward(row):
            self._silent_steps.clear()
            return False
        self._silent_steps.append(row.step)
        return True


class FindingGuard(LogReader):
    """Ends the run at a finding of guard.stopOn. It follows the callback by which rank 0 finds."""

    def __init__(self, guard: GuardSpec, read_findings: Callable[[], Sequence[Finding]]) -> None:
        """`read_findings` returns the findings of the last step on rank 0, and none on other
        ranks."""
        self._stop_on = guard.stop_on
        self._read_findings = read_findings

    def read_logs(self, logs: Mapping[str, Any], step: int) -> None:  # noqa: ARG002  all guards get it
        """Compare rank 0's findings with guard.stopOn. A collective where that is set.

        Raises:
            StoppedOnFinding: it has one of them; on all ranks alike.
        """
        if not self._stop_on or "loss" not in logs:
            return
        findings = [each for each in self._read_findings() if each.finding in self._stop_on]
        if not ranks.any_rank(bool(findings)):
            return
        message = ""
        if findings:
            first = findings[0]
            message = f"guard.stopOn: {first.finding} since step {first.since}. {first.advice}"
        raise StoppedOnFinding(next(filter(None, ranks.gather(message))))


LEAST_TOKENS = 100
"""Tokens that a mean difference is taken over at least; see EngineGuard."""
ONE_COMPLETION = 10.0
"""Limits by which the mean of one completion may differ: no rounding comes near 1 nat a token."""


def largest_mean_difference(inputs: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Largest mean difference of one completion in TRL's tensors of a generation; tokens that it
    lacks of LEAST_TOKENS count as equal."""
    largest = 0.0
    for part in inputs:
        mask = part["completion_mask"] * part.get("tool_mask", 1)
        difference = (part["old_per_token_logps"] - part["sampling_per_token_logps"]).abs()
        # A policy whose own numbers are none is the loss's matter.
        counted = mask.bool() & ~difference.isnan()
        sums = difference.where(counted, 0.0).sum(1)
        means = sums / mask.sum(1).clamp(min=LEAST_TOKENS)
        largest = max(largest, means.max().item())
    return largest


class EngineGuard:
    """Ends the attempt when the engine and the trainer disagree on how likely the tokens were that
    the engine sampled, before the policy is trained on them.

    What is compared is the mean over all tokens of the newest generations that have LEAST_TOKENS
    together; tokens that are still missing count as equal. So a single unlucky token, whose
    probability rounding has changed, can't end a run: it would have to be off by LEAST_TOKENS times
    the limit, 1 nat in float32 and 10 in bfloat16. An engine that computes wrong is off at most
    tokens, so that it is found in its first generations.

    One that computes wrong for some prompts only, such as long ones, may stay below the limit of
    the mean. So no completion may be ONE_COMPLETION limits apart in its own mean.
    """

    def __init__(
        self,
        engine: EnginePlan | None,
        dtype: ComputeDtype,
        *,
        completions: int,
        canary_tokens: int = 0,
    ) -> None:
        """`dtype` is the one that policy and engine compute in, `completions` those of one
        generation. `canary_tokens` are compared in their place; 0 for completions."""
        self._limit = engine.max_mismatch if engine else None
        self._usual_limit = MISMATCH_LIMITS[dtype]
        self._completions = completions
        self._canary_tokens = canary_tokens
        self._recent: deque[tuple[float, float]] = deque()
        """Sum of the differences and number of the tokens, by generation."""
        self._has_warned = False
        self._judged_generation: int | None = None

    def judge(
        self,
        generation: int,
        step: int,
        metrics: Mapping[str, Sequence[float]],
        read_largest: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Judge the newest generations with one more; no number counts as above. Each is judged
        once. `metrics` are TRL's numbers of it, the same on every rank; without a difference of
        log-probabilities nothing is judged. `read_largest` returns the largest mean difference of
        one completion of all ranks, a collective.

        Raises:
            EngineMismatch: the mean difference is above the plan's limit.
        """
        means = metrics.get(ENGINE_MISMATCH.trl)
        if not means or generation == self._judged_generation:
            return
        self._judged_generation = generation
        lengths = metrics.get(COMPLETION_LENGTH.trl) or [1.0]
        tokens = self._canary_tokens or self._completions * lengths[-1]
        difference = self._recent_mean_with(means[-1], tokens)
        if self._limit is None:
            self._warn(difference, step)
        elif not difference <= self._limit:
            raise EngineMismatch(
                f"at step {step} the log-probabilities of the engine's tokens were "
                f"{difference:.4g} nats apart from the trainer's in the mean, and "
                f"{self._limit:g} are allowed (guard.maxEngineMismatch); its weights were proven "
                "to be the trainer's, so it computes otherwise: set "
                "generation.engineArguments.kvCacheDtype to auto, training.dtype to float32, or "
                "generation.engine to Transformers, or raise the limit"
            )
        elif (largest := read_largest()) > ONE_COMPLETION * self._limit:
            raise EngineMismatch(
                f"at step {step} one completion's log-probabilities were {largest:.4g} nats apart "
                f"from the trainer's in the mean, more than {ONE_COMPLETION:g} times "
                f"guard.maxEngineMismatch ({self._limit:g}): the engine computes otherwise for "
                "some prompts, such as long ones; set generation.engine to Transformers"
            )

    def _recent_mean_with(self, mean: float, tokens: float) -> float:
        """Mean difference per token of the newest generations, with one more."""
        self._recent.append((mean * tokens, tokens))
        while sum(count for _, count in self._recent) - self._recent[0][1] >= LEAST_TOKENS:
            self._recent.popleft()
        total = sum(count for _, count in self._recent)
        return sum(difference for difference, _ in self._recent) / max(total, LEAST_TOKENS)

    def _warn(self, difference: float, step: int) -> None:
        """Print once that the numbers have moved away, where that ends nothing."""
        is_large = not difference <= self._usual_limit
        if is_large and not self._has_warned and ranks.rank() == 0:
            log.warning(
                f"at step {step} the engine's log-probabilities are "
                f"{difference:.4g} nats apart from the trainer's in the mean; with a kvCacheDtype "
                "of 8 bits that ends the attempt only with guard.maxEngineMismatch"
            )
        self._has_warned = is_large
