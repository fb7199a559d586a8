"""The three KL divergences against values worked out by hand, how they relate, and the arithmetic
of an overflow.

A wrong direction or normalisation looks plausible.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from grpo_trainer.runtime.errors import Diverged
from grpo_trainer.training import finite_loss
from tests.support.facts import step_facts
from tests.support.ranks import runs
from tests.trainer import kl


def test_k3_by_hand() -> None:
    policy = torch.tensor([[math.log(0.5), math.log(0.2), math.log(0.4)]], dtype=torch.float64)
    reference = torch.tensor([[math.log(0.25), math.log(0.2), math.log(0.8)]], dtype=torch.float64)
    # ratios reference/policy are 1/2, 1 and 2: r - ln r - 1
    expected = [0.5 + math.log(2) - 1, 0.0, 2 - math.log(2) - 1]
    assert kl.k3(policy, reference)[0].tolist() == pytest.approx(expected, abs=1e-15)


def test_full_by_hand_and_its_direction() -> None:
    policy = torch.tensor([0.75, 0.25], dtype=torch.float64).log()
    reference = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    assert kl.full(policy, reference).item() == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    )
    assert kl.full(reference, policy).item() == pytest.approx(
        0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    )


def test_full_is_the_mean_of_k3_over_the_policys_own_tokens() -> None:
    torch.manual_seed(0)
    policy, reference = (torch.randn(11, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expectation = (policy.exp() * kl.k3(policy, reference)).sum()
    assert kl.full(policy, reference).item() == pytest.approx(expectation.item(), rel=1e-12)


def test_the_seeds_kl_div_is_the_other_direction_per_sequence() -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(3, 4, 7), torch.randn(3, 4, 7)
    batchmean = functional.kl_div(
        policy.log_softmax(-1), reference.softmax(-1), reduction="batchmean"
    )
    assert batchmean.item() == pytest.approx(kl.full(reference, policy).sum().item() / 3, rel=1e-5)


def test_logged_weighs_by_the_importance_ratio_and_ignores_masked_tokens() -> None:
    policy = torch.tensor(
        [[math.log(0.5), math.log(0.5)], [math.log(0.2), 5.0]], dtype=torch.float64
    )
    reference = torch.tensor(
        [[math.log(0.25), math.log(0.5)], [math.log(0.1), math.inf]], dtype=torch.float64
    )
    mask = torch.tensor([[1, 1], [1, 0]])
    half = 0.5 + math.log(2) - 1
    reference = reference.masked_fill(mask == 0, 0.0)
    assert kl.logged(policy, reference, policy, mask).item() == pytest.approx(2 * half / 3)
    sampling = policy - math.log(3)  # every token is three times as likely as when it was sampled
    assert kl.logged(policy, reference, sampling, mask).item() == pytest.approx(3 * 2 * half / 3)


def test_trl_logs_what_logged_says(tmp_path: Path) -> None:
    trainer: Any = runs.build(
        runs.plan(step_facts.saved_model(tmp_path)), output_dir=str(tmp_path / "output")
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = step_facts.fixed_inputs()
    mask = inputs["completion_mask"]
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    with torch.no_grad():
        policy, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, tokens, torch.cat([inputs["prompt_mask"], mask], dim=1), mask.size(1)
        )
    for sampling in (policy, policy - torch.linspace(-0.5, 0.5, mask.numel()).view(mask.shape)):
        trainer._compute_loss(trainer.model, inputs | {"old_per_token_logps": sampling})
        expected = kl.logged(policy, inputs["ref_per_token_logps"], sampling, mask)
        assert trainer._metrics["train"]["kl"][-1] == pytest.approx(expected.item(), rel=1e-5)
    runs.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limiting_keeps_bits_within_and_makes_the_rest_finite(dtype: torch.dtype) -> None:
    policy = torch.tensor([[-1.5, -150.0, -0.25, -200.0]], dtype=dtype)
    reference = torch.tensor([[-2.75, -1.0, -math.inf, -190.0]], dtype=dtype)
    mask = torch.tensor([[1, 1, 1, 1]])
    limited = finite_loss.limited_reference(policy, reference)
    assert limited[0, 0] == reference[0, 0]
    assert limited[0, 3] == reference[0, 3]
    assert limited[0, 1].item() == pytest.approx(-130.0, rel=1e-2)
    assert torch.isfinite(kl.k3(policy, limited)).all()
    assert finite_loss.tokens_beyond_limit(policy, reference, mask).item() == 2
    assert (
        finite_loss.tokens_beyond_limit(policy, reference, torch.tensor([[1, 0, 1, 1]])).item() == 1
    )


def test_a_policy_that_is_not_finite_ends_the_run() -> None:
    policy, reference = torch.tensor([[math.nan]]), torch.tensor([[-1.0]])
    assert not torch.isfinite(kl.k3(policy, finite_loss.limited_reference(policy, reference))).all()
    with pytest.raises(Diverged, match="step 7"):
        finite_loss.require_finite_kl(math.nan, 7)
