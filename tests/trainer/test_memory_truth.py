"""The planner's closed form against fake-tensor accounts of the real code: within 1 % of the total peak.

Exists so that an upgrade of transformers, PEFT, TRL or torch that moves memory fails here, and not on a GPU. Widths are
those of real models; most have few layers, since each further layer adds the same bytes, and the terms around the
head, which are the harder ones, weigh more then. benchmarks/memory_truth.py runs whole models.
"""

from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_planner import catalogue
from grpo_planner.architecture import from_config
from grpo_planner.memory import Prediction, Setup, predict, states
from grpo_planner.shapes import Shape
from grpo_trainer import proof
from tests.trainer.accounting import Account, account
from tests.trainer.fake_models import Case, Precision

TOLERANCE = 0.01


def shape(name: str, layers: int) -> Shape:
    """A catalogued shape with fewer layers; of Gemma's, every sixth layer attends to everything."""
    whole = catalogue.shapes()[name]
    return replace(whole, layers=layers, full_attention_layers=layers // 6 if whole.sliding_window else 0)


def case(name: str, family: str, precision: Precision = "bfloat16", layers: int = 2, **settings: Any) -> Case:
    """A case by its model's name; 8 sequences are generated and 4 trained on at a time unless it says otherwise."""
    defaults: dict[str, Any] = {"micro_batch": 4, "generation_batch": 8}
    return Case(name, family, shape(name, layers), precision, **(defaults | settings))


CASES = [
    case("qwen2.5-0.5b", "qwen2"),
    case("qwen2.5-0.5b", "qwen2", "mixed"),
    case("qwen2.5-0.5b", "qwen2", "float32"),
    case("qwen2.5-0.5b", "qwen2", lora_rank=16),
    case("qwen2.5-0.5b", "qwen2", "mixed", eight_bit=True),
    case("qwen2.5-1.5b", "qwen2", "mixed", checkpointing=False, micro_batch=8),
    case("qwen2.5-1.5b", "qwen2", lora_rank=8, checkpointing=False, micro_batch=8),
    case("qwen2.5-7b", "qwen2", micro_batch=2, completion=1024),
    case("qwen2.5-7b", "qwen2", lora_rank=64, micro_batch=2, completion=1024),
    case("qwen3-0.6b", "qwen3", "mixed", checkpointing=False, micro_batch=8),
    case("qwen3-0.6b", "qwen3", checkpointing=False, micro_batch=16),
    case("qwen3-4b", "qwen3", "float32", checkpointing=False, micro_batch=8),
    case("qwen3-4b", "qwen3", "mixed", lora_rank=16, checkpointing=False, micro_batch=8),
    case("qwen3-4b", "qwen3", lora_rank=32, checkpointing=False, micro_batch=8),
    case("llama-3.2-1b", "llama"),
    case("llama-3.2-1b", "llama", "mixed", checkpointing=False, micro_batch=8),
    case("llama-3.2-1b", "llama", lora_rank=16, checkpointing=False, micro_batch=16),
    case("llama-3.1-8b", "llama", micro_batch=1, prompt=512, completion=2048),
    case("mistral-7b", "mistral", "mixed", micro_batch=2),
    case("mistral-7b", "mistral", lora_rank=16, micro_batch=8, completion=512),
    case("smollm2-360m", "llama", "mixed", micro_batch=16, generation_batch=32),
    case("smollm2-360m", "llama", "float32", lora_rank=16, checkpointing=False, micro_batch=8),
    case("phi-4-mini", "phi3"),
    case("phi-4-mini", "phi3", "mixed", checkpointing=False, micro_batch=8),
    case("phi-4-mini", "phi3", lora_rank=16, checkpointing=False, micro_batch=8),
    case("gemma-3-1b", "gemma3_text", layers=6),
    case("gemma-3-1b", "gemma3_text", "mixed", layers=6, checkpointing=False, micro_batch=8),
    case("gemma-3-1b", "gemma3_text", layers=6, lora_rank=16, checkpointing=False, micro_batch=8),
]


def predicted(case: Case, accumulation: int) -> Prediction:
    """The closed form for the same configuration; a reference that needs no weights of its own."""
    setup = Setup(
        case.precision, case.prompt, case.completion, case.micro_batch, accumulation, case.generation_batch,
        lora_rank=case.lora_rank, eight_bit=case.eight_bit, checkpointing=case.checkpointing, reference="Adapter",
    )  # fmt: skip
    return predict(case.shape, setup)


def counted(truth: Account, accumulation: int) -> int:
    """The account's peak of one micro-batch, or of all."""
    return max(peak for name, peak in truth.phases.items() if accumulation > 1 or "accumulating" not in name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_total_peak_is_within_one_percent(case: Case) -> None:
    truth = account(case)
    adapter = truth.trained if case.lora_rank else 0
    assert truth.parameters == case.shape.parameters + adapter
    for accumulation in (1, 2):
        assert predicted(case, accumulation).peak == pytest.approx(counted(truth, accumulation), rel=TOLERANCE)


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
