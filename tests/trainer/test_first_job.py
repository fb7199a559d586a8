"""The first example is a healthy run: its reward rises over all its steps, at a small KL and with
few idle groups.

A newcomer sees this run first, and takes its curves for what a run should look like.
"""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.prepare import make_files
from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.quickstart import (
    LARGEST,
    PROBLEMS,
    RIGHT_SHARE,
    make_model,
    make_tokenizer,
    pretrain,
    right_chance,
    write_problems,
)
from harness.controlplane import free_port
from tests.support.ranks import runs
from tests.support.ranks.pods import Gang
from tests.trainer.example_jobs import example

PODS = 2
STEPS = 100


def first_job(files: Path, seed: int | None = None) -> TrainingPlan:
    """The example's plan on two CPU nodes with one process each."""
    spec, _ = example("01-first-job.yaml")
    training = spec.training if seed is None else spec.training.model_copy(update={"seed": seed})
    completions = training.prompts_per_step * training.num_generations
    execution = {"nodes": PODS, "microBatch": completions // PODS, "saveEverySteps": 1000}
    plan = runs.plan(files / "model", execution=execution)
    return plan.model_copy(
        update={
            "rendezvous": plan.rendezvous.model_copy(update={"port": free_port()}),
            "training": training,
            "rewards": spec.rewards,
            "dataset": spec.dataset,
        }
    )


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What rank 0 logged of each step."""
    files = make_files()
    with Gang(first_job(files), files, tmp_path_factory.mktemp("first-job") / "pods") as gang:
        assert gang.wait() == [0] * PODS, gang.log()[-4000:]
        logged = gang.steps()
    return [logged[step] for step in range(1, STEPS + 1)]


def rewards(steps: list[dict[str, Any]], first: int, last: int) -> float:
    """The mean reward of these steps, counted from 1."""
    return mean(float(step["reward"]) for step in steps[first - 1 : last])


@pytest.mark.slow
@pytest.mark.realtime
def test_the_reward_starts_low_still_rises_after_60_steps_and_ends_high(
    steps: list[dict[str, Any]],
) -> None:
    assert rewards(steps, 1, 5) < 0.4
    assert rewards(steps, 81, 100) > rewards(steps, 51, 60) + 0.02
    assert rewards(steps, 96, 100) >= 0.85


@pytest.mark.slow
@pytest.mark.realtime
def test_kl_stays_small_and_most_groups_give_a_signal(steps: list[dict[str, Any]]) -> None:
    assert max(step["kl"] for step in steps) < 0.1
    assert mean(step["zero_variance_groups"] for step in steps) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_every_seed_makes_a_model_that_is_right_as_often(seed: int) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    pretrain(model, tokenizer, seed)
    guessed_right = (1 - RIGHT_SHARE) / (LARGEST + 1)
    assert right_chance(model, tokenizer) == pytest.approx(RIGHT_SHARE + guessed_right, abs=0.05)


@given(seed=st.integers(min_value=0))
def test_the_answers_are_right_sums_in_the_asked_form(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("problems") / "arithmetic.jsonl"
    write_problems(path, 8, seed)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        (message,) = row["prompt"]
        sum_in_words = re.fullmatch(r"(\d) (plus|minus) (\d) is (\d)\.\n#### (\d)", row["answer"])
        assert sum_in_words, row
        first, name, second, *results = sum_in_words.groups()
        sign = 1 if name == "plus" else -1
        assert {int(result) for result in results} == {int(first) + sign * int(second)}
        assert message == {"role": "user", "content": f"{first}{'+' if sign > 0 else '-'}{second}"}


def test_the_problems_are_all_sums_of_digits_with_a_digit_as_result() -> None:
    assert len({question for question, _ in PROBLEMS}) == len(PROBLEMS)
    sums = {(first, second) for first in range(10) for second in range(10)}
    expected = {
        f"{first}+{second}": first + second for first, second in sums if first + second <= LARGEST
    }
    expected |= {f"{first}-{second}": first - second for first, second in sums if first >= second}
    assert dict(PROBLEMS) == expected
