"""What an engine is sent of a policy: names, shapes and values, with an adapter and without, and
nothing is changed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_trainer.generation import generation_base, merged_weights
from grpo_trainer.generation.generation_base import EngineGeneration, EngineSetup
from grpo_trainer.generation.merged_weights import (
    policy_weights,
    require_pefts_merge,
    weight_shapes,
)
from grpo_trainer.runtime.errors import BadInput, EngineWeightsDiffer
from grpo_trainer.telemetry.phases import PhaseClock
from tests.support.ranks import demo_model, runs


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


class Receiving(EngineGeneration):
    """An engine that takes what it is sent."""

    def attempt_sync(self, _: int) -> Sequence[str]:
        """Take every weight."""
        self.names = [name for name, _ in self.weights()]
        return ()

    def sample(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
        """Nothing."""
        return []

    def changed_weights(self) -> Sequence[str]:
        """None."""
        return ()


def receiving(model: torch.nn.Module) -> Receiving:
    """An engine of this policy."""
    plan, folder = runs.plan(Path("/models/demo")), Path("/models/demo")
    setup = EngineSetup(plan, folder, PhaseClock(lambda: 0.0), lambda _: None, lambda: None)
    return Receiving(setup, model, [])


def without_change(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Sets one factor of each pair to 0, as PEFT begins; returns them as they were."""
    before = {}
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            before[name] = parameter.detach().clone()
            parameter.data.zero_()
    return before


merged = merged_weights._merged_weight
WRONG_MERGES: dict[str, Callable[..., torch.Tensor]] = {
    "left out": lambda weight, _: weight.detach().float(),
    "added twice": lambda weight, layer: 2 * merged(weight, layer) - weight.detach().float(),
    "a tenth too small": lambda weight, layer: torch.lerp(
        weight.detach().float(), merged(weight, layer), 0.9
    ),
    "subtracted": lambda weight, layer: 2 * weight.detach().float() - merged(weight, layer),
    "one row lost": lambda weight, layer: torch.cat(
        [weight.detach().float()[:1], merged(weight, layer)[1:]]
    ),
    "not a number": lambda weight, layer: merged(weight, layer) * float("nan"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [["k_proj", "down_proj"], ["embed_tokens"]])
@pytest.mark.parametrize("wrong", WRONG_MERGES)
def test_a_wrong_merge_ends_the_run_at_the_first_sync_that_it_changes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    targets: list[str],
    dtype: torch.dtype,
) -> None:
    model = adapted(policy(tmp_path, dtype, tied=False), targets)
    before = without_change(model)
    engine = receiving(model)
    engine.sync_weights()
    for name, factor in before.items():
        model.get_parameter(name).data.copy_(factor)
    monkeypatch.setattr(merged_weights, "_merged_weight", WRONG_MERGES[wrong])
    with pytest.raises(EngineWeightsDiffer, match=f"{targets[0]}.weight: the adapter changes it"):
        engine.sync_weights()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["embed_tokens", "k_proj"]])
def test_a_right_merge_is_compared_once_and_draws_no_random_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str], dtype: torch.dtype
) -> None:
    model = adapted(policy(tmp_path, dtype, tied=False), targets)
    engine = receiving(model)
    compared: list[str] = []

    def compare(name: str, *more: Any) -> None:
        compared.append(name)
        require_pefts_merge(name, *more)

    monkeypatch.setattr(generation_base, "require_pefts_merge", compare)
    state = torch.random.get_rng_state()
    for _ in range(2):
        engine.sync_weights()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(compared) == 1
    assert engine.names == list(weight_shapes(model))


def in_tf32(values: torch.Tensor) -> torch.Tensor:
    """As a tensor core reads float32: with 10 bits of mantissa."""
    bits = values.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def test_a_merge_whose_products_are_of_tf32_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU computes them with training.overrides.tf32."""

    def merge(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        change: torch.Tensor = layer.scaling["default"] * (in_tf32(up) @ in_tf32(down))
        return weight + change

    model = adapted(policy(tmp_path, torch.float32, tied=False), ["k_proj"])
    monkeypatch.setattr(merged_weights, "_merged_weight", merge)
    engine = receiving(model)
    engine.sync_weights()
    assert engine.proven_version
