"""The planner's closed form against fake-tensor accounts of the real code: within 1 % of the total peak.

An upgrade of transformers, PEFT, TRL or torch that moves memory fails here, and not on a GPU. Widths are those of real
models; most have few layers, since each further layer adds the same bytes, and the terms around the head, which are the
harder ones, weigh more then. benchmarks/memory_truth.py runs whole models.
"""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_planner.memory import states
from grpo_planner.model.architecture import from_config
from grpo_trainer.weights import proof
from harness.ranks.accounting import account
from harness.ranks.fake_models import Case
from harness.ranks.memory_cases import CASES, UNFUSED, case, counted, predicted

TOLERANCE = 0.01
UNFUSED_TOLERANCE = 0.03
"""Of mixtures of experts and of attention without a kernel; too low by TOLERANCE at the most."""
pytestmark = pytest.mark.no_cover  # fake tensors are all Python: a tracer takes a fifth of their time


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_total_peak_is_within_one_percent(case: Case) -> None:
    truth = account(case)
    adapter = truth.trained if case.lora_rank else 0
    assert truth.parameters == case.shape.parameters + adapter
    for accumulation in (1, 2):
        assert predicted(case, accumulation).peak == pytest.approx(counted(truth, accumulation), rel=TOLERANCE)


@pytest.mark.parametrize("case", UNFUSED, ids=lambda case: case.name)
def test_experts_and_eager_attention_are_within_three_percent(case: Case) -> None:
    truth = account(case)
    adapter = truth.trained if case.lora_rank else 0
    assert truth.parameters == case.shape.parameters + adapter
    for accumulation in (1, 2):
        error = predicted(case, accumulation).peak / counted(truth, accumulation) - 1
        assert -TOLERANCE <= error <= UNFUSED_TOLERANCE, f"{error:+.2%}"


def test_adapters_of_experts_count_as_peft_makes_them() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    adapted = get_peft_model(Qwen3MoeForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    assert adapted.get_nb_trainable_parameters()[0] == from_config(config.to_dict()).adapter_parameters(8)


def test_the_plan_knows_the_proofs_chunk() -> None:
    assert states.PROOF_CHUNK == proof.CHUNK


def test_an_account_is_the_same_every_time() -> None:
    small = case("smollm2-360m", "llama", lora_rank=8, layers=1)
    assert account(small) == account(small)
