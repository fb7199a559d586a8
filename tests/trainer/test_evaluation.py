"""The evaluation of an exported model: what it scores, how sure it is, and how it ends as the
command of a GRPOJob."""

import json
import math
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from errno import ESTALE
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.rewards import RewardSpec
from grpo_api.text.contract import (
    ATTEMPT_PREFIX,
    DATA_MOUNT_ENV,
    EXPORT_FOLDER,
    PLAN_ENV,
    PROGRESS_BIND_ENV,
    RESUME_STORE_ENV,
    REWARD_MOUNT_ENV,
    TERMINATION_LOG_ENV,
)
from grpo_trainer.evaluation import __main__ as program
from grpo_trainer.evaluation.held_out import evaluate_held_out
from grpo_trainer.evaluation.score import (
    Estimate,
    Score,
    as_json,
    is_within_noise,
    noise_of_difference,
    reported_reward,
    score,
    score_message,
)
from grpo_trainer.rewards import http_service
from grpo_trainer.runtime.durable_files import write_atomically
from grpo_trainer.runtime.errors import BadInput, RewardError, Transient
from grpo_trainer.stores.run_store import RunStore
from grpo_trainer.stores.store_client import open_store
from harness.programs.object_stores import BUCKET, CREDENTIALS, serving
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs

pytestmark = pytest.mark.realtime

COMPLETIONS = 6
ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(5)]
REWARDS = [
    {"format": {"pattern": r"[\s\S]*[a-z][\s\S]*", "score": 2.0}, "weight": 0.5},
    {"accuracy": {"answerColumn": "answer", "extract": "None", "score": 1.0}},
]
REWARD = st.none() | st.floats(-10, 10)


@pytest.fixture(autouse=True)
def _any_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Progress is served at a port of the test's own; SIGTERM ends the tests as before."""
    monkeypatch.setenv(PROGRESS_BIND_ENV, "127.0.0.1:0")
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with an exported model, which knows nothing."""
    return demo_model.save_policy(tmp_path_factory.mktemp("run") / EXPORT_FOLDER)


@pytest.fixture
def plan(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingPlan:
    """An evaluation's plan, in the file that a pod would have it in, beside its data."""
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {"files": {"configMap": {"name": "rows"}, "paths": ["held-out.jsonl"]}}
    training = {"numGenerations": COMPLETIONS, "promptsPerStep": 16, "maxCompletionLength": 8}
    given = runs.plan(model).model_dump(by_alias=True, exclude_none=True)
    given |= {
        "dataset": files,
        "rewards": REWARDS,
        "training": training,
        "resumeFrom": str(model.parent),
    }
    made = TrainingPlan.model_validate(given)
    (tmp_path / "plan.json").write_text(made.model_dump_json(by_alias=True, exclude_none=True))
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    monkeypatch.setenv(PLAN_ENV, str(tmp_path / "plan.json"))
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "termination-log"))
    return made


@given(st.lists(st.lists(REWARD, min_size=3, max_size=3), min_size=2, max_size=20))
def test_the_score_is_the_mean_of_the_rows_that_have_a_reward(
    rows: list[list[float | None]],
) -> None:
    known = [[one for one in row if one is not None] for row in rows]
    means = [fmean(row) for row in known if row]
    if not means:
        with pytest.raises(ValueError, match="no completion has a reward"):
            score(rows, {})
        return
    found = score(rows, {})
    assert (found.rows, found.completions) == (len(means), 3)
    assert found.reward.mean == pytest.approx(fmean(means))
    expected = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    assert found.reward.standard_error == pytest.approx(expected)


def test_nineteen_of_twenty_intervals_hold_the_truth_where_completions_of_a_row_are_alike() -> None:
    """Rows differ in how hard they are; counted by completions, the intervals would be far too
    narrow."""
    chance, hit, truth = random.Random(0), 0, 0.5
    for _ in range(1000):
        hardness = [chance.random() for _ in range(50)]
        rows: list[list[float | None]] = [
            [float(chance.random() < hard) for _ in range(16)] for hard in hardness
        ]
        found = score(rows, {}).reward
        hit += abs(found.mean - truth) <= found.margin
    assert 920 <= hit <= 970


@given(st.floats(-5, 5), st.floats(0, 5), st.floats(-5, 5), st.floats(0, 5))
def test_means_agree_within_the_noise_of_both(
    one: float, error: float, other: float, other_error: float
) -> None:
    a, b = Estimate(one, error), Estimate(other, other_error)
    assert is_within_noise(a, b) == is_within_noise(b, a)
    assert max(a.margin, b.margin) <= noise_of_difference(a, b) <= a.margin + b.margin + 1e-9
    assert is_within_noise(a, Estimate(one, other_error))


def test_a_job_without_a_reward_is_compared_with_nothing() -> None:
    assert reported_reward(Outcome(result=Result.SUCCEEDED, metrics={"reward": 1.0}), 4) is None
    assert (
        reported_reward(
            Outcome(result=Result.SUCCEEDED, metrics={"reward": math.nan, "reward_std": 1.0}), 4
        )
        is None
    )
    job = reported_reward(
        Outcome(result=Result.SUCCEEDED, metrics={"reward": 1.0, "reward_std": 0.5}), 4
    )
    assert job == Estimate(1.0, 0.25)
    alike = Outcome(result=Result.SUCCEEDED, metrics={"reward": 1.0, "reward_std": 0.0})
    assert reported_reward(alike, 4, spread=0.5) == Estimate(1.0, 0.25), (
        "a last step without a fault knows no better"
    )
    found = Score(Estimate(0.5, 0.1), 10, 2)
    assert score_message(found, None).endswith("the job reported none")
    assert "within the noise" in score_message(found, job)
    assert "outside the noise" in score_message(found, Estimate(2.0, 0.25))
    assert as_json(found, job)["job"]["withinNoise"] is True


def test_a_model_is_sampled_with_a_seed_and_scored_by_all_rewards(
    plan: TrainingPlan, model: Path
) -> None:
    found, again, other = (
        evaluate_held_out(plan, model),
        evaluate_held_out(plan, model),
        evaluate_held_out(plan, model, seed=1),
    )
    assert found == again
    assert found != other
    assert (found.rows, found.completions) == (len(ROWS), COMPLETIONS)
    means = found.by_function
    assert set(means) == {"format", "accuracy"}
    assert 0 < means["format"] < 2
    assert found.reward.mean == pytest.approx(0.5 * means["format"] + means["accuracy"])


def test_a_reward_sees_the_end_of_the_run_and_what_one_process_of_it_has_to_score(
    plan: TrainingPlan, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "mine.py").write_text(
        "def progress(completions, trainer_state, **_):\n"
        "    share = trainer_state.global_step / trainer_state.max_steps\n"
        "    return [share * len(completions)] * len(completions)\n"
    )
    monkeypatch.setenv(REWARD_MOUNT_ENV, str(tmp_path))
    reward = {"python": {"function": "mine:progress", "configMap": {"name": "mine"}}}
    own = TrainingPlan.model_validate(
        plan.model_dump(by_alias=True, exclude_none=True) | {"rewards": [reward]}
    )
    split = {"micro_batch": 1, "steps_per_generation": len(ROWS)}
    execution = own.execution.model_copy(update=split)
    own = own.model_copy(update={"execution": execution})
    assert evaluate_held_out(own, model, completions=2).reward.mean == len(ROWS)


def test_a_reward_that_failed_for_too_many_completions_is_no_score(
    plan: TrainingPlan, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise http_service._Permanent("HTTP 404")

    monkeypatch.setattr(http_service.HTTPFunction, "_post", refuse)
    rewards = [REWARDS[0], {"http": {"url": "http://judge"}}]
    own = TrainingPlan.model_validate(
        plan.model_dump(by_alias=True, exclude_none=True) | {"rewards": rewards}
    )
    with pytest.raises(RewardError, match=r"30 of the 30 completions .*HTTP 404"):
        evaluate_held_out(own, model)


def test_reward_models_and_text_prompts_are_scored_as_in_training(
    plan: TrainingPlan, model: Path, tmp_path: Path
) -> None:
    judge = demo_model.save_reward_model(tmp_path / "judge")
    rewards = [{"model": {"name": str(judge), "dtype": "float32"}}]
    own = TrainingPlan.model_validate(
        plan.model_dump(by_alias=True, exclude_none=True) | {"rewards": rewards}
    )
    found = evaluate_held_out(own, model, completions=2)
    assert math.isfinite(found.reward.mean)
    assert found.reward.standard_error > 0


def test_as_a_jobs_command_it_waits_for_the_model_and_ends_with_its_reward(
    plan: TrainingPlan, model: Path, tmp_path: Path
) -> None:
    outcome = Outcome(result=Result.SUCCEEDED, metrics={"reward": 0.5, "reward_std": 1.0})
    attempt = model.parent / f"{ATTEMPT_PREFIX}1"

    def finish() -> None:
        attempt.mkdir()
        write_atomically(attempt / "outcome-rank-0.json", outcome.model_dump_json())

    finishing = threading.Timer(0.2, finish)
    finishing.start()
    assert program.main(["--wait", "60"]) == 0
    finishing.join()
    said = Outcome.model_validate_json((tmp_path / "termination-log").read_text())
    assert (said.result, said.attempt) == (Result.SUCCEEDED, plan.job.attempt)
    assert said.metrics["reward"] == evaluate_held_out(plan, model).reward.mean
    assert "the job reported 0.500" in said.message


def test_sigterm_ends_it_with_an_outcome(
    plan: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ignores the signal for the first process of a pod that has no handler for it."""
    monkeypatch.setattr(program, "exit_process", sys.exit)
    killing = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    # Its model never comes.
    own = plan.model_copy(update={"resume_from": "/nowhere"})
    (tmp_path / "plan.json").write_text(own.model_dump_json(by_alias=True, exclude_none=True))

    def fail_instead(*_: object) -> None:
        pytest.fail("SIGTERM has no handler")

    signal.signal(signal.SIGTERM, fail_instead)
    killing.start()
    with pytest.raises(SystemExit) as ended:
        program.main(["--wait", "600"])
    killing.join()
    assert ended.value.code == EXIT_CODES[Result.PREEMPTED]
    said = Outcome.model_validate_json((tmp_path / "termination-log").read_text())
    assert (said.result, said.attempt) == (Result.PREEMPTED, plan.job.attempt)


def test_a_model_on_an_object_store_is_waited_for_and_brought(
    plan: TrainingPlan, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(RESUME_STORE_ENV + name, value)
    with serving("versitygw", tmp_path / "store") as served:
        spec = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=served)
        update = {"resume_from": str(tmp_path / "resume" / "demo-1"), "resume_store": spec}
        own = plan.model_copy(update=update)
        (tmp_path / "plan.json").write_text(own.model_dump_json(by_alias=True, exclude_none=True))
        run = RunStore(open_store(spec, dict(CREDENTIALS), folder="demo-1"), "uid", 1, 1)
        run.claim()
        run.export(model)
        assert program.main(["--wait", "0"]) == EXIT_CODES[Result.ERROR], (
            "it has a model, and has not succeeded yet"
        )
        said = Outcome.model_validate_json((tmp_path / "termination-log").read_text())
        assert f"no finished model in s3://{BUCKET}/runs/demo-1 after 0 s" in said.message
        run.finish(Outcome(result=Result.SUCCEEDED, metrics={"reward": 0.5, "reward_std": 1.0}))
        assert program.main(["--wait", "60"]) == 0
    said = Outcome.model_validate_json((tmp_path / "termination-log").read_text())
    assert said.metrics["reward"] == evaluate_held_out(plan, model).reward.mean
    assert "the job reported 0.500" in said.message


@pytest.mark.parametrize(
    ("resume_from", "wait", "result", "words"),
    [
        (None, "60", Result.BAD_INPUT, "spec.resumeFrom: nothing to evaluate"),
        ("/nowhere", "0", Result.ERROR, "no finished model in /nowhere/export after 0 s"),
    ],
)
def test_without_a_model_it_says_what_it_waited_for(
    plan: TrainingPlan, resume_from: str | None, wait: str, result: Result, words: str
) -> None:
    folder = Path(os.environ[PLAN_ENV]).parent
    own = plan.model_copy(update={"resume_from": resume_from})
    (folder / "plan.json").write_text(own.model_dump_json(by_alias=True, exclude_none=True))
    assert program.main(["--wait", wait]) == EXIT_CODES[result]
    said = Outcome.model_validate_json((folder / "termination-log").read_text())
    assert said.result is result
    assert words in said.message


def test_ranks_other_than_the_first_have_nothing_to_do(
    plan: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = plan.model_copy(update={"execution": plan.execution.model_copy(update={"nodes": 2})})
    (tmp_path / "plan.json").write_text(wide.model_dump_json(by_alias=True, exclude_none=True))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert program.main([]) == 0
    assert Outcome.model_validate_json((tmp_path / "termination-log").read_text()).rank == 1


def with_settings(plan: TrainingPlan, generation: dict[str, Any]) -> TrainingPlan:
    """The plan with chats, a template of its own and these settings of spec.generation."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}"
    changes = {"chat_template": template, "chat_template_kwargs": {"end": "!"}}
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(update=changes),
            "dataset": plan.dataset.model_copy(update={"system_prompt": "x"}),
            "generation": GenerationSpec.model_validate(generation),
        }
    )


def test_an_evaluation_renders_and_ends_as_the_job_that_trained(
    plan: TrainingPlan, model: Path
) -> None:
    """Completions end at a stop string, and keep it."""
    rewards = [{"format": {"pattern": r"[^a-m]*[a-m]?"}}]
    stop = [chr(code) for code in range(ord("a"), ord("n"))]
    own = with_settings(plan, {"stop": stop[:13]}).model_copy(
        update={"rewards": [RewardSpec.model_validate(reward) for reward in rewards]}
    )
    assert evaluate_held_out(own, model).reward.mean == 1.0
    without = own.model_copy(update={"generation": GenerationSpec()})
    assert evaluate_held_out(without, model).reward.mean < 1.0


def test_all_end_tokens_of_the_model_end_completions(
    plan: TrainingPlan, model: Path, tmp_path: Path
) -> None:
    own_model = Path(shutil.copytree(model, tmp_path / "own"))
    letters = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids([*"abcdefghijklm"])
    settings = own_model / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": letters}))
    rewards = [RewardSpec.model_validate({"format": {"pattern": r"[^a-m]*[a-m]?"}})]
    own = plan.model_copy(update={"rewards": rewards})
    assert evaluate_held_out(own, own_model).reward.mean == 1.0
    assert evaluate_held_out(own, model).reward.mean < 1.0


def test_arguments_of_transformers_are_obeyed_and_vllm_s_are_refused(
    plan: TrainingPlan, model: Path
) -> None:
    kwargs = {"suppress_tokens": list(range(2, 100))}
    own = with_settings(plan, {"engine": "Transformers", "kwargs": kwargs})
    assert evaluate_held_out(own, model).reward.mean < evaluate_held_out(plan, model).reward.mean
    other = {"engine": "Colocated", "fallback": "Never", "kwargs": {"min_tokens": 3}}
    with pytest.raises(BadInput, match=r"spec\.generation\.kwargs are for engine Colocated"):
        evaluate_held_out(with_settings(plan, other), model)


@pytest.mark.parametrize("failures", [1, 1000])
def test_a_volume_that_fails_is_waited_for_as_long_as_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    success = Outcome(result=Result.SUCCEEDED)
    clock = SteppedClock()
    (tmp_path / "export").mkdir()

    def look(_: Path) -> Outcome:
        if len(clock.sleeps) < failures:
            raise OSError(ESTALE, "Stale file handle")
        return success

    monkeypatch.setattr(program, "last_success", look)
    monkeypatch.setattr(program, "SYSTEM_CLOCK", clock)
    if failures == 1:
        assert program.await_export(str(tmp_path), None, 60.0) == (tmp_path / "export", success)
        return
    with pytest.raises(Transient, match=r"after 60 s: the volume can't be read: .*Stale file"):
        program.await_export(str(tmp_path), None, 60.0)
