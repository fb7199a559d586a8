"""Exact resume of what is partitioned or adapted, through the real entry point: ZeRO-3 and LoRA, on
two processes.

Their checkpoints are other files than the plain run's of test_worker.py: a shard per rank, a shard
of the moved reference per rank, or an adapter. The first attempt stands still after step 5, where
the whole gang is killed; what it logged after its checkpoint of step 3 is what the second attempt
must log again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import JobIdentity, TrainingPlan
from grpo_api.report.history import ROLLED_BACK, standing_rows
from grpo_api.report.report import Result
from harness.controlplane import free_port
from tests.support.facts import history
from tests.support.ranks import demo_model, runs
from tests.support.ranks.pods import Gang
from tests.trainer.stopping_reward import STOP_ENV

pytestmark = pytest.mark.realtime

STEPS, SAVED, STOPPED = 6, 3, 5
EXACT = (
    "reward",
    "kl",
    "loss",
    "grad_norm",
    "entropy",
    "learning_rate",
    "completion_length",
    "tokens",
)
CASES: dict[str, dict[str, Any]] = {
    "Sharded": {"zero": 3, "reference": {"sync": {"everySteps": 2, "mixup": 0.3}}},
    "Adapter": {"adapter": {"mergeOnExport": True}},
}


@dataclass(kw_only=True)
class Story:
    """What was seen of both attempts."""

    killed: dict[int, dict[str, Any]]
    continued: dict[int, dict[str, Any]]
    """Of another job, which began with the first attempt's checkpoint."""
    untouched: bool
    """Whether that left all files of the first job as they were."""
    resumed: dict[int, dict[str, Any]]
    result: Result
    model: Path
    runs: Path
    """The checkpoint directory."""


def make_plan(strategy: str, model: Path, folder: Path, attempt: int) -> TrainingPlan:
    """The case's plan for two pods of one process."""
    plan = runs.plan(model, strategy, world_size=2, folder=folder, **CASES[strategy]).model_dump(
        by_alias=True
    )
    plan["job"]["attempt"] = attempt
    plan["rendezvous"]["port"] = free_port()
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [
        {"python": {"function": "tests.trainer.stopping_reward:digits", "timeoutSeconds": 500}}
    ]
    plan["execution"] |= {"nodes": 2, "processesPerNode": 1}
    return TrainingPlan.model_validate(plan)


def another_job(plan: TrainingPlan, source: Path) -> TrainingPlan:
    """The plan for a job that begins with the checkpoints in `source`, and ends earlier than that
    would."""
    job = JobIdentity(namespace="default", name="another", uid="1", attempt=1)
    training = plan.training.model_copy(update={"max_steps": STOPPED})
    return plan.model_copy(update={"job": job, "training": training, "resume_from": str(source)})


def logged_steps(folder: Path) -> list[int]:
    """The steps that the history on the volume has."""
    rows, _ = history.of_run(folder)
    return [row["step"] for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", params=["Sharded", pytest.param("Adapter", marks=pytest.mark.slow)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An attempt whose pods are all killed after step 5, and the one that ends the run."""
    folder = tmp_path_factory.mktemp("resume")
    model = demo_model.save_policy(folder / "model")
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.PROMPTS))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(STOP_ENV, str(STOPPED))
        with Gang(
            make_plan(request.param, model, folder / "runs", 1), folder, folder / "pods-1"
        ) as gang:
            gang.until(lambda: STOPPED in gang.steps())
            # A thread writes the history, so that its line may come after the log's.
            gang.until(lambda: STOPPED in logged_steps(folder / "runs"))
            for pod in gang.pods:
                pod.kill()
            gang.wait()
            killed = gang.steps()
    before = contents(folder / "runs")
    with Gang(
        another_job(make_plan(request.param, model, folder / "others", 1), folder / "runs"),
        folder,
        folder / "pods-other",
    ) as gang:
        gang.wait()
        continued = gang.steps()
    untouched = contents(folder / "runs") == before
    last = make_plan(request.param, model, folder / "runs", 2)
    with Gang(last, folder, folder / "pods-2", traced=True) as gang:
        gang.wait()
        steps, result = gang.steps(), gang.outcome().result
        return Story(
            killed=killed,
            continued=continued,
            untouched=untouched,
            resumed=steps,
            result=result,
            model=model,
            runs=folder / "runs",
        )


def test_the_second_attempt_continues_with_the_first_one_s_numbers(story: Story) -> None:
    assert story.result is Result.SUCCEEDED
    assert sorted(story.killed) == list(range(1, STOPPED + 1))
    assert sorted(story.resumed) == list(range(SAVED + 1, STEPS + 1))
    for step in range(SAVED + 1, STOPPED + 1):
        expected = {key: story.killed[step][key] for key in EXACT}
        assert {key: story.resumed[step][key] for key in EXACT} == expected
        assert expected["kl"] > 0
    assert (
        story.resumed[STEPS]["tokens"]
        > story.resumed[STOPPED]["tokens"]
        > story.killed[SAVED]["tokens"]
    )


def test_another_job_continues_with_the_first_one_s_numbers(story: Story) -> None:
    assert sorted(story.continued) == list(range(SAVED + 1, STOPPED + 1))
    for step in range(SAVED + 1, STOPPED + 1):
        assert {key: story.continued[step][key] for key in EXACT} == {
            key: story.killed[step][key] for key in EXACT
        }
    assert story.untouched


def test_the_export_is_one_plain_trained_model(story: Story) -> None:
    start = AutoModelForCausalLM.from_pretrained(story.model).state_dict()
    trained, report = AutoModelForCausalLM.from_pretrained(
        story.runs / "export", output_loading_info=True
    )
    assert not (story.runs / "export" / "adapter_model.safetensors").exists()
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    weights = trained.state_dict()
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[name], start[name]) for name in start)


def test_the_history_is_one_over_both_attempts(story: Story) -> None:
    """Of a gang: rank 0 has whole groups of all ranks."""
    rows, samples = history.of_run(story.runs)
    assert [(row["attempt"], row["step"], ROLLED_BACK in row) for row in rows] == [
        *((1, step, step > SAVED) for step in range(1, STOPPED + 1)),
        *((2, step, False) for step in range(SAVED + 1, STEPS + 1)),
    ]
    for step in range(SAVED + 1, STOPPED + 1):
        rolled_back, standing = (row for row in rows if row["step"] == step)
        assert history.without_clocks(rolled_back) == history.without_clocks(standing)
    for group in samples[0]["groups"]:
        completions = group["completions"]
        assert len(completions) == 4
        assert sum(each["advantage"] for each in completions) == pytest.approx(0, abs=1e-4)
    exported = history.of_folder(story.runs / "export")
    assert exported == (standing_rows(rows), samples)
