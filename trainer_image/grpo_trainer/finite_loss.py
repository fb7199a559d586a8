"""TRL's trainer whose loss and gradient are finite, or end the run before the optimizer acts on them.

A part of engine.py, whose list of private names has these; in a file of its own since it is a subject of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from . import divergence, overflow
from .checkpoints.writing import WritingTrainer
from .telemetry.observer import StepObserver


class FiniteLossTrainer(WritingTrainer):
    """GRPOTrainer that limits a KL that overflows, and never steps along a gradient that is not finite."""

    observer: StepObserver

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss; where the KL overflowed on any rank, the loss with limited log-ratios (overflow.py)."""
        with self.observer.clock.phase("forward"):
            loss = self._finite_loss(model, inputs)
        self.observer.clock.enter("backward")
        return loss

    def _finite_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        metrics = self._metrics["train" if self.model.training else "eval"]
        # TRL appends to its metrics within the pass: where the pass is done again, the first one's are taken back.
        before = {key: len(values) for key, values in metrics.items()}
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        if self.beta == 0.0:
            return loss
        limited_tokens = 0.0
        if not math.isfinite(metrics["kl"][-1]):  # a mean over all ranks: every rank sees the same
            del loss  # and with it the activations of the pass that is done again
            for key, values in metrics.items():
                del values[before.get(key, 0) :]
            inputs, limited_tokens = self._limited(model, inputs)
            loss = super()._compute_loss(model, inputs)
            overflow.require_finite(metrics["kl"][-1], self.state.global_step + 1)
        metrics[overflow.METRIC].append(limited_tokens)
        return loss

    def _limited(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """The inputs with limited reference log-probabilities, and how many tokens of all ranks that changed."""
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length, reference = inputs["completion_ids"].size(1), inputs["ref_per_token_logps"]
        with torch.no_grad():
            policy, _, _ = self._get_per_token_logps_and_entropies(model, tokens, mask, length)
            local = overflow.beyond(policy, reference, inputs["completion_mask"])
            count = self.accelerator.reduce(local.float(), reduction="sum").item()
            return inputs | {"ref_per_token_logps": overflow.limited(policy, reference)}, count

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """TRL's norm, which is the same on all ranks. ZeRO has made its step by now, unless the norm is not finite.

        Raises:
            Diverged: it is not finite.
        """
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        divergence.require_finite("the gradient norm", norm, self.state.global_step + 1, self._metrics["train"])
        return norm
