"""A preflight names no problem that training would not have, and each mistake once."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_api.report.preflight import PreflightReport
from grpo_api.text.contract import (
    DATA_MOUNT_ENV,
    PLAN_ENV,
    REWARD_MOUNT_ENV,
    TERMINATION_LOG_ENV,
)
from grpo_trainer.preflight.checks import run_checks
from grpo_trainer.preflight.findings import LAPTOP, POD, RANK_0, Scope
from grpo_trainer.preflight.reward_checks import NEEDS_MORE
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.weights.model_files import require_pad_token
from harness.programs.patience import run_to_end
from tests.support.ranks import demo_model
from tests.trainer.faulty_service import serving
from tests.trainer.hub import Files, files_of
from tests.trainer.preflight_job import ROWS, Job, only_problem, python

pytestmark = pytest.mark.realtime

ANSWERED = """
def adds(completions, answer, **_):
    return [float(each) for each in answer]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The policy."""
    return files_of(demo_model.save_policy(tmp_path_factory.mktemp("models") / "policy"))


@pytest.fixture
def job(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job, with its mounts in its folder."""
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path / "data"))
    monkeypatch.setenv(REWARD_MOUNT_ENV, str(tmp_path / "rewards"))
    return Job(tmp_path, files)


def dataset(job: Job, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """The section of a job with these rows."""
    lines = [json.dumps(row) for row in rows]
    (job.folder / "data" / "train.jsonl").write_text("\n".join(lines))
    return {"files": {"configMap": {"name": "rows"}, "paths": ["train.jsonl"]}, **settings}


@pytest.mark.parametrize("scope", [POD, RANK_0])
@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([{"prompt": "x" * 999, "answer": ""}, *ROWS], {}),
        ([*ROWS, {"prompt": "say 3", "answer": None}], {"onDuplicatePrompt": "Drop"}),
    ],
    ids=["too long", "a duplicate"],
)
def test_a_row_that_is_dropped_needs_no_answer(
    job: Job, scope: Scope, rows: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    (job.folder / "rewards" / "0" / "mine.py").write_text(ANSWERED)
    plan = job.plan(
        dataset=dataset(job, rows, **settings),
        rewards=[python("mine:adds"), {"accuracy": {"compare": "Numeric"}}],
        training={"maxPromptLength": 99, "promptsPerStep": 2},
    )
    assert run_checks(plan, scope).problems == []


def test_a_row_without_an_answer_is_named_by_its_place_among_those_that_are_trained_on(
    job: Job,
) -> None:
    rows = [{"prompt": "x" * 999, "answer": ""}, *ROWS[:5], {"prompt": "say it", "answer": ""}]
    plan = job.plan(
        dataset=dataset(job, rows),
        rewards=[{"accuracy": {}}],
        training={"maxPromptLength": 99, "promptsPerStep": 2},
    )
    problem = only_problem(run_checks(plan, POD))
    assert problem.path == "spec.rewards[0].accuracy.answerColumn"
    assert "row 6 of those that are trained on: the answer is empty" in problem.message


def test_rows_that_begin_with_the_longest_are_no_mistake(job: Job) -> None:
    long = [{"prompt": f"{number} " + "x" * 99, "answer": "1"} for number in range(40)]
    plan = job.plan(
        dataset=dataset(job, [*long, *ROWS]),
        training={"maxPromptLength": 99, "promptsPerStep": 2},
    )
    report = run_checks(plan, replace(POD, most_rows=20))
    assert report.problems == []
    assert report.prompts is not None
    assert (report.prompts.rows, report.prompts.dropped) == (80, 40)
    too_few = job.plan(
        dataset=dataset(job, [*long, ROWS[0]]),
        training={"maxPromptLength": 99, "promptsPerStep": 2},
    )
    problem = only_problem(run_checks(too_few, replace(POD, most_rows=20)))
    assert problem.message.startswith("1 prompts are left (40 dropped as too long)")


def test_a_laptop_does_not_judge_what_the_cluster_alone_can_reach(job: Job) -> None:
    plan = job.plan(
        rewards=[{"http": {"url": "http://127.0.0.1:1/score"}}],
        checkpoint={
            "store": {
                "url": "s3://runs",
                "endpoint": "http://127.0.0.1:1",
                "credentialsSecretRef": {"name": "store"},
            }
        },
        checkpointDirectory="/tmp/checkpoints/run",
    )
    report = run_checks(plan, replace(LAPTOP, wait_seconds=1.0))
    assert report.problems == []
    assert [skipped.path for skipped in report.skipped] == [
        "spec.checkpoint.store",
        "spec.rewards[0].http.url",
    ]
    assert all("add --in-cluster" in skipped.message for skipped in report.skipped)


def test_a_service_that_training_waits_for_longer_holds_no_job_back(job: Job) -> None:
    scope = replace(POD, wait_seconds=1.0)
    with serving(lambda *_: None) as silent:
        slow = job.plan(rewards=[{"http": {"url": silent.url}}])
        report = run_checks(slow, scope)
        limited = job.plan(rewards=[{"http": {"url": silent.url, "timeoutSeconds": 1}}])
        assert only_problem(run_checks(limited, scope)).transient
    assert report.problems == []
    assert [skipped.path for skipped in report.skipped] == ["spec.rewards[0].http.url"]
    assert "training waits for timeoutSeconds = 30" in report.skipped[0].message
    with serving(lambda *_: (500, b"")) as failing:
        plan = job.plan(rewards=[{"http": {"url": failing.url}}])
        assert only_problem(run_checks(plan, scope)).transient


def test_a_reward_without_time_left_says_that_others_took_it(job: Job) -> None:
    slow = "import time\n\ndef sleeps(completions, **_):\n    time.sleep(60)\n\nsnores = sleeps\n"
    for position in ("0", "1"):
        (job.folder / "rewards" / position).mkdir(exist_ok=True)
        (job.folder / "rewards" / position / "mine.py").write_text(slow)
    plan = job.plan(rewards=[python("mine:sleeps"), python("mine:snores")])
    report = run_checks(plan, replace(POD, reward_seconds=1.0))
    assert report.problems == []
    first, second = [skipped.message for skipped in report.skipped]
    assert "took more than" in first or "did not return" in first
    assert second == "importing and calling rewards took all the time of the preflight"


def test_a_model_s_own_code_may_import_torch(job: Job) -> None:
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((job.model / "config.json").read_text())
    (job.model / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    (job.model / "own.py").write_text("import torch\n")
    plan = job.plan(model={"name": str(job.model), "trustRemoteCode": True})
    (job.folder / "plan.json").write_text(plan.model_dump_json())
    variables = {
        PLAN_ENV: str(job.folder / "plan.json"),
        TERMINATION_LOG_ENV: str(job.folder / "termination"),
        "HF_MODULES_CACHE": str(job.folder / "modules"),
    }
    command = [sys.executable, "-m", "grpo_trainer.preflight", "--only-prompt"]
    done = run_to_end(command, 120, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    report = PreflightReport.model_validate_json((job.folder / "termination").read_text())
    assert report.problems == [], report
    assert [skipped.path for skipped in report.skipped] == ["spec.model.name"]
    assert "needs torch" in report.skipped[0].message


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"num_attention_heads": "8"}, "'num_attention_heads' expected int, got str (value: '8')"),
        ({"id2label": ["right"]}, "id2label is ['right']: AttributeError"),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads 0, and a model"),
        ({"num_attention_heads": 0}, "num_attention_heads 0, and a model has at least 1"),
        ({"vocab_size": -1}, "vocab_size -1, and a model has at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, and a model has at least 1"),
        ({"num_hidden_layers": 1}, "num_hidden_layers 1, and its weights have 2 layers; copy both"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 3, and its weights have 2 layers; copy both"),
    ],
)
def test_a_configuration_that_can_t_be_used_is_one_mistake(
    job: Job, wrong: dict[str, Any], setting: str
) -> None:
    config = json.loads((job.model / "config.json").read_text())
    (job.model / "config.json").write_text(json.dumps(config | wrong))
    problem = only_problem(run_checks(job.plan(), POD))
    assert "config.json" in problem.message
    assert setting in problem.message


def test_a_token_of_a_prompt_that_the_model_does_not_have_is_named(job: Job) -> None:
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(job.model)
    assert run_checks(job.plan(), POD).problems == []
    plan = job.plan(dataset=dataset(job, [*ROWS[:3], {"prompt": "say <new>", "answer": "1"}]))
    problem = only_problem(run_checks(plan, POD))
    assert problem.path == "spec.dataset"
    told = "train.jsonl line 4, column 'prompt': the tokenizer makes token 101, '<new>', of it, and"
    assert told in problem.message
    assert "the model has 101 tokens; take the model's own tokenizer" in problem.message


def test_layers_that_predict_further_tokens_are_no_mistake(job: Job) -> None:
    config = json.loads((job.model / "config.json").read_text())
    config.pop("layer_types", None)
    fewer = config | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (job.model / "config.json").write_text(json.dumps(fewer))
    assert run_checks(job.plan(), POD).problems == []


def test_a_token_to_pad_with_that_the_model_does_not_have_is_named(job: Job) -> None:
    path = job.model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"pad_token": "[PAD]"}))
    problem = only_problem(run_checks(job.plan(), POD))
    assert problem.path == "spec.model.name"
    assert "pads with '[PAD]', token 101, and the model has 101 tokens" in problem.message
    none = SimpleNamespace(pad_token_id=None)
    with pytest.raises(BadInput, match="has neither pad_token nor eos_token"):
        require_pad_token(none, None, "own")
    own_words = SimpleNamespace(get_text_config=lambda: SimpleNamespace(n_vocab=1))
    require_pad_token(SimpleNamespace(pad_token_id=7), own_words, "own")


@pytest.mark.parametrize(
    "problem",
    [
        "f can't be imported: the import took more than 30 s",
        "the function's process ended with status -9",
        "ModuleNotFoundError: No module named 'torch'",
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system",
        "MemoryError: ",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_a_reward_that_needs_more_than_the_pod_has_is_known_by_its_words(problem: str) -> None:
    assert NEEDS_MORE.search(problem)


@pytest.mark.parametrize(
    "problem",
    ["the function's process ended with status 7", "No module named 'torchmetrics'", "KeyError: 9"],
)
def test_a_reward_that_is_wrong_is_not_excused(problem: str) -> None:
    assert not NEEDS_MORE.search(problem)
