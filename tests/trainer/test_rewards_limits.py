"""maxFailureShare, the limit of every kind of reward: what passes, what ends a run, and in whose
words.

A reward that never answers trains nothing, at full price.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result
from grpo_api.spec.rewards import JUDGED_GENERATIONS, RewardSpec
from grpo_trainer.rewards import http_service
from grpo_trainer.rewards.reward_base import RewardCounters, Scores
from grpo_trainer.rewards.reward_model import RewardModel
from grpo_trainer.rewards.reward_set import FailureLimits, ScoredCompletions, build_rewards
from grpo_trainer.runtime.errors import RewardError
from tests.generated import cases
from tests.support.ranks import demo_model
from tests.support.ranks.pods import Gang, json_lines
from tests.trainer.test_worker import make_plan
from tests.virtual_time import virtually


def ended_after(
    lost: list[int], limit: float, size: int = 8, steps: int | None = None
) -> int | None:
    """The generation after which a run ends in which each lost so many of its `size` completions;
    None: never."""
    limits = FailureLimits({"judge": RewardCounters(last_problem="HTTP 500")}, {"judge": limit})
    total = steps or len(lost)
    for step in range(1, len(lost) + 1):
        try:
            limits.judge(
                step,
                ScoredCompletions(size * step, {"judge": sum(lost[:step])}),
                is_last=step == total,
            )
        except RewardError:
            return step
    return None


def test_one_generation_may_be_lost_whole_and_a_second_one_soon_after_may_not() -> None:
    assert ended_after([8, 8], 0.1, steps=100) == 2
    assert ended_after([0, 8] + [0] * 9 + [8], 0.1, steps=100) is None
    assert ended_after([0, 8] + [0] * 8 + [8], 0.1, steps=100) == 11
    assert ended_after([1], 0.0, steps=100) == 1
    assert ended_after([8] * 30, 1.0) is None


def test_a_run_shorter_than_the_window_is_judged_whole_at_its_end() -> None:
    assert ended_after([8], 0.1) == 1
    assert ended_after([8, 0, 0], 0.1) == 3
    assert ended_after([8, 0, 0], 0.4) is None
    assert ended_after([1, 0, 0], 0.1) is None


@settings(max_examples=cases(200))
@given(
    lost=st.lists(st.lists(st.integers(0, 8), min_size=3, max_size=3), min_size=1, max_size=40),
    limit=st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 1.0]) | st.floats(0, 1),
    steps_per_generation=st.integers(1, 3),
)
@example(lost=[[8, 8, 8]], limit=0.1, steps_per_generation=1)
def test_the_share_is_that_of_the_last_generations_of_all_ranks(
    lost: list[list[int]], limit: float, steps_per_generation: int
) -> None:
    """Three ranks, which see the same sums: each ends, or goes on, by itself, as the definition
    says."""
    counters = {"judge": RewardCounters(last_problem="HTTP 500"), "format": RewardCounters()}
    ranks = [FailureLimits(counters, {"judge": limit, "format": 0.0}) for _ in lost[0]]
    steps = len(lost) * steps_per_generation
    for step in range(1, steps + 1):
        made = lost[: (step - 1) // steps_per_generation + 1]
        missing = sum(map(sum, made))
        window = made[-JUDGED_GENERATIONS:]
        judged = len(window) if step == steps else JUDGED_GENERATIONS
        exceeded = sum(map(sum, window)) / (judged * 8 * len(ranks)) > limit
        for rank in ranks:
            scored = ScoredCompletions(len(made) * 8 * len(ranks), {"judge": missing, "format": 0})
            if exceeded:
                with pytest.raises(
                    RewardError, match=rf"reward 'judge', step {step}: .*The last failure: HTTP 500"
                ):
                    rank.judge(step, scored, is_last=step == steps)
            else:
                rank.judge(step, scored, is_last=step == steps)
        if exceeded:
            return


MODULE = """
import time

def hangs(completions, **kwargs):
    time.sleep(600)

def opinionless(completions, **kwargs):
    return [None] * len(completions)
"""
LETTERS = "a" * 60 + "b"
TOWER = "9^{9^{9^{9}}}"


def broken(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """A reward of each kind that never scores, and what its error must say."""
    function = {"configMap": {"name": "mine"}, "timeoutSeconds": 1}
    return {
        "format": (
            {"format": {"pattern": r"(a|aa)+", "batchTimeoutSeconds": 1}},
            "a completion took longer than|batch",
        ),
        "accuracy": (
            {"accuracy": {"compare": "Math", "extract": "None", "timeoutSeconds": 1}},
            "math-verify: a completion took longer than timeoutSeconds = 1",
        ),
        "python": (
            {"python": {"function": "mine:hangs", **function}},
            "mine:hangs did not return within timeoutSeconds = 1",
        ),
        "http": (
            {"http": {"url": "http://127.0.0.1:9/"}},
            (
                "http://127.0.0.1:9/: no answer within batchTimeoutSeconds = [0-9]+; the last try: "
                "ClientConnectorError"
            ),
        ),
        "model": ({"model": {"name": str(folder / "judge")}}, r"a logit of .*judge is nan"),
    }


async def refused(*_: Any) -> Scores:
    """What a port without a listener does to each try."""
    raise http_service._Passing("ClientConnectorError: Connection refused")


def scores_of(function: Any, completion: str) -> Scores:
    """One completion's score, as TRL asks for it."""
    if isinstance(function, RewardModel):
        logits = function(**function.tokenizer([completion], return_tensors="pt")).logits[:, 0]
        return [None if logit.isnan() else logit.item() for logit in logits]
    arguments = {
        "prompts": ["p"],
        "completions": [completion],
        "completion_ids": [[1]],
        "answer": ["1"],
    }
    if inspect.iscoroutinefunction(type(function).__call__):
        vars(function)["_post"] = refused
        return virtually(function(**arguments))
    scores: Scores = function(**arguments)
    return scores


@pytest.mark.realtime
@pytest.mark.parametrize("kind", ["format", "accuracy", "python", "http", "model"])
def test_a_reward_that_never_scores_ends_the_run_in_its_last_failure_s_words(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "mine.py").write_text(MODULE)
    if kind == "model":
        demo_model.save_reward_model(tmp_path / "judge")
    spec, words = broken(tmp_path)[kind]
    rewards = build_rewards([RewardSpec.model_validate({"name": "mine", **spec})], root=tmp_path)
    try:
        (function,) = rewards.functions
        if isinstance(function, RewardModel):
            function.model.get_parameter("score.weight").data.fill_(torch.nan)
        assert scores_of(function, LETTERS if kind == "format" else TOWER) == [None]
    finally:
        rewards.close()
    counters = rewards.counters["mine"]
    lost = counters.failures + counters.timeouts
    assert lost == 1
    with pytest.raises(
        RewardError,
        match=rf"reward 'mine', step 1: 1 of the 1 completions .*100.0%.*10.0%.*{words}",
    ):
        rewards.failure_limits.judge(1, ScoredCompletions(1, {"mine": lost}), is_last=True)


@pytest.mark.realtime
def test_no_opinion_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "mine.py").write_text(MODULE)
    spec = {"python": {"function": "mine:opinionless", "configMap": {"name": "mine"}}}
    rewards = build_rewards([RewardSpec.model_validate(spec)], root=tmp_path)
    try:
        assert scores_of(rewards.functions[0], "a") == [None]
    finally:
        rewards.close()
    assert rewards.counters["python"] == RewardCounters()


@pytest.mark.realtime
def test_a_function_that_can_t_be_started_again_is_no_bad_input(tmp_path: Path) -> None:
    """It was imported when the run began: what keeps it away now may pass, and a restart may
    help."""
    (tmp_path / "0").mkdir()
    module = tmp_path / "0" / "mine.py"
    module.write_text(MODULE)
    spec = {
        "python": {"function": "mine:hangs", "configMap": {"name": "mine"}, "timeoutSeconds": 1}
    }
    rewards = build_rewards([RewardSpec.model_validate(spec)], root=tmp_path)
    try:
        module.unlink()
        assert scores_of(rewards.functions[0], "a") == [None]
        with pytest.raises(
            RewardError,
            match=r"mine:hangs failed: its process could not be started again: .*No module",
        ):
            scores_of(rewards.functions[0], "a")
    finally:
        rewards.close()


LATE_SECONDS = 10


def late_plan(folder: Path, model: Path, share: float) -> TrainingPlan:
    """Two pods, a generation per step, and a function beside the `format` reward that comes too
    late where told.

    `share`: the function's maxFailureShare.
    """
    plan = make_plan(folder, model, is_tracked=False)
    function = {"function": "tests.trainer.late_reward:score", "timeoutSeconds": LATE_SECONDS}
    late = RewardSpec.model_validate({"name": "late", "maxFailureShare": share, "python": function})
    execution = plan.execution.model_copy(
        update={"gradient_accumulation": 2, "steps_per_generation": 2}
    )
    return plan.model_copy(
        update={
            "rewards": [*plan.rewards, late],
            "execution": execution,
            "checkpoint_directory": None,
            "export": None,
        }
    )


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("share", "step", "says"),
    [
        (
            0.0,
            2,
            "reward 'late', step 2: 8 of the 32 completions of 2 generations, all ranks together, "
            "got no reward: "
            "5.0% of 10 generations, more than its maxFailureShare, 0.0%",
        ),
        pytest.param(
            0.1,
            7,
            "reward 'late', step 7: 24 of the 112 completions of 7 generations, all ranks "
            "together, got no reward: "
            "15.0% of 10 generations, more than its maxFailureShare, 10.0%",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["none may be late", "three are too many"],
)
def test_a_gang_outlives_late_batches_until_they_are_too_many(
    tmp_path: Path, share: float, step: int, says: str
) -> None:
    """Half a generation each time, on one rank, and all ranks end alike. What became of the data is
    told."""
    prompts = [*(f"say {number % 10}" for number in range(63)), "x" * 600]
    (tmp_path / "problems.jsonl").write_text(
        "".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts)
    )
    model = demo_model.save_policy(tmp_path / "model")
    with Gang(late_plan(tmp_path, model, share), tmp_path, tmp_path / "pods") as gang:
        codes, outcomes, log = gang.wait(), [gang.outcome(0), gang.outcome(1)], gang.log()
    assert codes == [45, 45]
    for outcome in outcomes:
        assert (outcome.result, outcome.step) == (Result.REWARD_ERROR, step)
        assert says in outcome.message
        assert f"did not return within timeoutSeconds = {LATE_SECONDS}" in outcome.message
    assert json_lines(log, "prompts") == {
        63: {"prompts": 63, "prompts_dropped": 1, "prompts_duplicate": 53}
    }
    assert max(json_lines(log, "step")) == step - 1, (
        "the step that is judged is not told as finished well"
    )
