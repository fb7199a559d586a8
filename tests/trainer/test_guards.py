"""Guards that end a run by what its steps log: generations without a reward, and findings."""

from typing import Any, cast

import pytest
from transformers import TrainerState

from grpo_api.report.report import Finding, Result
from grpo_api.report.root_cause import PERMANENT
from grpo_api.spec.run_policy import GuardSpec
from grpo_trainer.runtime.errors import RewardError, StoppedOnFinding, classify_error
from grpo_trainer.training.guard import FindingGuard, RewardGuard
from grpo_trainer.weights.models import load_policy
from tests.support.ranks import demo_model, runs

SILENT = {"loss": 0.0, "reward": None, "completions/mean_length": 8.0}
SCORED = SILENT | {"reward": 0.0}
REUSED = {"loss": 0.0, "kl": 0.1}
"""What TRL logs of a step that reuses a generation."""


def follow(steps: list[dict[str, Any]], history: list[dict[str, Any]] | None = None) -> int:
    """Steps that are logged until the guard ends the run; all of them where it doesn't."""
    guard = RewardGuard(["accuracy", "format"])
    before = history or []
    guard.on_train_begin(cast(Any, None), TrainerState(log_history=before), cast(Any, None))
    for count, logs in enumerate(steps, 1):
        state = TrainerState(global_step=len(before) + count)
        try:
            guard.on_log(cast(Any, None), state, cast(Any, None), logs=logs)
        except RewardError:
            return count
    return len(steps)


def test_three_generations_without_a_reward_end_the_run() -> None:
    assert follow([SCORED, SILENT, SILENT, SILENT, SILENT]) == 4
    assert follow([SILENT, REUSED, SILENT, REUSED, SILENT, REUSED]) == 5
    assert follow([SILENT, SILENT, SCORED] * 4) == 12
    assert follow([{"train_runtime": 9.0}, REUSED] * 4) == 8, "no generation"


def test_a_restart_does_not_forgive_silent_generations() -> None:
    history = [row | {"step": at} for at, row in enumerate([SCORED, SILENT, SILENT], 1)]
    assert follow([SILENT], [*history]) == 1
    guard = RewardGuard(["mine"])
    guard.on_train_begin(cast(Any, None), TrainerState(log_history=history), cast(Any, None))
    with pytest.raises(RewardError, match="since step 2, in 3 generations: none of mine"):
        guard.on_log(
            cast(Any, None), TrainerState(global_step=4), cast(Any, None), logs=dict(SILENT)
        )


def test_names_that_are_long_are_cut() -> None:
    guard = RewardGuard([f"reward-{at}" * 8 for at in range(9)])
    for step in (1, 2):
        guard.on_log(cast(Any, None), TrainerState(global_step=step), cast(Any, None), logs=SILENT)
    with pytest.raises(RewardError) as end:
        guard.on_log(cast(Any, None), TrainerState(global_step=3), cast(Any, None), logs=SILENT)
    assert len(str(end.value)) <= 300


@pytest.mark.realtime
def test_trl_s_logs_of_silent_rewards_end_a_run(tmp_path: Any) -> None:
    def silent(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    job = runs.plan(demo_model.save_policy(tmp_path / "model"), training={"maxSteps": 6})
    config = runs.configuration(job, output_dir=str(tmp_path / "output"), save_strategy="no")
    loaded = load_policy(job.model, job.execution, job.adapter)
    trainer = runs.trainer(job, config, loaded, RewardGuard(["silent"]), rewards=silent)
    with pytest.raises(RewardError, match="since step 1, in 3 generations: none of silent"):
        trainer.train()
    assert trainer.state.global_step == 3
    runs.reset()


def test_a_finding_of_stop_on_ends_the_run_for_good() -> None:
    advice = "The task is solved: stop, or take harder prompts."
    found = [
        Finding(finding="Truncating", since=30, confidence=0.7),
        Finding(finding="NoSignal", since=40, confidence=0.9, advice=advice),
    ]

    def log(stop_on: list[str], logs: dict[str, Any]) -> None:
        guard = GuardSpec.model_validate({"stopOn": stop_on})
        state = TrainerState(global_step=50)
        callback = FindingGuard(guard, lambda: found)
        callback.on_log(cast(Any, None), state, cast(Any, None), logs=logs)

    log([], {"loss": 0.1})
    log(["EntropyCollapsed"], {"loss": 0.1})
    log(["NoSignal"], {"train_runtime": 9.0})
    with pytest.raises(StoppedOnFinding) as end:
        log(["EntropyCollapsed", "NoSignal"], {"loss": 0.1})
    assert str(end.value) == f"guard.stopOn: NoSignal since step 40. {advice}"
    assert classify_error(end.value)[0] is Result.STOPPED_ON_FINDING
    assert Result.STOPPED_ON_FINDING in PERMANENT
