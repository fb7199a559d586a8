"""What is found in runs: every sick story within half of what is lost, nothing in healthy ones."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.findings.diagnosis import (
    RULES,
    Diagnosis,
    diagnose,
    finding_message,
    place_message,
    unseen_finding,
)
from grpo_api.findings.step_row import StepRow, step_row
from grpo_codegen.stories.logged_runs import (
    CHANGE,
    HEALTHY,
    SICK,
    STEPS,
    WELL,
    Line,
    Noisy,
    always,
    logged_steps,
    ramp,
)
from grpo_codegen.timelines import towards
from tests.generated import cases

SEEDS = range(cases(20, gate=1))


def rows(steps: list[dict[str, Any]]) -> list[StepRow]:
    """The rows of logged steps."""
    parsed = map(step_row, steps)
    return [row for row in parsed if row is not None]


def first_found(steps: list[dict[str, Any]]) -> dict[str, int]:
    """By finding, the step at which it was first there."""
    diagnosis = Diagnosis()
    found: dict[str, int] = {}
    for row in rows(steps):
        diagnosis.add(row)
        for finding in diagnosis.findings:
            found.setdefault(finding.finding, row.step)
    return found


@pytest.mark.parametrize("story", SICK)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_sick_run_is_named_and_stays_named(story: str, seed: int) -> None:
    name, lines = SICK[story]
    found = diagnose(rows(logged_steps(lines, seed)))
    assert name in [finding.finding for finding in found]
    assert all(len(finding_message(finding)) <= 300 for finding in found)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_around_a_limit_does_not_end_a_finding(seed: int) -> None:
    lines = {
        "completions/clipped_ratio": Noisy(always(0.55), 0.2),
        "reward": Noisy(always(0.3)),
    }
    steps = logged_steps(lines, seed)
    diagnosis = Diagnosis()
    begins = 0
    was_found = False
    for row in rows(steps):
        diagnosis.add(row)
        is_found = any(finding.finding == "Truncating" for finding in diagnosis.findings)
        begins += is_found and not was_found
        was_found = is_found
    assert begins == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_falling_reward_is_named_before_half_of_it_is_lost(seed: int) -> None:
    steps = logged_steps({"reward": Noisy(ramp(1.5, 0.1), 0.06)}, seed)
    half_lost = CHANGE + (200 - CHANGE) // 2
    assert first_found(steps)["RewardFalling"] < half_lost


@pytest.mark.parametrize("story", WELL)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_ever_found_in_a_healthy_run(story: str, seed: int) -> None:
    assert first_found(logged_steps(WELL[story], seed)) == {}


def test_nothing_is_found_in_a_long_healthy_run() -> None:
    assert first_found(logged_steps(steps=2000)) == {}


def test_a_finding_ends_when_the_run_is_well_again() -> None:
    def entropy(step: int) -> float:
        return 0.02 if 100 <= step < 150 else 0.6

    diagnosis = Diagnosis()
    active = []
    for row in rows(logged_steps({"entropy": Noisy(entropy)})):
        diagnosis.add(row)
        active.append(bool(diagnosis.findings))
    changes = [at for at in range(1, STEPS) if active[at] != active[at - 1]]
    assert len(changes) == 2, "it begins once and ends once"
    assert not active[-1]


def test_since_is_the_step_at_which_it_began() -> None:
    found = diagnose(rows(logged_steps({"entropy": Noisy(ramp(0.5, 0.02, CHANGE + 1))})))
    assert [finding.finding for finding in found] == ["EntropyCollapsed"]
    assert CHANGE <= found[0].since <= CHANGE + 10


def test_a_reward_without_any_value_is_found_at_once() -> None:
    silent = {"reward": math.nan, "rewards/accuracy/mean": math.nan}
    steps = logged_steps(steps=30)
    steps.append(steps[-1] | {"step": 31} | silent)
    found = diagnose(rows(steps))
    assert [(finding.finding, finding.since) for finding in found] == [("NoReward", 31)]
    without_key = {key: value for key, value in steps[0].items() if key != "reward"}
    assert diagnose(rows([without_key]))[0].finding == "NoReward"


def test_a_step_that_reuses_a_generation_has_rewards() -> None:
    """TRL logs rewards and lengths of a generation once, with the first step that uses it."""
    steps = logged_steps(steps=60)
    reused = [
        {"step": row["step"], "loss": row["loss"], "kl": row["kl"]} if row["step"] % 2 else row
        for row in steps
    ]
    assert first_found(reused) == {}


def test_a_finding_of_a_rank_says_where_it_is() -> None:
    steps = [{"step": step, "rank_seconds": [1.0, 2.0]} for step in range(1, 20)]
    (finding,) = diagnose(rows(steps))
    assert place_message(finding) == "rank 1"
    placed = finding.model_copy(update={"pod": "run-1-1-x7k2p", "node": "gpu-7"})
    assert place_message(placed) == "rank 1, pod run-1-1-x7k2p, node gpu-7"
    assert finding_message(placed).startswith("Straggler since step 5 (rank 1, timesMedian 2, ")
    assert finding_message(placed).endswith("pod run-1-1-x7k2p, node gpu-7)")
    assert place_message(unseen_finding(7)) == ""


def test_checkpoints_that_take_long_or_fail_are_found() -> None:
    def saving(seconds: float, failures: int) -> list[StepRow]:
        return rows(
            [
                row
                | {"checkpoint_step": min(row["step"], 290 if failures else STEPS) // 20 * 20}
                | {"checkpoint_seconds": seconds}
                | {"checkpoint_failures": failures * (row["step"] > 290)}
                for row in logged_steps()
            ]
        )

    assert [one.finding for one in diagnose(saving(900, 0))] == ["CheckpointSlow"]
    assert diagnose(saving(20, 0)) == []
    assert [one.finding for one in diagnose(saving(20, 1))] == ["CheckpointFailing"]


SAVES = st.lists(st.sampled_from(["sealed", "failed", "failed"]), min_size=1, max_size=6)


def saved_rows(attempts: list[list[str]], *, is_restarted: bool) -> list[StepRow]:
    """Rows of attempts that save in each step. A restarted attempt counts its failures anew, and
    logs the checkpoint that it begins with."""
    logged: list[dict[str, Any]] = []
    failures, sealed, announced = 0, 0, False
    for saves in attempts:
        if is_restarted:
            failures, announced = 0, False
        for save in (None, *saves):
            step = len(logged) + 1
            failures += save == "failed"
            row: dict[str, Any] = {"step": step, "loss": 0.1, "step_seconds": 100.0}
            row |= {"checkpoint_failures": failures} if failures else {}
            if save == "sealed":
                sealed, announced = step - 1, True
                row |= {"checkpoint_step": sealed, "checkpoint_seconds": 90.0}
            elif sealed and not announced:
                row, announced = row | {"checkpoint_step": sealed}, True
            logged.append(row)
    return rows(logged)


@given(attempts=st.lists(SAVES, min_size=1, max_size=4))
def test_checkpoints_are_judged_as_without_restarts(attempts: list[list[str]]) -> None:
    calm, restarted = Diagnosis(), Diagnosis()
    pairs = zip(
        saved_rows(attempts, is_restarted=False),
        saved_rows(attempts, is_restarted=True),
        strict=True,
    )
    for undisturbed, row in pairs:
        calm.add(undisturbed)
        restarted.add(row)
        assert [each.finding for each in restarted.findings] == [
            each.finding for each in calm.findings
        ]


def test_an_evaluation_that_falls_while_the_reward_rises_is_hacking() -> None:
    steps: list[dict[str, Any]] = []
    for row in logged_steps():
        steps.append(row)
        if row["step"] % 25 == 0:
            steps.append({"step": row["step"], "eval_reward": ramp(1.0, 0.3)(row["step"])})
    assert [one.finding for one in diagnose(rows(steps))] == ["RewardHacking"]
    well = [row for row in steps if "eval_reward" not in row or row["step"] <= CHANGE]
    assert diagnose(rows(well)) == []


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        (Noisy(always(0.9), 0.06), "RewardHacking"),
        (None, "RewardHacking"),
        (Noisy(ramp(0.9, 0.1, 120), 0.06), "RewardFalling"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_evaluation_that_collapses_is_named_whatever_the_reward_does(
    seed: int, reward: Noisy | None, found: str
) -> None:
    chance, lost = random.Random(seed), ramp(0.94, 0.09, 120)
    steps = logged_steps({"reward": reward}, seed, steps=150)
    for row in steps[4::5]:
        row["eval_reward"] = chance.gauss(lost(row["step"]), 0.03)
    at = first_found(steps)
    assert set(at) - {"NoReward"} == {found}
    assert CHANGE < at[found] < 105, "half of it is lost"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_evaluation_that_falls_slowly_is_named_before_half_of_it_is_lost(seed: int) -> None:
    """Evaluated so often that not every one is kept."""
    chance = random.Random(seed)
    steps: list[dict[str, Any]] = [
        {"step": step, "reward": chance.gauss(ramp(0.2, 0.9, 1000, 0)(step), 0.05)}
        | ({"eval_reward": chance.gauss(ramp(0.6, 0.2, 1000, 200)(step), 0.04)} if step % 3 else {})
        for step in range(1, 1001)
    ]
    assert 200 < first_found(steps)["RewardHacking"] < 600


@pytest.mark.parametrize("seed", SEEDS)
def test_an_evaluation_of_256_prompts_that_stands_still_is_no_hacking(seed: int) -> None:
    chance = random.Random(seed)
    steps = [
        row | ({"eval_reward": chance.gauss(0.5, 0.03)} if row["step"] % 25 == 0 else {})
        for row in logged_steps(seed=seed)
    ]
    assert first_found(steps) == {}


def few_prompts(seed: int, right: Line, prompts: int) -> list[dict[str, Any]]:
    """Steps with so few prompts, of very different difficulty; binary rewards of groups of 8."""
    chance = random.Random(seed)
    steps = logged_steps({"rewards/accuracy/mean": None, "rewards/format/mean": None}, seed)
    for row in steps:
        odds = right(row["step"])
        chances = [chance.betavariate(1.5 * odds, 1.5 * (1 - odds)) for _ in range(prompts)]
        counts = [sum(chance.random() < each for _ in range(8)) for each in chances]
        row["reward"] = sum(counts) / 8 / prompts
        row["frac_reward_zero_std"] = sum(count in (0, 8) for count in counts) / prompts
    return steps


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_of_few_prompts_that_stands_still_is_not_falling(seed: int, prompts: int) -> None:
    assert "RewardFalling" not in first_found(few_prompts(seed, always(0.5), prompts))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_falling_reward_of_few_prompts_is_named(seed: int) -> None:
    assert "RewardFalling" in first_found(few_prompts(seed, ramp(0.7, 0.1), 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_that_is_traded_off_mildly_is_not_hacked(seed: int) -> None:
    lines = {
        "rewards/format/mean": Noisy(ramp(0.5, 0.43, STEPS), 0.08),
        "rewards/accuracy/mean": Noisy(ramp(0.3, 1.1, STEPS), 0.08),
    }
    assert first_found(logged_steps(lines, seed)) == {}


@pytest.mark.parametrize("seed", [0, 1])
def test_what_another_reward_gained_before_a_fall_is_no_hacking(seed: int) -> None:
    lines = SICK["accuracy falls long after the format was learned"][1]
    assert set(first_found(logged_steps(lines, seed))) == {"RewardFalling"}


@pytest.mark.parametrize("seed", SEEDS)
def test_completions_that_are_all_cut_and_get_no_better_are_named(seed: int) -> None:
    cut = {f"completions/{key}_length": Noisy(always(512), 0) for key in ("mean", "min", "max")}
    cut |= {"completions/clipped_ratio": Noisy(always(1.0), 0), "reward": Noisy(always(0.3), 0.1)}
    assert first_found(logged_steps(cut, seed))["Truncating"] < STEPS / 4


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_completions_of_which_a_few_end_are_named_once_only_the_format_is_learned(
    seed: int,
) -> None:
    cut = {f"completions/{key}_length": Noisy(always(512), 0) for key in ("mean", "max")}
    cut |= {"completions/min_length": Noisy(lambda step: 512 if step % 7 else 490, 0)}
    cut |= {"completions/clipped_ratio": Noisy(always(0.99), 0)}
    cut |= {"reward": Noisy(towards(0.05, 0.25, 15), 0.2)}
    assert first_found(logged_steps(cut, seed))["Truncating"] < STEPS / 2


def test_rewards_that_are_missing_every_other_step_are_one_finding() -> None:
    active = []
    diagnosis = Diagnosis()
    for row in rows(logged_steps({"reward": Noisy(lambda step: math.nan if step % 2 else 1.0)})):
        diagnosis.add(row)
        active.append([finding.finding for finding in diagnosis.findings])
    assert active == [["NoReward"]] * STEPS


def test_gradients_that_are_no_numbers_every_other_step_are_named() -> None:
    def gradient(step: int) -> float:
        return math.nan if step > CHANGE and step % 2 else 0.6

    assert CHANGE < first_found(logged_steps({"grad_norm": Noisy(gradient)}))["StepsTooLarge"] < 80
    once = logged_steps({"grad_norm": Noisy(lambda step: math.nan if step == CHANGE else 0.6)})
    assert first_found(once) == {}


def test_completions_without_any_token_are_a_length_to_compare_with() -> None:
    steps = [
        {
            "step": step,
            "reward": 1.0,
            "rewards/old/mean": float(step <= 40),
            "rewards/new/mean": float(step > 40),
            "completion_length": 0.0,
        }
        for step in range(1, 80)
    ]
    assert [one.finding for one in diagnose(rows(steps))] == ["RewardHacking"]


@pytest.mark.parametrize(("gain", "found"), [(0.5, {}), (0.0, {"KLRising"})])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_gain_pays_for_a_kl_that_grows_slowly(
    seed: int, gain: float, found: set[str]
) -> None:
    """The rewards of eight prompts vary by more than is learned in a hundred steps."""
    chance = random.Random(seed)
    steps = [
        {"step": at, "reward": chance.gauss(0.3 + gain * at / 1000, 0.14), "kl": 0.0005 * at}
        for at in range(1, 1001)
    ]
    assert set(first_found(steps)) == set(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_kl_a_flat_reward_is_named_later(seed: int) -> None:
    flat = {**SICK["the policy does not move"][1], "kl": None}
    assert set(first_found(logged_steps(flat, seed, steps=240))) == set()
    assert set(first_found(logged_steps(flat, seed, steps=600))) == {"NotLearning"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_still_policy_is_learning_once_its_reward_rises(seed: int) -> None:
    late = {**SICK["the policy does not move"][1], "reward": Noisy(ramp(0.5, 1.5, 300, 200), 0.1)}
    steps = logged_steps(late, seed)
    assert first_found(steps)["NotLearning"] < 200
    assert diagnose(rows(steps)) == []


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_run_whose_rows_are_all_alike_has_no_signal(reward: float) -> None:
    row = {
        "reward": reward,
        "reward_std": 0.0,
        "frac_reward_zero_std": 1.0,
        "completions/mean_length": 200.0,
        "completions/min_length": 20.0,
        "completions/max_length": 400.0,
    }
    steps = [{"step": step, **row} for step in range(1, 101)]
    assert first_found(steps)["NoSignal"] < 50


def test_an_absolute_kl_counts_only_with_a_guard() -> None:
    steps = rows(logged_steps({"kl": Noisy(always(0.9))}))
    assert diagnose(steps) == []
    (finding,) = diagnose(steps, max_kl=1.0)
    assert finding.finding == "KLRising"


def test_steps_that_were_rolled_back_do_not_count() -> None:
    bad = logged_steps({"entropy": Noisy(ramp(0.5, 0.01, 70))}, steps=120)
    good = [row for row in logged_steps(steps=200) if row["step"] > 60]
    assert diagnose(rows(bad))
    assert diagnose(rows(bad + good)) == []
    # A restart that has not come as far again.
    assert diagnose(rows(bad + good[:40])) == []


@pytest.mark.parametrize("story", ["the reward falls", "answers reach the limit"])
def test_a_tracker_s_keys_and_the_operator_s_are_judged_as_trl_s(story: str) -> None:
    steps = logged_steps(SICK[story][1])
    wanted = diagnose(rows(steps))
    tracked = [{f"train/{key}": value for key, value in row.items()} for row in steps]
    text = [{key: str(value) for key, value in row.items()} for row in steps]
    ours = {"completions/clipped_ratio": "completion_clipped_ratio", "step_time": "step_seconds"}
    ours |= {"rewards/format/mean": "reward_by_function/format"}
    own = [{ours.get(key, key): value for key, value in row.items()} for row in steps]
    for same in (tracked, text, own):
        assert diagnose(rows(same)) == wanted


NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**400), 10**400)
VALUES = NUMBERS | st.text() | st.none() | st.booleans() | st.lists(NUMBERS, max_size=4)
KEYS = st.sampled_from(
    [*HEALTHY, "eval_reward", "rank_seconds", "checkpoint_step", "step", "rewards//mean"]
    + [f"rewards/{'long' * 60}{at}/mean" for at in range(2)]
)
DIRT = st.lists(st.dictionaries(KEYS | st.text(max_size=12), VALUES, max_size=12), max_size=60)


@given(steps=DIRT)
def test_whatever_is_logged_the_answer_is_readable(steps: list[dict[str, Any]]) -> None:
    numbered = [{"step": at, **row} for at, row in enumerate(steps)]
    for finding in diagnose(rows(numbered)):
        assert 0.5 <= finding.confidence <= 1
        assert all(math.isfinite(value) for value in finding.evidence.values())
        assert json.loads(finding.model_dump_json())["advice"]


def test_every_rule_says_what_it_judges_and_its_advice_is_short() -> None:
    for name, rule in RULES.items():
        assert rule.judge.__doc__, name
        assert len(rule.advice) <= 300
