"""What is found in runs of small batches: what they learn in a hundred steps is less than the noise
of one, and some programs log a generation again in every step that reuses it."""

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from grpo_api.findings.diagnosis import diagnose
from grpo_codegen.stories.finding_runs import lost_share
from grpo_codegen.stories.logged_runs import SICK, Line, always, logged_steps, ramp
from grpo_codegen.timelines import towards
from tests.unit.test_findings import SEEDS, first_found, rows

GENERATED = ("reward", "reward_std", "frac_reward_zero_std")
"""What TRL logs once of a generation, beside all of its rewards and completions."""
STILL: dict[str, Line] = {"entropy": always(0.5), "completions/mean_length": always(300)}


def learned(first: float, last: float, steps: int) -> Line:
    """A share of right answers that grows as long as the run lasts."""
    return ramp(first, last, steps, 0)


def batches(
    seed: int, right: Line, beside: Mapping[str, Line], *, prompts: int = 8, steps: int = 600
) -> list[dict[str, Any]]:
    """Steps of groups of eight answers, right or wrong, to prompts of different difficulty; and
    other lines `beside`, with 6 % of noise."""
    chance = random.Random(seed)
    logged = []
    for step in range(1, steps + 1):
        odds = right(step)
        chances = [chance.betavariate(2 * odds, 2 * (1 - odds)) for _ in range(prompts)]
        counts = [sum(chance.random() < each for _ in range(8)) for each in chances]
        accuracy = sum(counts) / 8 / prompts
        others = {key: line(step) * chance.gauss(1, 0.06) for key, line in beside.items()}
        row: dict[str, Any] = {"step": step, "reward": accuracy, "rewards/accuracy/mean": accuracy}
        spreads = [math.sqrt(count * (8 - count) / 56) for count in counts]
        row["reward_std"] = sum(spreads) / prompts
        row["frac_reward_zero_std"] = sum(count in (0, 8) for count in counts) / prompts
        logged.append(row | others)
    return logged


def reused(steps: list[dict[str, Any]], passes: int, *, is_repeated: bool) -> list[dict[str, Any]]:
    """Each generation used in so many steps, which log it again or not, as TRL."""
    logged = []
    for generation in steps:
        of_step = {
            key: generation[key]
            for key in generation
            if key not in GENERATED and not key.startswith(("rewards/", "completions/"))
        }
        for at in range(passes):
            row = generation if is_repeated or not at else of_step
            logged.append(row | {"step": generation["step"] * passes + at})
    return logged


def means(steps: list[dict[str, Any]], size: int = 10) -> list[dict[str, Any]]:
    """The steps as TRL logs them with its default: a row for each ten."""
    groups = [steps[end - size : end] for end in range(size, len(steps) + 1, size)]
    return [
        {key: sum(row[key] for row in group) / size for key in group[0]}
        | {"step": group[-1]["step"]}
        for group in groups
    ]


@pytest.mark.parametrize("story", ["plain", "the reward falls", "nine of ten groups are dead"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_generation_that_is_logged_in_each_of_its_steps_counts_once(
    seed: int, story: str
) -> None:
    steps = logged_steps(SICK[story][1] if story in SICK else {}, seed, steps=130)
    repeated, once = (reused(steps, 3, is_repeated=each) for each in (True, False))
    assert first_found(repeated) == first_found(once)


def waiting(seconds: float, passes: int, *, has_zeros: bool) -> list[dict[str, Any]]:
    """Generations of 60 s and so many of rewards, each used in steps of 10 s; the others wait for 0
    s, or log no wait, as TRL."""
    steps = reused(logged_steps(steps=40), passes, is_repeated=False)
    for row in steps:
        del row["phase_seconds/reward"]
        is_generation = "reward" in row
        row["step_time"] = 10 + (60 + seconds) * is_generation
        if has_zeros or is_generation:
            row["phase_seconds/reward"] = seconds * is_generation
    return steps


@pytest.mark.parametrize("passes", [1, 2, 3, 8])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_rewards_of_a_generation_are_waited_for_once_in_all_of_its_steps(
    passes: int, has_zeros: bool
) -> None:
    assert first_found(waiting(20, passes, has_zeros=has_zeros)) == {}
    found = first_found(waiting(300, passes, has_zeros=has_zeros))
    assert set(found) == {"WaitingForRewards"}
    assert found["WaitingForRewards"] < 20 * passes


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_gain_of_a_policy_that_moves_is_no_standstill(seed: int) -> None:
    right = learned(0.45, 0.55, 600)
    entropy = {**STILL, "entropy": towards(0.5, 0.3, 400)}
    length = {**STILL, "completions/mean_length": towards(300, 420, 400)}
    assert "NotLearning" in first_found(batches(seed, always(0.5), STILL, prompts=2))
    for beside in (entropy, length):
        assert first_found(batches(seed, right, beside, prompts=2)) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_is_not_still_before_the_end_of_its_warm_up(seed: int) -> None:
    rate = ramp(0, 1e-6, 200, 0)
    still = batches(seed, always(0.5), {**STILL, "kl": ramp(0, 1e-5, 600, 0)})
    late = batches(seed, ramp(0.4, 0.7, 600, 180), {**STILL, "kl": ramp(0, 0.02, 600, 120)})
    for row in still + late:
        row["learning_rate"] = rate(row["step"])
    assert 350 < first_found(still)["NotLearning"] < 500
    assert first_found(late) == {}


@pytest.mark.parametrize("prompts", [3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_of_few_prompts_that_rose_and_fell_has_risen(seed: int, prompts: int) -> None:
    right = lambda step: min(0.2 + step / 100, 0.8 - step / 1000)  # noqa: E731
    steps = batches(seed, right, STILL, prompts=prompts)
    assert "NotLearning" not in first_found(steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_length_that_grows_sixteenfold_with_the_reward_is_no_explosion(seed: int) -> None:
    beside = {"completions/mean_length": ramp(500, 8000, 2000, 0)}
    assert first_found(batches(seed, towards(0.15, 0.7, 700), beside, steps=2000)) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_that_vary_by_factors_and_double_are_no_leap(seed: int) -> None:
    chance = random.Random(seed)
    steps = [
        {"step": step, "loss": 0.1, "grad_norm": (2 + step / 200) * chance.lognormvariate(0, 0.6)}
        for step in range(1, 401)
    ]
    assert first_found(steps) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kl_that_grows_before_its_gain_can_be_told_from_noise_is_no_drift(seed: int) -> None:
    beside = {**STILL, "kl": ramp(0.001, 0.5, 1000, 0)}
    assert first_found(batches(seed, learned(0.3, 0.6, 1000), beside, steps=1000)) == {}


@pytest.mark.parametrize("seed", [1, 5])
def test_a_kl_that_a_small_beta_lets_grow_while_the_reward_rises_slowly_is_no_drift(
    seed: int,
) -> None:
    """It is above 0.2 before ten prompts a step show the gain."""
    kl = lambda step: 0.001 + 1.2 * (1 - math.exp(-step / 250)) ** 1.2  # noqa: E731
    beside = {**STILL, "kl": kl}
    assert first_found(batches(seed, towards(0.4, 0.7, 200), beside, prompts=10, steps=160)) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_accuracy_that_is_given_for_another_reward_is_named_in_time(
    seed: int,
) -> None:
    right = ramp(0.6, 0.1, 750, 150)
    steps = batches(
        seed, right, {"rewards/style/mean": ramp(0.1, 0.9, 750, 100)}, prompts=4, steps=700
    )
    for row in steps:
        row["reward"] += row["rewards/style/mean"]
    half_lost = 669  # of what a run of 900 steps loses
    assert first_found(steps)["RewardHacking"] < half_lost


@pytest.mark.parametrize("prompts", [8, 32])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_length_and_a_kl_that_grow_at_once_with_the_reward_are_paid_for(
    seed: int, prompts: int
) -> None:
    """They have trebled before so few rewards can show a gain."""
    beside = {
        "entropy": always(0.5),
        "completions/mean_length": ramp(500, 1500, 60, 0),
        "kl": ramp(0.002, 0.4, 60, 0),
    }
    right = learned(0.3, 0.55, 60)
    assert first_found(batches(seed, right, beside, prompts=prompts, steps=120)) == {}


@pytest.mark.parametrize("grown", ["completions/mean_length", "kl"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_not_paid_for_is_named_before_half_is_lost(seed: int, grown: str) -> None:
    lines = {"completions/mean_length": ramp(300, 1500, 200), "kl": ramp(0.02, 1.5, 260)}
    beside = {**STILL, grown: lines[grown]}
    steps = batches(seed, always(0.5), beside, prompts=16, steps=260)
    name = "KLRising" if grown == "kl" else "LengthExploding"
    at = first_found(steps)[name]
    assert lost_share(steps, lambda step: -float(step[grown]), at) < 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_an_entropy_that_collapses_in_a_third_of_a_short_run_is_named_at_once(seed: int) -> None:
    steps = batches(seed, always(0.5), {"entropy": ramp(0.9, 0.01, 40, 20)}, steps=50)
    assert first_found(steps)["EntropyCollapsed"] < 46


@pytest.mark.parametrize("seed", SEEDS)
def test_reasoning_that_doubles_half_a_hundred_steps_before_more_is_right_is_no_finding(
    seed: int,
) -> None:
    beside = {"entropy": always(0.5), "completions/mean_length": ramp(350, 900, 130, 80)}
    right = lambda step: 0.3 + max(0.0, learned(0.0, 0.35, 80)(step - 110))  # noqa: E731
    steps = batches(seed, right, beside, prompts=16, steps=260)
    assert "LengthExploding" not in first_found(steps)


def gained_and_lost(step: int) -> float:
    """What is learned in 100 steps, and lost in the next 150."""
    return min(ramp(0.45, 0.6, 100, 0)(step), ramp(0.6, 0.45, 250, 100)(step))


def of_trl_1_16(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with the standard deviation of all completions, which newer TRL logs."""
    for row in steps:
        accuracy = row["rewards/accuracy/mean"]
        row["reward_std"] = math.sqrt(accuracy * (1 - accuracy))
    return steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_gain_that_is_lost_again_is_named_before_half_of_it_is_lost(seed: int) -> None:
    steps = of_trl_1_16(batches(seed, gained_and_lost, STILL, prompts=256, steps=250))
    at = first_found(steps)["RewardFalling"]
    assert lost_share(steps, lambda step: float(step["reward"]), at) < 0.5
    beside = {**STILL, "rewards/style/mean": ramp(0.2, 0.9, 250, 100)}
    gamed = of_trl_1_16(batches(seed, gained_and_lost, beside, prompts=256, steps=250))
    for row in gamed:
        row["reward"] += row["rewards/style/mean"]
    at = first_found(gamed)["RewardHacking"]
    assert lost_share(gamed, lambda step: float(step["rewards/accuracy/mean"]), at) < 0.5
    learned_still = batches(seed, learned(0.45, 0.6, 250), STILL, prompts=256, steps=250)
    at = first_found(evaluated(seed, learned_still, gained_and_lost))["RewardHacking"]
    assert 100 < at < 206, "half of it is lost"


def penalised(
    seed: int, accuracy: Line, overlong: Line, length: Line, style: Line
) -> list[dict[str, Any]]:
    """Steps of 64 prompts with three rewards, all of weight 1."""
    beside = {
        "rewards/accuracy/mean": accuracy,
        "rewards/overlong/mean": overlong,
        "rewards/style/mean": style,
        "completions/mean_length": length,
    }
    steps = batches(seed, always(0.5), beside, prompts=1, steps=200)
    for row in steps:
        row["reward"] = sum(row[key] for key in beside if key.startswith("rewards/"))
        row["reward_std"], row["frac_reward_zero_std"] = 0.4, 0.2
    return steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_penalty_on_length_may_grow_by_what_the_other_rewards_gain(seed: int) -> None:
    longer = ramp(400, 800, 150, 20)
    right, style = ramp(0.5, 0.75, 150, 20), always(0.5)
    assert first_found(penalised(seed, right, ramp(-0.03, -0.18, 150, 20), longer, style)) == {}
    costly = penalised(seed, right, ramp(-0.03, -0.45, 150, 20), longer, style)
    for row in costly:  # The penalty's weight is 0.3.
        row["reward"] -= 0.7 * row["rewards/overlong/mean"]
    assert first_found(costly) == {}
    lost = ramp(-0.25, -0.9, 150, 40)
    for length in (always(400), longer):
        learned_first = lambda step: min(ramp(-0.7, -0.25, 30, 0)(step), lost(step))  # noqa: E731
        steps = penalised(seed, learned_first, always(0.0), length, ramp(0.1, 0.9, 150, 40))
        assert first_found(steps)["RewardHacking"] < 150


@pytest.mark.parametrize("seed", SEEDS)
def test_a_penalty_that_grows_with_longer_answers_is_no_game_if_more_are_right_or_the_sum_falls(
    seed: int,
) -> None:
    right, style = ramp(0.3, 0.55, 150, 20), always(0.5)
    overlong = lambda step: min(ramp(-0.2, -0.05, 20, 0)(step), ramp(-0.05, -0.2, 150, 20)(step))  # noqa: E731
    dip = lambda step: max(ramp(600, 400, 20, 0)(step), ramp(400, 800, 150, 20)(step))  # noqa: E731
    assert first_found(penalised(seed, right, overlong, dip, style)) == {}
    longer, costly = ramp(400, 730, 150, 20), ramp(-0.03, -0.5, 150, 50)
    assert set(first_found(penalised(seed, right, costly, longer, style))) == {"RewardFalling"}


def evaluated(seed: int, steps: list[dict[str, Any]], score: Line) -> list[dict[str, Any]]:
    """The steps with an evaluation of thousands of prompts in each fifth."""
    chance = random.Random(seed)
    return [
        row if row["step"] % 5 else {**row, "eval_reward": chance.gauss(score(row["step"]), 0.01)}
        for row in steps
    ]


@pytest.mark.parametrize(
    ("beside", "right", "found"),
    [
        ({"completions/mean_length": ramp(300, 1200, 200)}, always(0.5), "LengthExploding"),
        ({"kl": ramp(0.02, 1.5, 260)}, always(0.5), "KLRising"),
        ({}, ramp(0.75, 0.45, 150, 140), "RewardFalling"),
        ({}, always(0.4), "NotLearning"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_evaluation_that_rises_shows_what_harder_prompts_hide(
    seed: int, beside: dict[str, Line], right: Line, found: str
) -> None:
    steps = batches(seed, right, {**STILL, **beside}, prompts=24, steps=300)
    assert found in first_found(evaluated(seed, steps, always(0.4)))
    assert first_found(evaluated(seed, steps, ramp(0.3, 0.7, 260, 0))) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_accuracy_that_is_half_lost_is_named_without_a_kl_and_at_the_same_length(
    seed: int,
) -> None:
    right = lambda step: min(towards(0.7, 0.85, 30)(step), ramp(0.85, 0.4, 165, 90)(step))  # noqa: E731
    beside = {**STILL, "rewards/style/mean": ramp(0.2, 0.9, 165, 90)}
    steps = batches(seed, right, beside, prompts=24, steps=220)
    for row in steps:
        row["reward"] += row["rewards/style/mean"]
    assert 90 < first_found(steps)["RewardHacking"] < 150


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("accuracy_reward", {"NoSignal": 40 + 4}),
        ("correctness_reward_func", {"NoSignal": 40 + 4}),
        ("equation_reward_func", {"NoSignal": 40 + 4}),
        ("answer_reward", {"NoSignal": 40 + 4}),
        ("incorrect_format", {}),
        ("answer_format", {}),
        ("no_answer", {}),
        ("repetition_penalty", {}),
    ],
)
def test_a_reward_for_right_answers_that_never_pays_is_named_and_a_penalty_that_is_never_due_not(
    name: str, found: dict[str, int]
) -> None:
    steps = [
        {**row, "rewards/format/mean": row["reward"], f"rewards/{name}/mean": 0.0}
        for row in batches(0, towards(0.2, 0.9, 40), STILL, steps=100)
    ]
    for row in steps:
        del row["rewards/accuracy/mean"]
    assert first_found(steps) == found
    for row in steps[::30]:
        row[f"rewards/{name}/mean"] = 1 / 64
    assert first_found(steps) == {}


@pytest.mark.parametrize(
    ("right", "is_solved"),
    [(always(0.01), 0.0), (always(0.99), 1.0), (ramp(0.5, 0.99, 60, 0), 1.0)],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_dead_groups_are_solved_where_the_answers_are_right(
    seed: int, right: Line, is_solved: float
) -> None:
    (finding,) = diagnose(rows(batches(seed, right, STILL, prompts=16, steps=100)))
    assert finding.finding == "NoSignal"
    assert finding.evidence.get("isSolved", 0.0) == is_solved


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_an_infinite_reward_is_found_at_once(infinite: float) -> None:
    steps = logged_steps(steps=30)
    steps.append(steps[-1] | {"step": 31, "reward": infinite})
    found = diagnose(rows(steps))
    assert [(finding.finding, finding.since) for finding in found] == [("NoReward", 31)]


@pytest.mark.parametrize("code", [math.nan, 0.0, 0.5])
def test_a_reward_for_right_answers_that_scores_none_is_named_unless_another_pays(
    code: float,
) -> None:
    """A column that is missing, or answers that the reward can't read: it returns None for all."""
    steps = [
        row | {"rewards/accuracy/mean": math.nan, "rewards/code_accuracy/mean": code}
        for row in batches(0, towards(0.2, 0.9, 40), STILL, steps=100)
    ]
    assert first_found(steps) == ({} if code > 0 else {"NoSignal": 40 + 4})


@pytest.mark.parametrize("kl", [{}, {"kl": always(0.0)}])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_without_any_gradient_is_named_early(seed: int, kl: dict[str, Line]) -> None:
    """No tensor of it is trained, or its gradients don't reach the optimizer."""
    still = batches(seed, always(0.4), STILL | kl | {"grad_norm": always(0.0)}, steps=100)
    assert first_found(still) == {"NotLearning": 40 + 4}
    # Groups without a signal have no gradient either.
    for row in still[::7]:
        row["grad_norm"] = still[0]["grad_norm"] = 0.3
    moving = [row | {"grad_norm": 0.3 * (row["step"] % 2)} for row in still]
    assert first_found(moving) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collapse_is_named_by_means_of_ten_steps_as_by_steps(seed: int) -> None:
    """What the KL does decides: 20 rows, of which the last 8 are of the collapse."""
    drifting = STILL | {"kl": ramp(0.05, 30, 140, 100)}
    steps = batches(seed, ramp(0.6, 0.01, 130, 100), drifting, prompts=32, steps=200)
    found = first_found(means(steps))
    assert {"RewardFalling", "KLRising"} <= set(found)
    well = batches(seed, towards(0.2, 0.7, 100), STILL, prompts=32, steps=600)
    assert first_found(means(well)) == {}


@pytest.mark.parametrize("sides", [("region_mean",), ("low_mean", "high_mean")])
@pytest.mark.parametrize("seed", SEEDS)
def test_ratios_of_sequences_clip_half_of_all_tokens_from_the_beginning(
    seed: int, sides: tuple[str, ...]
) -> None:
    """GSPO's clip range is a thousandth of GRPO's."""
    right = towards(0.3, 0.6, 60)

    def clipped(share: Line) -> dict[str, int]:
        beside = {f"clip_ratio/{side}": lambda step: share(step) / len(sides) for side in sides}
        return first_found(batches(seed, right, STILL | beside, prompts=32, steps=120))

    assert clipped(always(0.5)) == {}
    assert 60 < clipped(ramp(0.5, 1.0, 80))["StepsTooLarge"] < 90


@pytest.mark.parametrize("constant", [0.0, 0.2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_service_that_answers_the_same_to_everything_is_named(seed: int, constant: float) -> None:
    """Another reward still differs within groups, and hides it."""
    steps = batches(seed, towards(0.4, 0.6, 60), STILL, prompts=32, steps=200)
    for row in steps:
        style = ramp(0.3, 0.9, 200, 0)(row["step"])
        if row["step"] > 100:
            row["rewards/accuracy/mean"] = constant
        row |= {"rewards/style/mean": style, "reward": style + row["rewards/accuracy/mean"]}
    assert first_found(steps)["NoSignal"] == 100 + 40 + 4
