"""Checks of single training steps: GPU against CPU, the KL before the first step, 8-bit AdamW, the
fused head.

Both devices train on the same completions, which the CPU has drawn: their random numbers differ,
and a step on other tokens is another step.

The fused head turns hidden states into log-probabilities and entropies without the logits. On a GPU
it uses Triton kernels, which no CPU test has ever run. Here it is compared with the plain formula,
which has the logits.
"""

from typing import Any

import torch
from trl.kernels import chunked_logprob

from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer

from . import trial_runs
from .findings import Context, Finding, make_finding
from .trial_plans import make_plan
from .trial_runs import FinishedRun, Step

STEPS = 2
LIMITS = {"float32": (1e-3, 1e-2), "bfloat16": (0.1, 0.5)}
"""Largest relative error of a step's numbers, and of the weights' way in STEPS steps, by dtype.
Adam's first steps go by the sign of a gradient, so that weights whose gradient is about zero may go
either way."""
EIGHT_BIT_LIMIT = 0.1
"""Of the weights' way in a step with moments in 8 bits instead of 32."""
KL_ZERO = (
    ("Clone", "float32"),
    ("Clone", "bfloat16"),
    ("Offload", "bfloat16"),
    ("Adapter", "bfloat16"),
)
"""Strategies and dtypes whose KL before the first step is checked."""
CPU_STEPS = "cpu-steps.pt"
"""File with the completions that the CPU has drawn and, by dtype, its steps and weight change."""
Tokens = list[list[int]]


class Replay:
    """Stands in for a trainer's generation: keeps what it draws, or gives what another one has
    drawn."""

    def __init__(self, completions: list[Tokens] | None = None) -> None:
        self.completions: list[Tokens] = [] if completions is None else list(completions)
        self._replays = completions is not None

    def install(self, trainer: ReferenceGRPOTrainer) -> None:
        """Take the generation's place."""
        generate = trainer._generate_single_turn

        def turn(prompts: Tokens, *arguments: Any, **named: Any) -> tuple[Tokens, None]:
            if self._replays:
                return self.completions.pop(0), None
            completions = generate(prompts, *arguments, **named)[0]
            self.completions.append([list(map(int, completion)) for completion in completions])
            return completions, None

        setattr(trainer, "_generate_single_turn", turn)  # noqa: B010  # the engine's own method, on this trainer only


def record_cpu_step(context: Context) -> list[Finding]:
    """On the CPU, draw completions and take the steps, for `compare_with_cpu` to read."""
    replay = Replay()
    trial_runs.run_trial(context, _plan(context, "float32"), replay.install)
    recorded: dict[str, Any] = {"completions": replay.completions}
    for dtype in LIMITS:
        recorded[dtype] = _run_steps(context, dtype, replay.completions)
    torch.save(recorded, context.path / CPU_STEPS)
    taken = f"{STEPS} steps in {' and '.join(LIMITS)}, to compare with"
    return [make_finding("step on the CPU", [], taken)]


def compare_with_cpu(context: Context) -> list[Finding]:
    """Take the CPU's steps on the device and compare their numbers."""
    recorded = torch.load(context.path / CPU_STEPS)
    return [_compare_steps(context, dtype, recorded) for dtype in LIMITS]


def check_first_kl(context: Context) -> list[Finding]:
    """Before the first step policy and reference are the same weights: the KL is 0, not about 0."""
    findings = []
    for strategy, dtype in KL_ZERO:
        execution = {"dtype": dtype}
        plan = make_plan(context, strategy, training={"maxSteps": 1}, execution=execution)
        kl = trial_runs.run_trial(context, plan).steps[1]["kl"]
        problems = [] if kl == 0.0 else [f"the KL is {kl:.3g}"]
        what = f"KL of step 1, {strategy}, {dtype}"
        findings.append(make_finding(what, problems, f"KL {kl:g}", {"kl": kl}))
    return findings


def check_eight_bit(context: Context) -> list[Finding]:
    """One step with bitsandbytes' AdamW beside one with torch's."""
    replay = Replay()
    plain = _weight_change(_one_step(context, "AdamW", replay))
    ran = _one_step(context, "AdamW8bit", Replay(replay.completions))
    kinds = {str(state.dtype) for state in _moments(ran.trainer) if state.numel() >= 4096}
    error = _relative_distance(_weight_change(ran), plain)
    dtypes = ", ".join(sorted(kinds)) or "none"
    problems = []
    if "torch.uint8" not in kinds:
        problems.append(f"no moments in 8 bits, only {dtypes}")
    if not error <= EIGHT_BIT_LIMIT:
        problems.append(f"the step differs by {error:.2g} of its length")
    return [make_finding("AdamW8bit", problems, f"moments in {dtypes}", {"apart": error})]


def _one_step(context: Context, optimizer: str, replay: Replay) -> FinishedRun:
    plan = make_plan(context, training={"maxSteps": 1}, execution={"optimizer": optimizer})
    return trial_runs.run_trial(context, plan, replay.install)


def _moments(trainer: ReferenceGRPOTrainer) -> list[torch.Tensor]:
    """The optimizer's tensors, through accelerate's wrapper."""
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value)]


def _compare_steps(context: Context, dtype: str, recorded: dict[str, Any]) -> Finding:
    expected, expected_change = recorded[dtype]
    steps, weight_change = _run_steps(context, dtype, recorded["completions"])
    numbers: dict[str, float | str] = {}
    for name in expected[1]:
        pairs = [(steps[step][name], expected[step][name]) for step in expected]
        numbers[name] = max(_relative_difference(value, wanted) for value, wanted in pairs)
    numbers["weights"] = _relative_distance(weight_change, expected_change)
    of_numbers, of_weights = LIMITS[dtype]
    problems = [
        f"{name} differs by {error:.2g}"
        for name, error in numbers.items()
        if not float(error) <= (of_weights if name == "weights" else of_numbers)
    ]
    compared = f"{STEPS} steps beside the CPU's, relative differences"
    return make_finding(f"step, {dtype}", problems, compared, numbers)


def _plan(context: Context, dtype: str) -> Any:
    return make_plan(context, training={"maxSteps": STEPS}, execution={"dtype": dtype})


def _run_steps(
    context: Context, dtype: str, drawn: list[Tokens]
) -> tuple[dict[int, Step], torch.Tensor]:
    """The steps on given completions: their numbers, and the change of the weights."""
    ran = trial_runs.run_trial(context, _plan(context, dtype), Replay(drawn).install)
    return ran.steps, _weight_change(ran)


def _weight_change(ran: FinishedRun) -> torch.Tensor:
    """Weights after the run less those before it, which the reference still has; one dimension, on
    the CPU."""
    pairs = zip(ran.trainer.model.parameters(), ran.trainer.ref_model.parameters(), strict=True)
    return torch.cat(
        [(after.detach().float() - before.float()).flatten().cpu() for after, before in pairs]
    )


def _relative_distance(weight_change: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance between two ends, relative to the expected change."""
    return float((weight_change - expected).norm() / expected.norm())


def _relative_difference(value: float, expected: float) -> float:
    """Relative difference; of numbers below a ten-thousandth the absolute one in these."""
    return abs(value - expected) / max(abs(expected), 1e-4)


TOKENS, WIDTH, VOCABULARY, TILE = 700, 256, 33000, 32768
"""More than one tile of the vocabulary, and nothing a multiple of a block."""
OUTPUTS = ("log_probs", "entropy")
HEAD_LIMITS = {"float32": (1e-4, 1e-4), "bfloat16": (0.05, 0.02)}
"""Largest error of the values, in nats, and of the gradients, relative to their norm, by dtype of
the matrices. Logits of a bfloat16 product are rounded to bfloat16: at a size of 4 to 2^-7."""


def compare_fused_head(context: Context) -> list[Finding]:
    """Compare TRL's fused head with plain torch in both dtypes."""
    return [_compare_head(context, dtype) for dtype in HEAD_LIMITS]


def _compare_head(context: Context, dtype: str) -> Finding:
    torch.manual_seed(0)
    hidden, weight, targets = _head_inputs(context.device, getattr(torch, dtype))
    seeds = [torch.randn(TOKENS, device=context.device) for _ in OUTPUTS]
    fused = _head_gradients(_fused_head, hidden, weight, targets, seeds)
    plain = _head_gradients(_plain_head, hidden.float(), weight.float(), targets, seeds)
    numbers: dict[str, float | str] = {}
    problems = []
    of_values, of_gradients = HEAD_LIMITS[dtype]
    for name, mine, true in zip((*OUTPUTS, "d hidden", "d weight"), fused, plain, strict=True):
        difference = mine.float() - true
        error, limit = float(difference.norm() / true.norm()), of_gradients
        if name in OUTPUTS:
            error, limit = float(difference.abs().max()), of_values
        numbers[name] = error
        if not error <= limit:
            problems.append(f"{name} is off by {error:.2g}, more than {limit:g}")
    kernel = "Triton" if context.is_gpu else "torch operators, for Triton needs a GPU"
    return make_finding(f"fused head, {dtype}", problems, f"with {kernel}", numbers)


def _head_inputs(
    device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [TOKENS, WIDTH], weights [VOCABULARY, WIDTH], targets [TOKENS]; logits of about
    unit size."""
    hidden = torch.randn(TOKENS, WIDTH, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, device=device) / WIDTH**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), device=device)


def _head_gradients(
    head: object,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    seeds: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Values of OUTPUTS and the gradients of hidden states and weights, for the same gradients of
    the values."""
    inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    values = head(*inputs, targets)  # type: ignore[operator]
    torch.autograd.backward(values, seeds)
    gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
    return [*(value.detach() for value in values), *gradients]


def _fused_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    outputs = chunked_logprob.ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, TILE, None, 1.0, OUTPUTS
    )
    return [outputs[0], outputs[1]]


def _plain_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    scores = torch.log_softmax(hidden @ weight.T, dim=-1)
    return [scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)]
