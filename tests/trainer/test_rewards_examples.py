"""The examples' data and rewards, run: the GSM8K job on rows in its format, and the code inside the
ConfigMaps.

An example is copied before it is understood.
"""

import asyncio
import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.job import GRPOJobSpec
from grpo_api.spec.dataset import DatasetFiles
from grpo_trainer.data.dataset import Prompts, load_prompts
from grpo_trainer.rewards.answers import expected_answer
from grpo_trainer.rewards.http_service import HTTPFunction
from grpo_trainer.rewards.reward_base import RewardCounters
from grpo_trainer.rewards.reward_set import build_rewards
from harness.controlplane import free_port
from harness.programs.processes import until
from tests.trainer.example_jobs import ROWS, example

pytestmark = pytest.mark.realtime


def prompts_of(spec: GRPOJobSpec, rows: Path) -> Prompts:
    """The job's prompts, with the hub replaced by a file; a character is a token here, so none is
    too long."""
    files = DatasetFiles.model_validate({"configMap": {"name": "rows"}, "paths": [rows.name]})
    dataset = spec.dataset.model_copy(update={"name": None, "config": None, "files": files})
    training = spec.training.model_copy(update={"max_prompt_length": 8192})
    return load_prompts(dataset, training, tiny_tokenizer(), root=rows.parent)


def reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("rows", ROWS, ids=lambda path: path.stem)
def test_the_gsm8k_job_rewards_right_answers_in_the_right_form(rows: Path) -> None:
    spec, _ = example("02-gsm8k-llama.yaml")
    prompts = prompts_of(spec, rows)
    assert len(prompts.rows) == len(rows.read_text().splitlines())
    assert prompts.num_dropped == 0
    assert prompts.rows[0]["prompt"] == [
        {"role": "system", "content": spec.dataset.system_prompt},
        {"role": "user", "content": json.loads(rows.read_text().splitlines()[0])["question"]},
    ]
    rewards = build_rewards(spec.rewards)
    rewards.check_dataset(prompts.rows)
    answers = prompts.rows["answer"][:]
    right = [expected_answer(answer) for answer in answers]
    for form, wrong, expected in (
        ("<reasoning>\nso\n</reasoning>\n<answer>\n{}\n</answer>\n", "", 0.5 + 2.0),
        ("<answer>{}</answer>", "", 0.0 + 2.0),
        ("<reasoning>so</reasoning><answer>{}</answer>", " or so", 0.5 + 0.0),
        ("#### {}", "", 0.0),
    ):
        completions = [reply(form.format(answer + wrong)) for answer in right]
        scores = [
            function(completions=completions, answer=answers) for function in rewards.functions
        ]
        assert {sum(of_one) for of_one in zip(*scores, strict=True)} == {expected}


def test_the_python_example_s_function_scores_brevity(tmp_path: Path) -> None:
    spec, documents = example("07-python-reward.yaml")
    (tmp_path / "0").mkdir()
    for name, text in next(
        item["data"] for item in documents if item["kind"] == "ConfigMap"
    ).items():
        (tmp_path / "0" / name).write_text(text)
    rewards = build_rewards(spec.rewards, root=tmp_path)
    logged: list[tuple[str, float]] = []
    try:
        scores = rewards.functions[0](
            prompts=["p"] * 2,
            completions=[reply("It is 22."), reply("I don't know.")],
            answer=["... #### 22"] * 2,
            log_metric=lambda name, value: logged.append((name, value)),
        )
    finally:
        rewards.close()
    assert rewards.names == ["brevity"]
    assert scores == [pytest.approx(1 / (1 + 3 / 50)), 0.0]
    assert logged == [("words", 3.0)]


def test_the_http_example_s_service_answers_the_reward(tmp_path: Path) -> None:
    spec, documents = example("05-http-reward.yaml")
    declared = spec.rewards[0].http
    assert declared is not None
    port = free_port()
    code = next(item["data"]["judge.py"] for item in documents if item["kind"] == "ConfigMap")
    (tmp_path / "judge.py").write_text(code.replace('("", 8000)', f'("127.0.0.1", {port})'))
    service = subprocess.Popen([sys.executable, str(tmp_path / "judge.py")])
    try:
        until("the example's service to listen", partial(listens, port))
        here = declared.model_copy(update={"url": f"http://127.0.0.1:{port}/score"})
        function = HTTPFunction("judge", here, RewardCounters(), None)
        completions = [reply("x" * 498 + "22"), reply("21")]
        scores = asyncio.run(
            function(prompts=["p"] * 2, completions=completions, answer=["#### 22"] * 2)
        )
    finally:
        service.kill()
        service.wait()
    assert scores == [1 / 1.5, 0.0]


def listens(port: int) -> bool:
    """Whether a local port takes connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_cpu_example_s_rows_load_and_score(tmp_path: Path) -> None:
    spec, documents = example("09-cpu.yaml")
    for name, text in next(
        item["data"] for item in documents if item["kind"] == "ConfigMap"
    ).items():
        (tmp_path / name).write_text(text)
    prompts = load_prompts(spec.dataset, spec.training, tiny_tokenizer(), root=tmp_path)
    rewards = build_rewards(spec.rewards)
    rewards.check_dataset(prompts.rows)
    assert prompts.num_dropped == 0
    answers = prompts.rows["answer"][:]
    assert (
        rewards.functions[0](completions=[reply(text) for text in answers], answer=answers)
        == [1.0] * 4
    )
