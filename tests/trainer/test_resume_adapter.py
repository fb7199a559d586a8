"""A run that begins with another's exported adapter: its weights at step 0 to the bit, the bare
base as its reference, and what doesn't fit is named. Two ranks under DDP, ZeRO-2 and ZeRO-3, and
once through the real entry point.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.weights.exported_adapter import load_adapter
from grpo_trainer.weights.model_files import Source
from harness.controlplane import free_port
from tests.generated import gated
from tests.support.facts import adapter_facts
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import begin, claim, export_model
from tests.support.ranks.gang import run_gang
from tests.support.ranks.pods import Gang

pytestmark = pytest.mark.realtime

COMMIT, OTHER = "a" * 40, "b" * 40
Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


@pytest.fixture(scope="module")
def gang(folder: Path) -> Facts:
    return begin_jobs(folder, cells=["DDP", "ZeRO-3"], faults=list(adapter_facts.FAULTS))


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What `make test-all` has besides."""
    cells = ["ZeRO-2", "ZeRO-3 in bfloat16"]
    return begin_jobs(tmp_path_factory.mktemp("more"), cells=cells, faults=[])


def begin_jobs(folder: Path, cells: list[str], faults: list[str]) -> Facts:
    scenario = "tests.support.facts.adapter_facts:everything"
    return run_gang(scenario, folder, cells=cells, faults=faults)


of_either = pytest.mark.parametrize("launch", gated(["gang", "more"]))
"""Parametrizes `launch` by both fixtures."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.save_policy(tmp_path_factory.mktemp("model"))


def cells(gang: Facts) -> Iterator[tuple[str, dict[str, Any]]]:
    for facts in gang:
        yield from facts["cells"].items()


@of_either
def test_the_policy_begins_with_the_exported_weights_to_the_bit(
    request: pytest.FixtureRequest, launch: str
) -> None:
    for name, facts in cells(request.getfixturevalue(launch)):
        assert facts["equal"], name
        assert facts["wrapped"], name
        assert facts["dtypes"] == ["torch.bfloat16" if "bfloat16" in name else "torch.float32"]


@of_either
def test_the_loaded_adapter_is_proven_on_every_rank(
    request: pytest.FixtureRequest, launch: str
) -> None:
    for _, facts in cells(request.getfixturevalue(launch)):
        assert [what for what, *_ in facts["proofs"]] == ["policy", "adapter"]
        (_, base, fresh), (_, loaded, across) = facts["proofs"]
        assert (base, loaded, across) == (26, fresh, 0)


@of_either
def test_the_reference_is_the_base_without_the_adapter(
    request: pytest.FixtureRequest, launch: str
) -> None:
    gang: Facts = request.getfixturevalue(launch)
    for name, facts in cells(gang):
        assert facts["reference"] == gang[0]["cells"][name]["reference"]
        assert facts["policy"] != facts["reference"]
        assert facts["first"]["kl"] > 0


@of_either
def test_its_own_checkpoint_continues_without_the_export(
    request: pytest.FixtureRequest, launch: str
) -> None:
    for name, facts in cells(request.getfixturevalue(launch)):
        assert facts["resumed"] == facts["uninterrupted"], name


def test_the_export_names_its_base_as_the_plan_does(gang: Facts, folder: Path) -> None:
    assert gang
    config = json.loads((folder / "first" / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model")
    assert config["revision"] is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("rank", "adapter.rank: adapter 4, now 8"),
        ("alpha", "adapter.alpha: adapter 8.0, now 16.0"),
        ("modules", "adapter.targetModules: adapter ['down_proj', 'gate_proj', 'k_proj'"),
        ("base", "model.name: adapter "),
    ],
)
def test_another_adapter_is_bad_input_on_all_ranks(gang: Facts, fault: str, message: str) -> None:
    for facts in gang:
        assert facts["ends"][fault].startswith(
            "BadInput: ranks 0, 1: spec.resumeFrom: the adapter in "
        )
        assert message in facts["ends"][fault]


def test_a_job_begins_with_an_export_through_the_real_entry_point(
    gang: Facts, folder: Path
) -> None:
    assert gang
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.PROMPTS))
    plan = adapter_facts.job(folder / "model", folder / "next", folder / "first").model_dump(
        by_alias=True
    )
    plan["rendezvous"]["port"] = free_port()
    plan["resumeFrom"] = str(folder / "first")
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [{"format": {"pattern": "[^0-9]*[0-9].*"}}]
    plan["execution"] |= {"nodes": 1, "processesPerNode": 1, "microBatch": 8}
    with Gang(TrainingPlan.model_validate(plan), folder, folder / "pods", traced=True) as pods:
        pods.wait()
        assert pods.outcome().result is Result.SUCCEEDED
        assert pods.steps()[1]["kl"] > 0
    log = (folder / "pods" / "pod-0.log").read_text()
    start = next(json.loads(line) for line in log.splitlines() if '"resumedFromStep"' in line)
    assert (start["resumedFromStep"], start["adapter"]) == (0, str(folder / "first" / "export"))
    assert "checkpoint" not in start


def fresh(model: Path, **settings: Any) -> PeftModel:
    """A demo model with an adapter that is not zero."""
    torch.manual_seed(3)
    arguments = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings
    arguments |= {"task_type": "CAUSAL_LM", "init_lora_weights": False}
    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), LoraConfig(**arguments)
    )


def source(model: Path, revision: str = "") -> Source:
    return Source(str(model), model, revision, "float32")


def edit(folder: Path, **values: Any) -> None:
    """Changes an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_names_that_lead_to_the_same_modules_are_the_same_target(
    model: Path, tmp_path: Path
) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    fresh(model, target_modules=names).save_pretrained(tmp_path)
    begun = fresh(model, lora_dropout=0.1)
    with torch.no_grad():
        for name, parameter in begun.named_parameters():
            parameter.mul_(1 + ("lora_" in name))
    load_adapter(begun, tmp_path, source(model))
    held, saved = (
        get_peft_model_state_dict(begun),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    assert held.keys() == saved.keys()
    assert all(torch.equal(held[key], saved[key]) for key in saved)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_rslora": True}, "use_rslora: adapter True, now False"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern: adapter {'q_proj': 2}, now {}"),
        ({"peft_type": "IA3"}, "peft_type: adapter IA3, now LORA"),
        ({"peft_type": "NONE"}, "is no configuration of an adapter"),
        ({"revision": OTHER}, f"model.revision: adapter {OTHER}, now {COMMIT}"),
        ({"base_model_name_or_path": "demo/other"}, "model.name: adapter demo/other, now "),
    ],
)
def test_what_changes_the_meaning_of_the_weights_is_named(
    model: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    fresh(model).save_pretrained(tmp_path)
    edit(tmp_path, **values)
    with pytest.raises(BadInput) as caught:
        load_adapter(fresh(model), tmp_path, source(model, COMMIT))
    assert message in str(caught.value)


def test_a_configuration_of_no_kind_of_adapter_is_rejected(model: Path, tmp_path: Path) -> None:
    fresh(model).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="peft_type: adapter None, now LORA"):
        load_adapter(fresh(model), tmp_path, source(model))


def test_a_base_that_is_not_said_and_a_branch_can_not_differ(model: Path, tmp_path: Path) -> None:
    fresh(model).save_pretrained(tmp_path)
    edit(tmp_path, base_model_name_or_path=None, revision="main")
    load_adapter(fresh(model), tmp_path, source(model, COMMIT))


def test_the_export_of_a_model_from_the_hub_names_its_commit(model: Path, tmp_path: Path) -> None:
    plan = runs.plan(model, "Adapter", folder=tmp_path)
    claim(plan)
    hub = Source("demo/policy", model, COMMIT, "float32")
    export = export_model(plan, hub, fresh(model).save_pretrained)
    assert export == tmp_path / "export"
    load_adapter(fresh(model), export, hub)
    with pytest.raises(BadInput, match=f"model.revision: adapter {COMMIT}, now {OTHER}"):
        load_adapter(fresh(model), export, replace(hub, revision=OTHER))


@pytest.mark.parametrize("change", ["lacking", "additional", "shape"])
def test_a_tensor_that_does_not_fit_is_named(model: Path, tmp_path: Path, change: str) -> None:
    fresh(model).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[5]
    taken = tensors.pop(name)
    if change != "lacking":
        tensors[name if change == "shape" else f"{name}.more"] = torch.ones(3)
    if change == "additional":
        tensors[name] = taken
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(BadInput) as caught:
        load_adapter(fresh(model), tmp_path, source(model))
    expected = {
        "lacking": "absent, now (",
        "additional": "(3,), now absent",
        "shape": "(3,), now (",
    }
    assert f"the first is {name}" in str(caught.value)
    assert f": adapter {expected[change]}" in str(caught.value)


def test_a_truncated_adapter_is_bad_input(model: Path, tmp_path: Path) -> None:
    fresh(model).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match="truncated"):
        load_adapter(fresh(model), tmp_path, source(model))


def test_the_head_s_base_may_lie_beside_its_adapter_if_it_is_the_same(tmp_path: Path) -> None:
    untied = demo_model.save_policy(tmp_path / "model", tied=False)
    fresh(untied, target_modules=["q_proj", "lm_head"]).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in tensors
    load_adapter(
        fresh(untied, target_modules=["q_proj", "lm_head"]), tmp_path / "adapter", source(untied)
    )
    tensors[copy][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(BadInput, match=r"lm_head\.base_layer\.weight: adapter \(.*\), now absent"):
        load_adapter(
            fresh(untied, target_modules=["q_proj", "lm_head"]),
            tmp_path / "adapter",
            source(untied),
        )


def begun(model: Path, folder: Path, start: Path, strategy: str = "Adapter") -> Path | None:
    plan = runs.plan(model, strategy, folder=folder).model_copy(update={"resume_from": str(start)})
    claim(plan)
    return begin(plan, {}).adapter


def test_only_a_published_export_is_an_adapter_to_begin_with(model: Path, tmp_path: Path) -> None:
    export, torn = tmp_path / "old" / "export", tmp_path / "old" / "attempt-1" / "checkpoint-3"
    fresh(model).save_pretrained(export)
    shutil.copytree(export, torn)
    assert begun(model, tmp_path / "a", tmp_path / "old") == export
    assert begun(model, tmp_path / "b", export) == export
    with pytest.raises(BadInput, match="no complete checkpoint and no exported adapter"):
        begun(model, tmp_path / "c", torn)
    with pytest.raises(
        BadInput,
        match=r"an exported adapter, but this run trains all parameters \(plan.method Full",
    ):
        begun(model, tmp_path / "d", export, "Clone")
