"""What happens when the KL term overflows.

k3 contains exp(log ref - log policy). A token that the policy has made very unlikely overflows it (float32: from a
log-ratio of 88.8), and TRL 1.16 then trains on: the gradient is NaN, one optimizer step makes every parameter NaN, and
the loss is logged as 0.0 (huggingface/trl issue 3015).

The rule here: in a micro-batch whose KL is not finite on any rank, log-ratios beyond +-20 are limited to +-20 on all
ranks and the loss is computed again; the tokens are counted. 20 is also verl's limit for this estimator: exp(20) is
5e8, far above any KL that leaves the model usable, far below overflow in bfloat16. With TRL's importance ratio the
gradient of the term is the log-ratio itself (d/dx of k3 * exp(x - const) at ratio 1), so the step stays of normal size.
Other micro-batches are not touched: a run without overflows trains on TRL's exact loss. If the loss is still not
finite, the policy or the reference is broken, and the run ends as Diverged before the optimizer can spread it.
"""

import math

import torch

from .errors import Diverged

LOG_RATIO_LIMIT = 20.0
METRIC = "kl_overflow_tokens"
"""Key in TRL's logs: tokens limited per micro-batch, mean over the micro-batches of a log interval."""


def limited(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Reference log-probabilities whose log-ratio to the policy's is within the limit; shapes (batch, tokens).

    Values within it are the same bits as before.
    """
    log_ratio = reference - policy
    bounded = policy + log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(log_ratio.abs() <= LOG_RATIO_LIMIT, reference, bounded)


def beyond(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How many of the masked tokens `limited` changes; a scalar."""
    return (((reference - policy).abs() > LOG_RATIO_LIMIT) & mask.bool()).sum()


def require_finite(kl: float, step: int) -> None:
    """Ends the run where limiting did not help.

    Raises:
        Diverged: the KL is still not finite.
    """
    if not math.isfinite(kl):
        raise Diverged(
            f"the KL is {kl} at step {step} even with log-ratios limited to {LOG_RATIO_LIMIT:g}: log-probabilities of "
            "the policy or the reference are not finite. Lower training.learningRate or raise training.beta",
            step,
        )
