"""Public kinds of TRL GRPO scripts: what `grpo init --from-trl` makes of each trains as the script
does under TRL alone, in every digit of ten steps."""

import inspect
import json
import runpy
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.rewards
from peft import LoraConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from trl import DatasetMixtureConfig, GRPOTrainer, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from grpo_acceptance.tiny_model import CHAT_TEMPLATE, save_tiny, tiny_config, tiny_tokenizer
from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.trl_places import MODEL_PLACES, SCRIPT_PLACES
from grpo_api.text.contract import DATA_MOUNT_ENV
from grpo_api.text.units import GIB
from grpo_cli.__main__ import main
from grpo_cli.from_trl.cli_config import BUILT_IN, LORA_DEFAULTS, OVERLONG
from grpo_cli.from_trl.job_spec import PEFT_DEFAULTS, PEFT_MODULES
from grpo_cli.from_trl.reward_reader import MADE_BY_TRL
from grpo_cli.from_trl.script_reader import read_script
from grpo_cli.from_trl.trl_run import LORA_POSITIONS, POSITIONS
from grpo_cli.show.kubectl_yaml import load_documents
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt, training_plan
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job
from grpo_trainer.rewards.reward_set import build_rewards
from grpo_trainer.training import build_run
from grpo_trainer.training.trl_config import config_arguments
from tests.support.facts.resume_cases import log_of_plan, logged
from tests.support.ranks import demo_model, runs
from tests.trainer.engine_runs import engine_run

pytestmark = pytest.mark.realtime

SCRIPTS = Path(__file__).parent / "data" / "trl"
STEPS = 10
THINKING_TEMPLATE = CHAT_TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}"
)
SIZE = "84K"
IN_GATE = ("lora", "several_rewards", "thinking")
EQUAL = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in IN_GATE else pytest.mark.slow)
    for path in sorted(SCRIPTS.glob("*.py"))
    if path.stem != "vllm"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the scripts find in their folder: models and rows."""
    folder = tmp_path_factory.mktemp("from-trl")
    demo_model.save_policy(folder / "model")
    demo_model.save_policy(folder / "thinking-model")
    tiny_tokenizer(THINKING_TEMPLATE).save_pretrained(folder / "thinking-model")
    demo_model.save_reward_model(folder / "reward-model")
    with (folder / "chats.jsonl").open("w") as chats, (folder / "texts.jsonl").open("w") as texts:
        for number in range(24):
            question, answer = f"say {number}", f"{number} it is"
            message = {"role": "user", "content": question}
            chats.write(json.dumps({"prompt": [message], "answer": answer}) + "\n")
            texts.write(json.dumps({"question": question, "answer": answer}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_MOUNT_ENV, str(folder))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


def log_of_script(script: Path) -> dict[int, dict[str, Any]]:
    """What TRL alone logs, by step."""
    runs.reset()
    return logged(runpy.run_path(str(script), run_name="__main__")["trainer"])


def written_job(script: Path, folder: Path) -> GRPOJobSpec:
    """The job that the command writes, with the folder in the place of its volumes."""
    output = folder / f"{script.stem}.yaml"
    output.unlink(missing_ok=True)
    arguments = ["--parameters", SIZE, "--processes", "1", "-o", str(output)]
    assert main(["init", "--from-trl", str(script), *arguments]) == 0
    *others, job = load_documents(output.read_text())
    spec = job["spec"]
    spec["model"]["name"] = str(folder / Path(spec["model"]["name"]).name)
    for position, reward in enumerate(spec["rewards"]):
        if model := reward.get("model"):
            model |= {"name": str(folder / Path(model["name"]).name), "parameters": SIZE}
            del model["volume"]
        (folder / "rewards" / str(position)).mkdir(parents=True, exist_ok=True)
        for config_map in others:
            for name, text in config_map["data"].items():
                (folder / "rewards" / str(position) / name).write_text(text)
    del spec["checkpoint"]
    spec["export"] = {"to": "None"}
    return parse_spec(spec, creating=True)


def plan_of(spec: GRPOJobSpec) -> TrainingPlan:
    """What the trainer is given on one CPU node."""
    node = Node(host_memory_free=16 * GIB, host_memory_total=16 * GIB, cpu_free=4.0, cpu_total=4.0)
    result = plan_job(spec, Inventory((node,)))
    assert result.chosen is not None, result.message
    attempt = Attempt(
        key=ObjectKey("default", "job"), uid="0", spec=spec, plan=result.chosen, number=1
    )
    return training_plan(attempt)


def log_of_job(plan: TrainingPlan) -> dict[int, dict[str, Any]]:
    """What our trainer logs, by step."""
    runs.reset()
    return log_of_plan(plan)


@pytest.mark.parametrize("script", EQUAL)
def test_the_job_of_a_script_trains_as_the_script_in_every_digit(
    script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    root = folder / "rewards"
    monkeypatch.setattr(build_run, "build_rewards", partial(build_rewards, root=root))
    theirs = log_of_script(script)
    ours = log_of_job(plan_of(written_job(script, folder)))
    assert len(theirs) == STEPS
    for step, values in theirs.items():
        assert {key: ours[step].get(key) for key in values} == values, step


@pytest.mark.slow
def test_the_job_of_a_script_with_vllm_trains_as_the_script_in_every_digit(
    folder: Path, vllm_cpu: dict[str, str]
) -> None:
    """Given a job's seeds and type, which TRL's engine does not have: see vllm_script.py."""
    # vLLM's attention for CPUs takes no smaller heads than 32
    save_tiny(folder / "model", tiny_config(hidden=128))
    plan = folder / "plan.json"
    plan.write_text(
        plan_of(written_job(SCRIPTS / "vllm.py", folder)).model_dump_json(by_alias=True)
    )
    own = {DATA_MOUNT_ENV: str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    theirs, ours = (
        engine_run("vllm_script", folder, vllm_cpu | own, str(source))
        for source in (SCRIPTS / "vllm.py", plan)
    )
    assert len(theirs) == STEPS
    assert any(values["grad_norm"] for values in theirs.values())
    for step, values in theirs.items():
        assert {key: ours[step].get(key) for key in values} == values, step


def test_the_settings_of_a_script_with_vllm_are_the_job_s(folder: Path) -> None:
    script = SCRIPTS / "vllm.py"
    plan = plan_of(written_job(script, folder))
    assert plan.execution.engine is not None
    assert plan.execution.engine.kind == "Colocated"
    theirs = read_script(script.read_text(), script.name, lambda _: None).config
    arguments = config_arguments(plan)
    taken = {name for name in theirs if name in arguments}
    assert taken >= {"use_vllm", "vllm_mode", "vllm_importance_sampling_mode", "learning_rate"}
    own = {"output_dir", "save_strategy"}
    assert {name: arguments[name] for name in taken - own} == {
        name: theirs[name].value for name in taken - own
    }


def names(config: Any) -> list[str]:
    return [field.name for field in fields(config)]


def test_what_the_command_knows_of_trl_and_peft_is_what_they_have() -> None:
    signature = [*inspect.signature(GRPOTrainer.__init__).parameters][1:]
    assert list(POSITIONS) == signature
    assert list(MODEL_PLACES) == names(ModelConfig)
    others = names(GRPOScriptArguments) + names(DatasetMixtureConfig)
    assert sorted(SCRIPT_PLACES) == sorted(others)
    lora, model = LoraConfig(), ModelConfig()
    assert {name: getattr(lora, name) for name in PEFT_DEFAULTS} == PEFT_DEFAULTS
    assert {name: getattr(model, name) for name in LORA_DEFAULTS} == LORA_DEFAULTS
    assert names(LoraConfig)[: len(LORA_POSITIONS)] == list(LORA_POSITIONS)
    for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"):
        assert TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[kind] == PEFT_MODULES
    for maker, name in MADE_BY_TRL.items():
        made = getattr(trl.rewards, maker)
        number = len(inspect.signature(made).parameters)
        assert made(*[1, 0, 0, 0, 0][: min(number, 2)]).__name__ == name
    assert all(callable(getattr(trl.rewards, name)) for name in (*BUILT_IN, OVERLONG))
