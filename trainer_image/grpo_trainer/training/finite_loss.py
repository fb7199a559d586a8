"""TRL's trainer with a finite loss and gradient: it limits a KL that overflows, or ends the run.

k3 contains exp(log ref - log policy). A token that the policy has made very unlikely overflows it
(float32: from a log-ratio of 88.8). TRL 1.16 then trains on. The gradient is NaN, one optimizer
step makes every parameter NaN, and the loss is logged as 0.0 (huggingface/trl issue 3015).

The rule here acts on a micro-batch whose KL is not finite on at least one rank. On all ranks,
log-ratios beyond +-20 are limited to +-20 and the loss is computed again; the tokens are counted.
For this estimator, verl has the same limit. The number exp(20) is 5e8, far above any KL that leaves
the model usable, and far below overflow in bfloat16. With TRL's importance ratio the gradient of
the term is the log-ratio itself (d/dx of k3 * exp(x - const) at ratio 1). So the step stays of
normal size. Other micro-batches are not touched: a run without overflows trains on TRL's exact
loss. If the loss is still not finite, the policy or the reference is broken, and the run ends as
Diverged.

The private names of TRL that this module uses are listed in reference_trainer.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..checkpoints.writing import WritingTrainer
from ..runtime.errors import Diverged
from ..telemetry.observer import StepObserver
from . import guard

LOG_RATIO_LIMIT = 20.0
KL_OVERFLOW_METRIC = "kl_overflow_tokens"
"""Key in TRL's logs: tokens limited per micro-batch, mean over the micro-batches of a log
interval."""
ENTROPY_CONTROL = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""State of TRL's trainer that a pass changes with useAdaptiveEntropy."""


def limited_reference(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Reference log-probabilities whose log-ratio to the policy's is within the limit.

    All shapes are (batch, tokens); arguments of one dtype give a result of it. Values within the
    limit keep their bits.
    """
    log_ratio = reference - policy
    bounded = policy + log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(log_ratio.abs() <= LOG_RATIO_LIMIT, reference, bounded)


def tokens_beyond_limit(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Count the masked tokens that `limited_reference` changes; a scalar, int64.

    All arguments have the shape (batch, tokens); the mask counts a token where it is not 0.
    """
    return (((reference - policy).abs() > LOG_RATIO_LIMIT) & mask.bool()).sum()


def require_finite_kl(kl: float, step: int) -> None:
    """Ends the run where limiting did not help.

    Raises:
        Diverged: the KL is still not finite.
    """
    if not math.isfinite(kl):
        raise Diverged(
            f"the KL is {kl} at step {step} even with log-ratios limited to {LOG_RATIO_LIMIT:g}: "
            "log-probabilities of the policy or the reference are not finite. Lower "
            "training.learningRate or raise training.beta",
            step,
        )


class FiniteLossTrainer(WritingTrainer):
    """GRPOTrainer that limits a KL that overflows, and never steps along a gradient that is not
    finite."""

    observer: StepObserver

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss; where the KL overflowed on any rank, the loss with limited log-ratios."""
        with self.observer.clock.phase("forward"):
            loss = self._finite_loss(model, inputs)
        self.observer.clock.enter("backward")
        return loss

    def _finite_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        metrics = self._metrics["train" if self.model.training else "eval"]
        # TRL appends to its metrics, and moves its adaptive entropy coefficient, within the pass:
        # where the pass is done again, what the first one did is taken back.
        before = {key: len(values) for key, values in metrics.items()}
        entropy_control = {name: getattr(self, name) for name in ENTROPY_CONTROL}
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        if self.beta == 0.0:
            return loss
        limited_tokens = 0.0
        if not math.isfinite(metrics["kl"][-1]):  # a mean over all ranks: every rank sees the same
            del loss  # and with it the activations of the pass that is done again
            for key, values in metrics.items():
                del values[before.get(key, 0) :]
            for name, value in entropy_control.items():
                setattr(self, name, value)
            inputs, limited_tokens = self._limit_reference(model, inputs)
            loss = super()._compute_loss(model, inputs)
            require_finite_kl(metrics["kl"][-1], self.state.global_step + 1)
        metrics[KL_OVERFLOW_METRIC].append(limited_tokens)
        return loss

    def _limit_reference(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], float]:
        """The inputs with limited reference log-probabilities, and how many tokens of all ranks
        that changed."""
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length, reference = inputs["completion_ids"].size(1), inputs["ref_per_token_logps"]
        with torch.no_grad():
            policy, _, _ = self._get_per_token_logps_and_entropies(model, tokens, mask, length)
            local = tokens_beyond_limit(policy, reference, inputs["completion_mask"])
            count = self.accelerator.reduce(local.float(), reduction="sum").item()
            return inputs | {"ref_per_token_logps": limited_reference(policy, reference)}, count

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """TRL's norm, which is the same on all ranks. ZeRO has made its step by now, unless the
        norm is not finite.

        Raises:
            Diverged: it is not finite.
        """
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        guard.require_finite_metric(
            "the gradient norm", norm, self.state.global_step + 1, self._metrics["train"]
        )
        return norm
