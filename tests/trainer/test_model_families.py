"""The model types that a plan calls exact are held to transformers' own classes and to PEFT, on the
meta device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from grpo_planner.memory.generation import cached_positions
from grpo_planner.memory.setup import Setup
from grpo_planner.model.architecture import from_architecture
from grpo_planner.model.shapes import ALL_LINEAR, Shape, families
from grpo_trainer.weights.model_files import architecture_of_config
from grpo_trainer.weights.models import architecture_of
from tests.support.ledger.config_shapes import from_config

SMALL: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40, "moe_intermediate_size": 24, "num_local_experts": 5, "num_experts": 5,
    "num_experts_per_tok": 2, "vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EAGER = {"gemma2", "gpt_oss"}
DENSE_TARGETS = [
    ("q_proj", "v_proj"),
    ("self_attn.o_proj",),
    ("down_proj", "model.layers.1.self_attn.q_proj"),
]
FUSED_TARGETS = [("qkv_proj",), ("down_proj", "o_proj"), ("model.layers.2.mlp.gate_up_proj",)]


def built(kind: str, **keys: Any) -> tuple[Any, Shape]:
    """A model on the meta device, and the planner's shape of its config.json."""
    config: PretrainedConfig = AutoConfig.for_model(kind, **(SMALL | keys))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model, from_config(config.to_diff_dict() | {"model_type": kind})


@pytest.mark.parametrize("kind", families())
@settings(max_examples=6)
@given(
    widths=st.fixed_dictionaries({
        "tie_word_embeddings": st.booleans(), "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "num_attention_heads": st.sampled_from([4, 6]), "num_key_value_heads": st.sampled_from([1,
        2]),
        "num_hidden_layers": st.integers(1, 8), "intermediate_size": st.integers(1, 64),
    })
)  # fmt: skip
def test_parameters_are_those_of_transformers(kind: str, widths: dict[str, Any]) -> None:
    model, shape = built(kind, **widths)
    assert shape.counted_parameters == sum(parameter.numel() for parameter in model.parameters())
    reported = architecture_of(model)
    assert reported is not None
    assert from_architecture(reported) == shape
    # A preflight reads the same of the file alone.
    assert architecture_of_config(model.config) == reported
    vectors = sum(count * elements for count, elements in shape.vectors)
    experts = (
        shape.layers
        * shape.experts
        * (2 * shape.intermediate + shape.hidden + 1)
        * shape.expert_bias
    )
    sinks = shape.layers * shape.heads * shape.sinks
    assert vectors + experts + sinks == shape.layers * shape.layer_vectors + shape.hidden


@pytest.mark.parametrize("kind", families())
def test_what_a_file_leaves_out_is_transformers_default(kind: str) -> None:
    sparse = from_config({"model_type": kind})
    assert sparse == from_config(AutoConfig.for_model(kind).to_dict() | {"model_type": kind})


@pytest.mark.parametrize("kind", families())
def test_attention_runs_eager_where_the_plan_says_so(kind: str) -> None:
    model, shape = built(kind)
    assert shape.eager == (model.config._attn_implementation == "eager") == (kind in EAGER)


@pytest.mark.parametrize("kind", families())
def test_windows_are_those_of_the_cache(kind: str) -> None:
    from transformers import DynamicCache

    model, shape = built(kind, sliding_window=16, use_sliding_window=True, max_window_layers=4)
    lengths = [
        getattr(layer, "sliding_window", None) or 1000
        for layer in DynamicCache(config=model.config).layers
    ]
    assert cached_positions(shape, 1000) >= sum(lengths)
    # The others have no window in any published model; one that was set is counted as if it
    # weren't.
    if families()[kind].window != "none":
        assert cached_positions(shape, 1000) == sum(lengths)


@pytest.mark.parametrize("kind", families())
def test_adapters_are_those_of_peft(kind: str) -> None:
    attention_only = kind in {"qwen3_moe", "mixtral", "gpt_oss"}
    subsets = (
        FUSED_TARGETS if kind == "phi3" else DENSE_TARGETS[:2] if attention_only else DENSE_TARGETS
    )
    if kind == "glm4":
        subsets = [*DENSE_TARGETS, FUSED_TARGETS[2]]
    for targets in [ALL_LINEAR, *subsets, ("embed_tokens", "o_proj")]:
        model, shape = built(kind, tie_word_embeddings=False)
        names = "all-linear" if targets == ALL_LINEAR else list(targets)
        adapted = get_peft_model(model, LoraConfig(r=3, target_modules=names))
        assert adapted.get_nb_trainable_parameters()[0] == shape.adapter_parameters(3, targets), (
            targets
        )


def test_the_optimizers_state_is_that_of_the_adapted_modules() -> None:
    from grpo_planner.memory.states import moments, optimizer_state

    shape = built("llama")[1]
    few = Setup(
        precision="bfloat16",
        prompt=8,
        completion=8,
        micro_batch=1,
        lora_rank=4,
        lora_targets=("q_proj",),
    )
    assert optimizer_state(shape, few) == 8 * shape.layers * 4 * (shape.hidden + shape.query)
    narrow = shape.layers * (moments(4 * shape.hidden) + moments(4 * shape.query))
    assert optimizer_state(shape, replace(few, eight_bit=True)) == narrow
