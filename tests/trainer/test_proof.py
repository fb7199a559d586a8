"""The proof of weights in one process: what it accepts, and every way in which a model can differ
from its files.

test_reference_gang.py injects the same kinds of fault into several ranks.
"""

import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    set_seed,
)

from grpo_api.spec.rewards import ModelReward
from grpo_trainer.gang import ranks
from grpo_trainer.hub.repositories import Hub, Repository
from grpo_trainer.runtime.errors import BadInput, DiskFailed, WeightsDiffer
from grpo_trainer.weights import model_files, models
from grpo_trainer.weights.checkpoint_files import WeightFiles, open_weights
from grpo_trainer.weights.parameters import fingerprint, is_bitwise_equal
from grpo_trainer.weights.proof import Proof, prove_equal, prove_weights
from tests.support.ranks import demo_model

PARAMETER = "model.layers.1.mlp.down_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def proof(model: torch.nn.Module, folder: Path) -> Proof:
    with open_weights(folder) as files:
        return prove_weights(model, files, "policy")


def located(folder: Path) -> model_files.Source:
    return model_files.locate_model(
        Repository("model", str(folder), None, "model"), "float32", Hub()
    )


def flip_last_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return demo_model.save_policy(tmp_path / "model", shard="100KB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (1, 64), (0, 63), (3, 4)])
def test_bits_are_compared_in_every_layout(dtype: torch.dtype, start: int, stop: int) -> None:
    values = torch.arange(64).to(dtype)
    part, copy = values[start:stop], values[start:stop].clone()
    assert is_bitwise_equal(part, copy)
    copy.view(torch.uint8)[-1] ^= 1
    assert not is_bitwise_equal(part, copy)


def test_equal_numbers_are_not_equal_bits() -> None:
    assert not is_bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert is_bitwise_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_proven_in_its_dtype(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    folder = demo_model.save_policy(tmp_path, tied=tied)
    model = load(folder, dtype)
    found = proof(model, folder)
    assert found.parameters == len(list(model.named_parameters()))
    assert found.across_ranks == found.converted == 0
    assert found.bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_the_fingerprint_is_the_weights_alone(tmp_path: Path) -> None:
    same = [
        demo_model.save_policy(tmp_path / name, shard=size)
        for name, size in (("a", "100KB"), ("b", "1GB"))
    ]
    other = demo_model.save_policy(tmp_path / "c", seed=1)
    first, second = (proof(load(folder), folder).fingerprint for folder in same)
    assert first == second != proof(load(other), other).fingerprint


def test_ranks_that_compute_otherwise_with_the_same_weights_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has another config.json, so that its rank and its engine agree with each other."""
    model, other = load(folder), load(folder)
    other.config.rms_norm_eps = 0.5

    def gather(mine: object) -> list[object]:
        others = other.config.to_dict() | {"_name_or_path": ""}
        return [mine, others if isinstance(mine, dict) else mine]

    monkeypatch.setattr(ranks, "gather", gather)
    with pytest.raises(WeightsDiffer, match=r"rms_norm_eps in config\.json is 0\.5 on rank 1"):
        proof(model, folder)
    other.config.rms_norm_eps = model.config.rms_norm_eps
    proof(model, folder)


def test_one_bit_in_memory_is_named_with_both_fingerprints(folder: Path) -> None:
    model = load(folder)
    right = fingerprint(model.get_parameter(PARAMETER))
    flip_last_bit(model.get_parameter(PARAMETER))
    wrong = fingerprint(model.get_parameter(PARAMETER))
    with pytest.raises(WeightsDiffer) as caught:
        proof(model, folder)
    for part in (PARAMETER, "rank 0", right, wrong):
        assert part in str(caught.value)


def test_one_bit_in_the_file_is_found(folder: Path) -> None:
    model = load(folder)
    path = next(path for path in folder.glob("*.safetensors") if PARAMETER in load_file(path))
    tensors = load_file(path)
    flip_last_bit(tensors[PARAMETER])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsDiffer, match=PARAMETER):
        proof(model, folder)


def test_equal_values_with_other_bits_differ(folder: Path) -> None:
    model = load(folder)
    bias = model.get_parameter("model.layers.0.self_attn.q_proj.bias")
    assert bias[0] == 0.0
    with torch.no_grad():
        bias[0] = -0.0
    with pytest.raises(WeightsDiffer, match=r"q_proj\.bias"):
        proof(model, folder)


def test_random_weights_differ(folder: Path) -> None:
    set_seed(5)
    with pytest.raises(WeightsDiffer, match="embed_tokens"):
        proof(type(load(folder))(demo_model.config()), folder)


def test_a_tied_weight_is_found_under_its_other_name(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    tensors = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if "embed_tokens" not in name
    }
    tensors.setdefault(
        "lm_head.weight", model.get_parameter("model.embed_tokens.weight").detach().clone()
    )
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert proof(model, other).converted == 0


def test_merged_experts_are_proven_in_the_files_form(tmp_path: Path) -> None:
    set_seed(0)
    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=32,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    found = proof(model, tmp_path)
    assert found.converted > 0
    assert found.parameters == len(list(model.named_parameters()))
    name = next(name for name, _ in model.named_parameters() if "experts" in name)
    flip_last_bit(model.get_parameter(name))
    with pytest.raises(WeightsDiffer, match=name.replace(".", r"\.")):
        proof(model, tmp_path)


def test_a_fresh_adapter_is_proven_between_ranks_and_its_base_by_the_file(folder: Path) -> None:
    base = load(folder)
    wrapped = get_peft_model(
        base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    found = proof(wrapped, folder)
    adapters = [name for name, _ in wrapped.named_parameters() if "lora_" in name]
    assert found.across_ranks == len(adapters) > 0
    assert found.parameters == len(list(wrapped.named_parameters())) - len(adapters)
    flip_last_bit(
        wrapped.get_parameter(
            f"base_model.model.{PARAMETER.replace('.weight', '.base_layer.weight')}"
        )
    )
    with pytest.raises(WeightsDiffer, match=r"down_proj\.base_layer"):
        proof(wrapped, folder)


def test_a_saved_adapter_is_proven_by_its_file(folder: Path, tmp_path: Path) -> None:
    set_seed(0)
    wrapped = get_peft_model(
        load(folder), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    wrapped.save_pretrained(tmp_path / "adapter")
    files = open_weights(tmp_path / "adapter")
    files.paths.update(open_weights(folder).paths)
    with files:
        assert prove_weights(wrapped, files, "policy").across_ranks == 0
    adapter = open_weights(tmp_path / "adapter")
    with adapter:
        assert prove_weights(wrapped, adapter, "adapter", adapter_only=True).parameters == len(
            adapter.paths
        )
    with files, adapter:
        flip_last_bit(next(p for name, p in wrapped.named_parameters() if "lora_A" in name))
        with pytest.raises(WeightsDiffer, match="lora_A"):
            prove_weights(wrapped, files, "policy")
        with pytest.raises(WeightsDiffer, match=r"adapter: parameter .*lora_A"):
            prove_weights(wrapped, adapter, "adapter", adapter_only=True)


def test_a_file_that_its_volume_does_not_give_says_nothing_of_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)

    def away(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(WeightFiles, "read", away)
    with pytest.raises(DiskFailed, match=r"policy: parameter .*: the file can't be read .*Stale"):
        proof(model, folder)


def test_ranks_are_compared_without_a_file(folder: Path) -> None:
    prove_equal(load(folder), "policy")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated"),
        (lambda path: path.write_bytes(b"\xff" * 64), "truncated or damaged"),
    ],
)
def test_damaged_files_are_rejected_before_loading(
    folder: Path, damage: object, message: str
) -> None:
    damage(sorted(folder.glob("*.safetensors"))[-1])  # type: ignore[operator]
    with pytest.raises(BadInput, match=message):
        located(folder)


def test_a_folder_without_safetensors_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        located(tmp_path)
    with pytest.raises(BadInput, match="does not exist"):
        located(tmp_path / "absent")


def test_a_hub_model_that_cannot_be_fetched_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    absent = Repository("model", "demo/absent", "v1", "rewards[1].model")
    with pytest.raises(
        BadInput,
        match=r"spec\.rewards\[1\]\.model\.name: demo/absent \(revision v1\) can't be fetched",
    ):
        model_files.locate_model(absent, "float32", Hub())


def test_missing_weights_are_rejected_not_random(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"].pop(PARAMETER)
    tensors = load_file(path)
    del tensors[PARAMETER]
    save_file(tensors, path, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match=PARAMETER):
        models.load_causal(located(folder), remote_code=False)


def test_a_reward_model_is_frozen_proven_and_has_one_label(tmp_path: Path) -> None:
    one = demo_model.save_reward_model(tmp_path / "one")
    loaded = models.load_reward_model(ModelReward(name=str(one), dtype="bfloat16"))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config.pad_token_id == loaded.tokenizer.pad_token_id
    two = demo_model.save_reward_model(tmp_path / "two", labels=2)
    with pytest.raises(BadInput, match="2 labels"):
        models.load_reward_model(ModelReward(name=str(two)))
    policy = demo_model.save_policy(tmp_path / "policy")
    with pytest.raises(BadInput, match="score"):
        models.load_reward_model(ModelReward(name=str(policy)))


def test_a_reward_model_that_differs_from_its_file_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model.save_reward_model(tmp_path)
    real = models.freeze

    def flipping(model: PreTrainedModel) -> PreTrainedModel:
        flip_last_bit(model.get_parameter("score.weight"))
        return real(model)

    monkeypatch.setattr(models, "freeze", flipping)
    with pytest.raises(WeightsDiffer, match=r"score\.weight"):
        models.load_reward_model(ModelReward(name=str(folder), dtype="float32"))
