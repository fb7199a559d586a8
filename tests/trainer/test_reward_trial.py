"""`grpo reward test`: a file of completions is scored as in training, and what is wrong is a
sentence."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.spec.rewards import RewardSpec
from grpo_cli.__main__ import main
from grpo_cli.commands.runs import reward
from grpo_cli.inputs.manifest import load_specs
from grpo_trainer.rewards.reward_set import build_rewards
from tests.samples import changed, job

pytestmark = pytest.mark.realtime

FUNCTION = (
    "async def length(completions, **_):\n    return [float(len(one)) for one in completions]\n"
)
REWARDS: list[dict[str, Any]] = [
    {"format": {"pattern": "<answer>.*</answer>", "score": 0.5}},
    {"accuracy": {"answerColumn": "answer", "score": 2.0}},
    {"python": {"function": "mine:length", "configMap": {"name": "rewards"}}, "weight": 0.1},
]
ROWS = [
    {"completion": "<answer>4</answer>", "answer": "#### 4"},
    {"completion": "five", "answer": "#### 5"},
]


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """A job with a reward of each kind that needs no service, and its function beside it."""
    (tmp_path / "mine.py").write_text(FUNCTION)
    spec = changed({"rewards": REWARDS, "export": {"to": "None"}})
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job("tried", spec)))
    return str(path)


def rows_file(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows as JSON lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_completions_are_scored_by_every_reward(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["reward", "test", rows_file(tmp_path, ROWS), "-f", job_file]
    assert main([*command, "--files", str(tmp_path), "-o", "json"]) == 0
    rewards = json.loads(capsys.readouterr().out)["rewards"]
    assert {name: reward["scores"] for name, reward in rewards.items()} == {
        "format": [0.5, 0.0],
        "accuracy": [2.0, 0.0],
        "python": [18.0, 4.0],
    }


def test_a_reward_behind_a_model_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine.py").write_text(FUNCTION)
    model = RewardSpec.model_validate({"model": {"name": "an/rm", "parameters": "1M"}})
    built = build_rewards(
        [model, RewardSpec.model_validate(REWARDS[2])], root=tmp_path, without_models=True
    )
    assert built.names == ["python"]
    built.close()


def test_a_reward_reads_the_state_of_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def progress(completions, trainer_state, **_):\n"
        "    state = trainer_state\n"
        "    share = state.global_step / state.max_steps + state.epoch / state.num_train_epochs\n"
        "    return [share] * len(completions)\n"
    )
    function = {"python": {"function": "mine:progress", "configMap": {"name": "rewards"}}}
    spec = changed({"rewards": [function], "export": {"to": "None"}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("tried", spec)))
    command = ["reward", "test", rows_file(tmp_path, ROWS), "-f", str(tmp_path / "job.yaml")]
    assert main([*command, "--files", str(tmp_path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"]["python"]["scores"] == [0.0, 0.0]


def test_samples_of_a_run_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = changed({"rewards": REWARDS[:1], "export": {"to": "None"}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("tried", spec)))
    texts = ["<answer>4</answer>", "five"]
    group = {"prompt": "2+2", "completions": [{"completion": text, "tokens": 3} for text in texts]}
    samples = rows_file(tmp_path, [{"step": 1, "attempt": 1, "groups": [group, group]}])
    assert main(["reward", "test", samples, "-f", str(tmp_path / "job.yaml"), "-o", "json"]) == 0
    rewards = json.loads(capsys.readouterr().out)["rewards"]
    assert rewards["format"]["scores"] == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (ROWS, [], "2: spec.rewards[2].python.configMap is not read here"),
        (ROWS, ["--files", "nowhere"], "2: --files nowhere is no folder"),
        ([{"text": "a"}], ["--files", "."], "2: rows.jsonl: no row has `completion`"),
        ([{"completion": "a"}], ["--files", "."], "1: row 1 has no 'answer'"),
    ],
)
def test_what_keeps_rewards_from_being_tried_is_a_sentence(
    job_file: str, rows: list[dict[str, Any]], options: list[str], says: str
) -> None:
    folder = Path(job_file).parent
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.chdir(folder)
        rows_file(folder, rows)
        code = main(["reward", "test", "rows.jsonl", "-f", job_file, *options])
    assert f"{code}: {errors.getvalue().removeprefix('grpo: ')}".startswith(says)


def test_what_a_reward_waits_for_is_told_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = {"url": "http://judge.team-a.svc/score?key=hidden", "batchTimeoutSeconds": 100}
    spec = changed({"rewards": [{"http": service}]})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("tried", spec)))
    (tried,) = load_specs(str(tmp_path / "job.yaml"))
    monkeypatch.setattr(reward, "QUIET_SECONDS", 0.01)
    command = [sys.executable, "-c", "import time; time.sleep(0.5); print('scored')"]
    assert reward._run_trial(command, dict(os.environ), tried) == (0, b"scored\n")
    told = capsys.readouterr().err
    assert "spec.rewards[0].http for judge.team-a.svc, at most 100 s" in told
    assert "hidden" not in told
    monkeypatch.setattr(reward, "QUIET_SECONDS", 60.0)
    assert reward._run_trial([sys.executable, "-c", ""], dict(os.environ), tried) == (0, b"")
    assert capsys.readouterr().err == ""
