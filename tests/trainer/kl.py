"""The KL divergences of GRPO, one function each, and how they relate.

Three quantities go by the name "KL" and only one of them is trained on. With log-ratio
d = log ref(token) - log policy(token):

- `k3`: exp(d) - d - 1 per sampled token (Schulman, "Approximating KL Divergence", 2020; GRPO paper,
  equation 4). Never negative, and its mean over tokens sampled from the policy is KL(policy ||
  reference). TRL adds beta times it to the loss.
- `logged`: what TRL logs as `kl`: k3 times the importance ratio policy/old (use_bias_correction_kl,
  on by default), averaged over completion tokens of all ranks. The ratio is 1 while on-policy, so
  both then agree.
- `full`: the sum over the whole vocabulary, the exact value that k3 estimates.
  `F.kl_div(log_softmax(policy), softmax(reference), reduction="batchmean")`, often seen in its
  place, is KL(reference || policy), the other direction, divided by the number of sequences instead
  of tokens: call `full` with the arguments swapped to get it per token.
"""

import torch


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per-token k3 estimate in nats from log-probabilities of the sampled tokens; shapes (batch,
    tokens)."""
    log_ratio = reference - policy
    return torch.exp(log_ratio) - log_ratio - 1


def logged(
    policy: torch.Tensor, reference: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Mean over the masked tokens of k3 times the importance ratio; a scalar in nats per token.

    `sampling` has the log-probabilities of the policy that sampled the tokens (TRL:
    old_per_token_logps); all of shape (batch, tokens).
    """
    weighted = k3(policy, reference) * torch.exp(policy - sampling)
    return (weighted * mask).sum() / mask.sum().clamp(min=1)


def full(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) in nats over whole distributions; logits of shape (..., vocabulary)
    to shape (...)."""
    log_policy, log_reference = policy.log_softmax(-1), reference.log_softmax(-1)
    return (log_policy.exp() * (log_policy - log_reference)).sum(-1)
