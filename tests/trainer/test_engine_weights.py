"""What an engine is sent of a policy: names, shapes and values, with an adapter and without, and
nothing is changed."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_trainer.generation.generation_base import policy_weights, weight_shapes
from grpo_trainer.runtime.errors import BadInput
from tests.support.ranks import demo_model


def policy(tmp_path: Path, dtype: torch.dtype, tied: bool = True) -> PreTrainedModel:
    """The demo's model."""
    folder = demo_model.save_policy(tmp_path / "model", tied=tied)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


def adapted(model: PreTrainedModel, targets: list[str]) -> torch.nn.Module:
    """With an adapter that changes something."""
    torch.manual_seed(0)
    wrapped: torch.nn.Module = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or "lora_embedding_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_policy_is_sent_as_it_is_saved(tmp_path: Path, tied: bool) -> None:
    model = policy(tmp_path, torch.float32, tied)
    sent = {name: tensor.clone() for name, tensor in policy_weights(model, torch.float32)}
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == weight_shapes(model)
    assert ("lm_head.weight" in sent) != tied
    for name, tensor in sent.items():
        assert torch.equal(tensor, model.get_parameter(name))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "down_proj"], ["embed_tokens", "k_proj"]])
def test_an_adapter_is_merged_in_what_is_sent_and_the_base_keeps_every_bit(
    tmp_path: Path, targets: list[str]
) -> None:
    model = adapted(policy(tmp_path, torch.bfloat16, tied=False), targets)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(3):
        sent = {name: tensor.clone() for name, tensor in policy_weights(model, torch.bfloat16)}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert list(sent) == list(weight_shapes(model))
    merged = adapted(policy(tmp_path, torch.float32, tied=False), targets).merge_and_unload()  # type: ignore[operator]
    for name, tensor in sent.items():
        wanted = merged.get_parameter(name)
        assert (tensor.float() - wanted).abs().max() <= wanted.abs().max() * 2**-7, name
    own = policy(tmp_path, torch.bfloat16, tied=False)
    changed = {
        name.split(".")[-2]
        for name, tensor in sent.items()
        if not torch.equal(tensor, own.get_parameter(name))
    }
    assert changed == set(targets)


def test_an_adapter_is_added_in_float32(tmp_path: Path) -> None:
    model = adapted(policy(tmp_path, torch.float32), ["q_proj"])
    merged = adapted(policy(tmp_path, torch.float32), ["q_proj"]).merge_and_unload()  # type: ignore[operator]
    for name, tensor in policy_weights(model, torch.float32):
        assert torch.allclose(tensor, merged.get_parameter(name), rtol=0, atol=1e-7)


def test_an_adapter_on_one_of_two_tied_layers_is_refused(tmp_path: Path) -> None:
    model = adapted(policy(tmp_path, torch.float32), ["embed_tokens"])
    with pytest.raises(BadInput, match="embed_tokens shares its weight with another layer"):
        list(policy_weights(model, torch.float32))
