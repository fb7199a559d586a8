"""TRL's fused head: Triton kernels on a GPU, which no CPU test has ever run, against the plain formula.

The head turns hidden states into log-probabilities and entropies without the logits. Here are the logits.
"""

import torch
from trl.kernels import chunked_logprob

from .findings import Context, Finding, judged

TOKENS, WIDTH, VOCABULARY, TILE = 700, 256, 33000, 32768
"""More than one tile of the vocabulary, and nothing a multiple of a block."""
OUTPUTS = ("log_probs", "entropy")
LIMITS = {"float32": (1e-4, 1e-4), "bfloat16": (0.05, 0.02)}
"""Largest error of the values, in nats, and of the gradients, relative to their norm, by dtype of the matrices.
Logits of a bfloat16 product are rounded to bfloat16: at a size of 4 to 2^-7."""


def compare(context: Context) -> list[Finding]:
    """Both dtypes."""
    return [_compared(context, dtype) for dtype in LIMITS]


def _compared(context: Context, dtype: str) -> Finding:
    torch.manual_seed(0)
    hidden, weight, targets = _inputs(context.device, getattr(torch, dtype))
    seeds = [torch.randn(TOKENS, device=context.device) for _ in OUTPUTS]
    fused = _gradients(_fused, hidden, weight, targets, seeds)
    plain = _gradients(_plain, hidden.float(), weight.float(), targets, seeds)
    numbers: dict[str, float | str] = {}
    for name, mine, true in zip((*OUTPUTS, "d hidden", "d weight"), fused, plain, strict=True):
        error = (mine.float() - true).abs().max() if name in OUTPUTS else (mine.float() - true).norm() / true.norm()
        numbers[name] = float(error)
    values, gradients = LIMITS[dtype]
    problems = [
        f"{name} is off by {error:.2g}, more than {limit:g}"
        for (name, error), limit in zip(numbers.items(), (values, values, gradients, gradients), strict=True)
        if not float(error) <= limit
    ]
    kernel = "Triton" if context.gpu else "torch operators, for Triton needs a GPU"
    return judged(f"fused head, {dtype}", problems, f"with {kernel}", numbers)


def _inputs(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [TOKENS, WIDTH], weights [VOCABULARY, WIDTH], targets [TOKENS]; logits of about unit size."""
    hidden = torch.randn(TOKENS, WIDTH, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, device=device) / WIDTH**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), device=device)


def _gradients(
    head: object, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, seeds: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Values of OUTPUTS and the gradients of hidden states and weights, for the same gradients of the values."""
    inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    values = head(*inputs, targets)  # type: ignore[operator]
    torch.autograd.backward(values, seeds)
    return [*(value.detach() for value in values), *(one.grad for one in inputs if one.grad is not None)]


def _fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    found = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TILE, None, 1.0, OUTPUTS)
    return [found[0], found[1]]


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    scores = torch.log_softmax(hidden @ weight.T, dim=-1)
    return [scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)]
