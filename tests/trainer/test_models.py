"""Models and adapters that can't be used as declared: a damaged tokenizer, an unknown kind, modules
not there."""

import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, dynamic_module_utils

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.checkpoint import ExportSpec
from grpo_trainer.preflight.model_checks import _load_config
from grpo_trainer.runtime.errors import BadInput, DiskFailed
from grpo_trainer.weights import checkpoint_files
from grpo_trainer.weights.checkpoint_files import open_weights
from grpo_trainer.weights.model_files import Source, load_tokenizer
from grpo_trainer.weights.models import LoadedModel, load_causal, load_policy, lora_config
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder, export_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return demo_model.save_policy(tmp_path / "model")


@pytest.mark.parametrize("content", ["{}", "[]", '{"version": "1.0"'])
def test_a_damaged_tokenizer_is_rejected(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(BadInput, match=r"model .*/model has no usable tokenizer: .*save it again"):
        load_model(runs.plan(model))


def test_a_model_without_a_tokenizer_is_rejected(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"has no tokenizer, none of .*tokenizer\.json.*; save it"):
        load_model(runs.plan(model))


def test_a_model_of_an_unknown_kind_is_rejected(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mystery"}))
    with pytest.raises(BadInput, match=r"can't be loaded by AutoModelForCausalLM: .*mystery"):
        load_model(runs.plan(model))


SEES_IMAGES = Gemma3Config(
    text_config={
        "vocab_size": 120, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    },
    vision_config={
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
    mm_tokens_per_image=4,
)  # fmt: skip


@pytest.mark.parametrize("targets", [None, ["all-linear"], ["q_proj", "self_attn.v_proj"]])
def test_of_a_model_that_sees_images_only_what_reads_text_is_trained(
    model: Path, targets: list[str] | None
) -> None:
    """DDP waits for the gradient of every parameter that has one."""
    plan = runs.plan(model)
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    AutoModelForCausalLM.from_config(SEES_IMAGES).save_pretrained(model)
    method = "LoRA" if targets else "Full"
    execution = plan.execution.model_copy(update={"method": method})
    adapter = plan.adapter.model_copy(update={"target_modules": targets})
    loaded = load_policy(plan.model, execution, adapter)
    policy: nn.Module = loaded.model
    if loaded.peft_config:
        policy = get_peft_model(loaded.model, loaded.peft_config)
    scores = policy.train()(input_ids=torch.arange(3, 9)[None]).logits
    scores.float().logsumexp(-1).sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, each in policy.named_parameters() if each.grad is not None}
    assert any("language_model.layers.1" in name for name in trained)


def test_an_adapter_where_no_text_comes_is_rejected(model: Path) -> None:
    policy = AutoModelForCausalLM.from_config(SEES_IMAGES)
    adapter = runs.plan(model).adapter.model_copy(update={"target_modules": ["fc1"]})
    with pytest.raises(BadInput, match="no module is called 'fc1'") as refusal:
        lora_config(adapter, policy)
    assert "fc1," not in str(refusal.value)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_of_other_layers_than_its_weights_is_rejected(model: Path, layers: int) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": layers}))
    with pytest.raises(
        BadInput, match=rf"num_hidden_layers {layers}, and its weights have 2 layers"
    ):
        load_model(runs.plan(model))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_attention_heads": "two"}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 7}, r"weights of other shapes .*, the first is .*, not \(7, "),
        ({"vocab_size": -1}, r"can't be made by .*negative dimension -1"),
        ({"num_key_value_heads": 0}, r"can't be made by .*ZeroDivisionError: .*config\.json"),
    ],
)
def test_a_configuration_that_does_not_fit_is_rejected(
    model: Path, change: dict[str, object], problem: str
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    source = Source("own", model, "", "float32")
    with pytest.raises(BadInput, match=problem):
        load_causal(source, remote_code=False)
    if not change.keys() & {"vocab_size", "num_key_value_heads"}:
        with pytest.raises(BadInput, match=rf"config\.json .* can't be used: .*{problem}"):
            _load_config(source, remote_code=False)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        OSError(f"{os.strerror(errno.EIO)} (os error 5)"),  # as safetensors says it
    ],
)
def test_a_model_on_a_volume_that_does_not_answer_may_be_good(
    model: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> NoReturn:
        raise error

    source = Source("own", model, "", "float32")
    monkeypatch.setattr(checkpoint_files, "safe_open", away)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", away)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", away)
    for read in (
        lambda: open_weights(model),
        lambda: load_causal(source, remote_code=False),
        lambda: load_tokenizer(source, remote_code=False),
    ):
        with pytest.raises(DiskFailed, match=os.strerror(error.errno or errno.EIO)):
            read()


def test_shapes_that_do_not_fit_under_zero_3_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers hands on there what torch says of a module, on rank 0."""

    def loaded(*_: object, **__: object) -> None:
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 2).state_dict())

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    with pytest.raises(BadInput, match=r"2 weights of other shapes .*: size mismatch for weight"):
        load_causal(Source("own", Path("/models/own"), "", "float32"), remote_code=False)


def test_a_model_whose_code_needs_a_package_that_is_not_there_is_rejected(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(model.parent / "modules"))
    (model / "own.py").write_text(f"import nowhere_to_be_found\n{REMOTE_CODE}")
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "own_qwen", "auto_map": own})
    )
    source = Source("own", model, "", "float32")
    with pytest.raises(BadInput, match=r"can't be loaded by .*: nowhere_to_be_found"):
        load_causal(source, remote_code=True)
    with pytest.raises(BadInput, match=r"can't be used: .*: nowhere_to_be_found"):
        _load_config(source, remote_code=True)


def load_model(plan: TrainingPlan) -> LoadedModel:
    return load_policy(plan.model, plan.execution, plan.adapter)


def adapter_plan(model: Path, *names: str) -> TrainingPlan:
    return runs.plan(model, "Adapter", adapter={"targetModules": list(names)})


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["q_prj"], r"\[0\]: no module is called 'q_prj'"),
        (
            ["q_proj", "k_prj", "x"],
            r"\[1\]: no module is called 'k_prj'; \[2\]: no module is called 'x'",
        ),
        (
            ["q_proj", "mlp"],
            r"\[1\]: 'mlp' is a Qwen2MLP, which has parts but no weights of its own",
        ),
        (["lm_head"], r"\[0\]: 'lm_head' is the head"),
        (["*"], r"\[0\]: no module is called '\*'"),
    ],
)
def test_modules_that_can_t_be_adapted_are_rejected(
    model: Path, names: list[str], problem: str
) -> None:
    there = (
        "The model has embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
        "down_proj; all-linear"
    )
    with pytest.raises(BadInput, match=rf"spec\.adapter\.targetModules{problem}.*\. {there}"):
        load_model(adapter_plan(model, *names))


@pytest.mark.parametrize(
    "names", [["all-linear"], ["q_proj", "layers.1.mlp.up_proj"], ["model.layers.0.mlp.up_proj"]]
)
def test_modules_are_found_as_peft_finds_them(model: Path, names: list[str]) -> None:
    loaded = load_model(adapter_plan(model, *names))
    assert loaded.peft_config is not None
    adapted = get_peft_model(loaded.model, loaded.peft_config)
    assert any("lora_A" in name for name, _ in adapted.named_parameters())


REMOTE_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own_qwen"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_merged_on_export(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last act of a run, after all its steps."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(model.parent / "modules"))
    (model / "own.py").write_text(REMOTE_CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "own_qwen", "auto_map": own})
    )
    plan = runs.plan(model, "Adapter", folder=model.parent / "run", adapter={"mergeOnExport": True})
    plan = plan.model_copy(
        update={"model": plan.model.model_copy(update={"trust_remote_code": True})}
    )
    claim_folder(plan)
    loaded = load_model(plan)
    assert loaded.peft_config is not None
    adapted = get_peft_model(loaded.model, loaded.peft_config)
    folder = export_model(plan, loaded.source, adapted.save_pretrained)
    assert folder is not None
    merged = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(merged).__name__ == "OwnModel"
    assert not (folder / "adapter_model.safetensors").exists()


def test_a_model_that_is_not_wanted_is_not_written(model: Path, tmp_path: Path) -> None:
    plan = runs.plan(model, "Clone", folder=tmp_path / "run").model_copy(
        update={"export": ExportSpec(to="None")}
    )
    claim_folder(plan)
    source = Source("demo", model, "", "float32")
    assert export_model(plan, source, lambda _: pytest.fail("it was written")) is None
    assert not (tmp_path / "run" / "export").exists()
