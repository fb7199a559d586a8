"""Each mistake of a job is named with its field, what there is instead and what to write, before
torch is imported."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.text.contract import (
    CHECKPOINT_STORE_ENV,
    DATA_MOUNT_ENV,
    PLAN_ENV,
    REWARD_MOUNT_ENV,
    TERMINATION_LOG_ENV,
)
from grpo_trainer.preflight import findings
from grpo_trainer.preflight.checks import run_checks
from grpo_trainer.preflight.findings import LAPTOP, POD, RANK_0
from grpo_trainer.preflight.rank0 import require_passed
from grpo_trainer.runtime.errors import BadInput
from harness.programs.object_stores import BUCKET, CREDENTIALS
from harness.programs.patience import run_to_end, wait_for_exit
from tests.support.facts.disk_facts import small_disk
from tests.support.ranks import demo_model
from tests.support.ranks.launch import launch
from tests.trainer.hub import Files, HubServer, environment, files_of, hub_server, use
from tests.trainer.preflight_job import ROWS, Job, only_problem, python
from tests.trainer.store_world import served_world

pytestmark = pytest.mark.realtime

QUICK = replace(POD, wait_seconds=1.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """A policy of several files and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "team/model": files_of(demo_model.save_policy(folder / "policy", shard="100KB")),
        "team/judge": files_of(demo_model.save_reward_model(folder / "judge")),
        "team/words": files_of(demo_model.save_reward_model(folder / "words", labels=3)),
    }


@pytest.fixture
def job(files: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job, with its mounts in its folder."""
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path / "data"))
    monkeypatch.setenv(REWARD_MOUNT_ENV, str(tmp_path / "rewards"))
    return Job(tmp_path, files["team/model"])


@pytest.fixture
def hub(
    files: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    """A hub with the models and the rows."""
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        for name, content in files.items():
            server.add("model", name, content)
        rows = "\n".join(json.dumps(row) for row in ROWS)
        server.add("dataset", "team/rows", {"train.jsonl": rows.encode()})
        yield server


def test_a_job_without_mistakes_passes_and_its_shape_and_lengths_are_known(job: Job) -> None:
    report = run_checks(job.plan(), POD)
    assert (report.problems, report.skipped) == ([], [])
    assert report.prompts is not None
    assert (report.prompts.rows, report.prompts.dropped) == (40, 0)
    assert report.architecture is not None
    assert (report.architecture.model_type, report.architecture.layers) == ("qwen2", 2)
    assert report.has_vllm is not None
    assert list(job.folder.rglob("*preflight*")) == []


@pytest.mark.parametrize(
    ("changes", "path", "told"),
    [
        (
            {"dataset": {"files": {"configMap": {"name": "rows"}, "paths": ["trian.jsonl"]}}},
            "spec.dataset.files.paths[0]",
            r"no file 'trian.jsonl' .*; the folder has train.jsonl",
        ),
        (
            {
                "dataset": {
                    "files": {"configMap": {"name": "rows"}, "paths": ["train.jsonl"]},
                    "promptColumn": "question",
                }
            },
            "spec.dataset.promptColumn",
            r"no column 'question'; it has prompt, answer",
        ),
        (
            {"rewards": [{"accuracy": {"answerColumn": "solution"}}]},
            "spec.rewards[0].accuracy.answerColumn",
            r"column 'solution' is not in the dataset; set accuracy.answerColumn to .*answer",
        ),
        (
            {"rewards": [python("absent:digits")]},
            "spec.rewards[0].python.function",
            r"No module named 'absent'; ConfigMap 'mine' has mine.py: write MODULE:FUNCTION",
        ),
        (
            {"rewards": [python("mine:digit")]},
            "spec.rewards[0].python.function",
            r"no 'digit'; it has digits, raises, few.*ConfigMap 'mine' has mine.py",
        ),
        (
            {"rewards": [python("mine:raises")]},
            "spec.rewards[0].python.function",
            r"mine:raises failed on a sample: KeyError: 'The .*\(mine.py line 6\); correct the",
        ),
        (
            {"rewards": [python("mine:few")]},
            "spec.rewards[0].python.function",
            r"returned 1 rewards for 2 completions; return one for each",
        ),
        (
            {"training": {"maxPromptLength": 1, "promptsPerStep": 2}},
            "spec.dataset",
            r"40 dropped as too long.*raise training.maxPromptLength",
        ),
    ],
)
def test_each_mistake_is_named_with_what_there_is_and_what_to_write(
    job: Job, changes: dict[str, Any], path: str, told: str
) -> None:
    problem = only_problem(run_checks(job.plan(**changes), POD))
    assert (problem.path, problem.transient) == (path, False)
    assert re.search(told, problem.message), problem.message


def test_all_mistakes_are_named_at_once_and_again_by_rank_0(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine starts no reward's process within a second
    monkeypatch.setattr(findings, "RANK_0", replace(RANK_0, reward_seconds=60.0))
    for path in job.model.glob("*.safetensors*"):
        path.unlink()
    (job.model / "pytorch_model.bin").write_bytes(b"never read")
    plan = job.plan(
        dataset={
            "files": {"configMap": {"name": "rows"}, "paths": ["train.jsonl"]},
            "promptColumn": "question",
        },
        rewards=[python("absent:digits"), {"accuracy": {"answerColumn": "solution"}}],
    )
    paths = [
        "spec.model.name",
        "spec.dataset.promptColumn",
        "spec.rewards[0].python.function",
        "spec.rewards[1].accuracy.answerColumn",
    ]
    report = run_checks(plan, POD)
    assert [problem.path for problem in report.problems] == paths
    assert "pytorch_model.bin, config.json" in report.problems[0].message
    with pytest.raises(BadInput) as caught:
        require_passed(plan, is_supervisor=False)
    assert re.findall(r"spec\.[\w.\[\]]+(?=: )", str(caught.value)) == paths


@pytest.mark.parametrize(
    ("kind", "model_class"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_a_model_that_would_not_be_loaded_is_named(job: Job, kind: str, model_class: str) -> None:
    config = {"model_type": kind, "architectures": [model_class]}
    (job.model / "config.json").write_text(json.dumps(config))
    problem = only_problem(run_checks(job.plan(), POD))
    assert problem.path == "spec.model.name"
    assert f"{model_class}, model_type {kind}, which AutoModelForCausalLM does" in problem.message


@pytest.mark.parametrize("function", ["gpu", "slow"])
def test_a_reward_that_needs_more_than_the_pod_has_is_left_out(job: Job, function: str) -> None:
    scope = replace(POD, reward_seconds=2.0)
    report = run_checks(job.plan(rewards=[python(f"mine:{function}")]), scope)
    assert report.problems == []
    assert [skipped.path for skipped in report.skipped] == ["spec.rewards[0].python.function"]


def test_what_is_known_before_a_reward_takes_all_memory_is_left_behind(job: Job) -> None:
    reports: list[PreflightReport] = []
    run_checks(job.plan(), POD, reports.append)
    (before,) = reports
    assert before.prompts is not None
    assert [skipped.path for skipped in before.skipped] == ["spec.rewards[0].python.function"]


def test_a_laptop_leaves_out_what_only_the_cluster_has(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_MOUNT_ENV, str(job.folder / "absent"))
    plan = job.plan(model={"name": "/models"}, rewards=[python("mine:digits")])
    monkeypatch.setenv(REWARD_MOUNT_ENV, "/absent")
    report = run_checks(plan, LAPTOP)
    assert report.problems == []
    assert [skipped.path for skipped in report.skipped] == [
        "spec.model.name",
        "spec.dataset.files",
        "spec.rewards[0].python.function",
    ]


def hub_plan(job: Job, **changes: Any) -> TrainingPlan:
    """The job with all that it needs on the hub."""
    parts = {
        "model": {"name": "team/model"},
        "dataset": {"name": "team/rows"},
        "rewards": [{"accuracy": {}}, {"model": {"name": "team/judge"}}],
    }
    return job.plan(**(parts | changes))


def test_of_the_hub_only_small_files_and_the_first_rows_are_fetched(
    job: Job, hub: HubServer
) -> None:
    report = run_checks(hub_plan(job), QUICK)
    assert (report.problems, report.skipped) == ([], [])
    assert report.prompts is not None
    assert report.prompts.rows == 40
    assert report.revisions == {
        "model": hub.repositories["models/team/model"].main,
        "rewards[1].model": hub.repositories["models/team/judge"].main,
        "dataset": hub.repositories["datasets/team/rows"].main,
    }
    assert not any(one.startswith("GET") and one.endswith(".safetensors") for one in hub.requests)


@pytest.mark.parametrize(
    ("changes", "path", "told"),
    [
        ({"model": {"name": "team/modle"}}, "spec.model.name", "the hub has no such repository"),
        (
            {"model": {"name": "team/model", "revision": "v9"}},
            "spec.model.revision",
            r"no revision 'v9'; it has main\. Write a branch",
        ),
        (
            {"dataset": {"name": "team/rows", "revision": "v9"}},
            "spec.dataset.revision",
            r"no revision 'v9'; it has main\. Write a branch",
        ),
        (
            {"dataset": {"name": "team/rows", "split": "test"}},
            "spec.dataset.name",
            r"split test.*can't be loaded: .*train.*check name, config, split",
        ),
        (
            {"dataset": {"name": "team/rows", "split": "train[:9]+tset[:9]"}},
            "spec.dataset.name",
            r"Bad split: train\+tset. Available splits: \['train'\]",
        ),
        (
            {"dataset": {"name": "team/rows", "promptColumn": "q"}},
            "spec.dataset.promptColumn",
            "no column 'q'; it has prompt, answer",
        ),
        (
            {"rewards": [{"model": {"name": "team/words"}}]},
            "spec.rewards[0].model.name",
            "has 3 labels; name a reward model, which has one",
        ),
    ],
)
def test_a_mistake_on_the_hub_is_named(
    job: Job, hub: HubServer, changes: dict[str, Any], path: str, told: str
) -> None:
    problem = only_problem(run_checks(hub_plan(job, **changes), QUICK))
    assert (problem.path, problem.transient) == (path, False)
    assert re.search(told, problem.message), problem.message


def test_rows_of_the_hub_whose_longest_come_first_are_no_mistake(job: Job, hub: HubServer) -> None:
    prompts = ["word " * 60] * 3 + [f"say {number}" for number in range(40)]
    rows = "".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts)
    hub.add("dataset", "team/sorted", {"train.jsonl": rows.encode()})
    changes = {"dataset": {"name": "team/sorted"}, "training": {"maxPromptLength": 30}}
    report = run_checks(hub_plan(job, **changes), replace(QUICK, most_rows=3))
    assert report.problems == []
    (skipped,) = report.skipped
    assert skipped.path == "spec.dataset"
    assert "each of the first 3 prompts is longer than training.maxPromptLength = 30" in (
        skipped.message
    )


@pytest.mark.parametrize("fault", ["401", "403"])
def test_a_token_without_rights_is_named(job: Job, hub: HubServer, fault: str) -> None:
    hub.faults = [fault] * 200
    report = run_checks(hub_plan(job), QUICK)
    paths = ["spec.model.name", "spec.dataset.name", "spec.rewards[1].model.name"]
    assert [problem.path for problem in report.problems] == paths
    for problem in report.problems:
        assert not problem.transient
        assert "tokenSecretRef" in problem.message


def test_a_model_on_the_hub_without_all_weights_is_named(job: Job, hub: HubServer) -> None:
    files = dict(hub.repositories["models/team/model"].commits.popitem()[1])
    lost = next(name for name in files if name.endswith(".safetensors"))
    hub.add("model", "team/model", {n: c for n, c in files.items() if n != lost})
    assert lost in only_problem(run_checks(hub_plan(job), QUICK)).message
    config = json.loads(files["config.json"]) | {"num_hidden_layers": 1}
    hub.add("model", "team/model", files | {"config.json": json.dumps(config).encode()})
    message = only_problem(run_checks(hub_plan(job), QUICK)).message
    assert "num_hidden_layers 1, and its weights have 2 layers" in message
    small = {n: c for n, c in files.items() if "safetensors" not in n}
    hub.add("model", "team/model", small | {"pytorch_model.bin": b"x"})
    assert "pytorch_model.bin" in only_problem(run_checks(hub_plan(job), QUICK)).message


def test_a_hub_that_is_away_is_waited_for_once_and_may_come_back(job: Job, hub: HubServer) -> None:
    hub.shutdown()
    hub.server_close()
    report = run_checks(hub_plan(job), QUICK)
    problem = only_problem(report)
    assert (problem.path, problem.transient) == ("spec.model.name", True)
    assert "Connect" in problem.message
    assert problem.message.endswith("HF_ENDPOINT")
    assert [skipped.path for skipped in report.skipped] == [
        "spec.dataset.name",
        "spec.rewards[1].model.name",
    ]
    require_passed(hub_plan(job), is_supervisor=True)


def test_a_volume_is_written_and_its_room_is_measured(job: Job, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        plan = job.plan(checkpointDirectory=str(disk / "run"))
        assert run_checks(plan, POD).problems == []
        (disk / "ballast").write_bytes(b"x" * (1 << 20))
        full = only_problem(run_checks(plan, POD))
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        read_only = only_problem(run_checks(plan, POD))
    assert (full.path, full.transient) == ("spec.checkpoint", True)
    assert "is full: No space left on device; remove something" in full.message
    assert (read_only.path, read_only.transient) == ("spec.checkpoint", False)
    assert "is read-only; use a claim" in read_only.message


def test_a_store_is_tried_with_the_run_s_own_client(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_world("versitygw", tmp_path / "store") as world:
        store = {"url": f"s3://{BUCKET}/runs", "endpoint": world.proxy.url}
        plan = job.plan(checkpoint={"store": store}, checkpointDirectory="/tmp/checkpoints/run")
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(f"{CHECKPOINT_STORE_ENV}{name}", value)
        assert run_checks(plan, QUICK).problems == []
        bucket = f"GET /{BUCKET}"
        world.proxy.reset(lambda _, words: "403" if words.rstrip("/") == bucket else "")
        unlisted = only_problem(run_checks(plan, QUICK))
        world.proxy.reset()
        monkeypatch.setenv(f"{CHECKPOINT_STORE_ENV}AWS_SECRET_ACCESS_KEY", "wrong")
        problem = only_problem(run_checks(plan, QUICK))
    assert (unlisted.path, unlisted.transient) == ("spec.checkpoint.store", False)
    assert ": list is refused: HTTP 403 Forbidden: AccessDenied. Check the" in unlisted.message
    assert (problem.path, problem.transient) == ("spec.checkpoint.store", False)
    assert re.search("put attempt-1/probe-[0-9a-f]+ if it is unchanged is refused", problem.message)
    assert problem.message.endswith(
        "rights of the credentials (docs/how-to/models/object-stores.md)"
    )


def written(job: Job, plan: TrainingPlan) -> dict[str, str]:
    """Variables of a pod with this plan."""
    (job.folder / "plan.json").write_text(plan.model_dump_json())
    return {
        PLAN_ENV: str(job.folder / "plan.json"),
        TERMINATION_LOG_ENV: str(job.folder / "termination"),
        DATA_MOUNT_ENV: str(job.folder / "data"),
    }


def run_module(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A new process, as a pod starts it."""
    return run_to_end([sys.executable, "-c", code], 120, env=os.environ | variables)


def test_a_whole_preflight_imports_no_torch(job: Job, hub: HubServer) -> None:
    plan = hub_plan(job, rewards=[{"python": {"function": "textwrap:dedent"}}, {"accuracy": {}},
        {"model": {"name": "team/judge"}}])  # fmt: skip
    code = (
        "import sys\n"
        "from grpo_trainer.preflight.__main__ import main\n"
        "code = main([])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    variables = written(job, plan) | environment(hub.url, job.folder / "other cache")
    done = run_module(code, variables)
    assert done.returncode == 0, done.stderr
    report = PreflightReport.model_validate_json((job.folder / "termination").read_text())
    assert [problem.path for problem in report.problems] == ["spec.rewards[0].python.function"], (
        report
    )
    assert report.prompts is not None
    assert report.architecture is not None, report


@pytest.mark.parametrize("module", ["grpo_trainer.preflight", "grpo_trainer"])
def test_sigterm_ends_the_checks_although_nobody_answers(
    job: Job, hub: HubServer, module: str
) -> None:
    hub.held = "/api/"
    variables = written(job, hub_plan(job)) | environment(hub.url, job.folder / "other cache")
    process = launch(module, [], variables, job.folder / "log", fresh=True)
    try:
        while not hub.requests:
            assert process.poll() is None, (job.folder / "log").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit(process, 60) == EXIT_CODES[Result.PREEMPTED], (
            job.folder / "log"
        ).read_text()
    finally:
        hub.release()
        process.kill()
        wait_for_exit(process, 60)
    assert (job.folder / "termination").exists() == (module == "grpo_trainer")


def test_a_wrong_plan_is_reported_too(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    variables = {
        PLAN_ENV: str(tmp_path / "plan.json"),
        TERMINATION_LOG_ENV: str(tmp_path / "termination"),
    }
    done = run_module("import grpo_trainer.preflight.__main__ as m; m.main([])", variables)
    assert done.returncode == 0, done.stderr
    report = PreflightReport.model_validate_json((tmp_path / "termination").read_text())
    assert [problem.path for problem in report.problems] == ["spec"]


def test_rank_0_ends_of_a_wrong_column_before_it_imports_torch(job: Job) -> None:
    plan = job.plan(
        dataset={
            "files": {"configMap": {"name": "rows"}, "paths": ["train.jsonl"]},
            "promptColumn": "question",
        },
        rewards=[{"accuracy": {}}],
    )
    code = (
        "import sys\n"
        "from grpo_trainer.__main__ import main\n"
        "code = main()\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = run_module(code, written(job, plan))
    assert done.returncode == EXIT_CODES[Result.BAD_INPUT], done.stderr
    outcome = Outcome.model_validate_json((job.folder / "termination").read_text())
    assert outcome.result is Result.BAD_INPUT
    assert "spec.dataset.promptColumn: the dataset has no column 'question'" in outcome.message
