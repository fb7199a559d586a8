"""The `accuracy` reward: extraction and comparison by hand-computed cases.

A wrong answer that is rewarded is what the policy then learns.
"""

from decimal import Decimal

import pytest

from grpo_api.spec.rewards import AccuracyReward
from grpo_trainer.rewards.answers import EXTRACTORS, expected_answer, is_same_number, parse_number
from grpo_trainer.rewards.builtin_rewards import AccuracyFunction
from grpo_trainer.rewards.reward_base import RewardCounters


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ("XML", "<reasoning>x</reasoning><answer> 4 </answer>", "4"),
        ("XML", "<answer>3</answer> no: <answer>4</answer>", "4"),
        ("XML", "<answer>3</answer> no: <answer>4", "3"),
        ("XML", "</answer>4<answer>", None),
        ("XML", "#### 4", None),
        ("Hash", "2+2=4\n#### 4", "4"),
        ("Hash", "#### 3\n#### 1,000\nthat's it", "1,000"),
        ("Hash", "####", ""),
        ("Hash", "4", None),
        ("Boxed", r"so \boxed{4}", "4"),
        ("Boxed", r"\boxed{3}, no \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("Boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("Boxed", r"\boxed{4", None),
        ("None", "  4 ", "4"),
        ("Auto", r"<answer>1</answer> #### 2 \boxed{3}", "1"),
        ("Auto", r"#### 2 \boxed{3}", r"2 \boxed{3}"),
        ("Auto", r"it is \boxed{3}", "3"),
        ("Auto", " 4\n", "4"),
    ],
)
def test_extraction(how: str, text: str, answer: str | None) -> None:
    assert EXTRACTORS[how](text) == answer


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        ("She has 9*2=$<<9*2=18>>18.\n#### 18", "18"),
        (" 18 ", "18"),
        (18, "18"),
        (7.5, "7.5"),
        ("#### 70,000", "70,000"),
    ],
)
def test_the_right_answer_of_a_cell(cell: str | float, answer: str) -> None:
    assert expected_answer(cell) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", "1000"),
        ("1000.0", "1000"),
        ("$18", "18"),
        ("-$5.50", "-5.5"),
        (" 42. ", "42"),
        ("1e3", "1000"),
        ("1,2", None),
        ("12,345,678", "12345678"),
        ("1234,567", None),
        ("nan", None),
        ("inf", None),
        ("18 dollars", None),
        ("", None),
    ],
)
def test_numbers(text: str, value: str | None) -> None:
    assert parse_number(text) == (None if value is None else Decimal(value))


def test_a_huge_exponent_is_compared_without_being_written_out() -> None:
    assert not is_same_number("1e999999999999", "1e999999999998")


def accuracy(compare: str, completions: list[str], answers: list[str]) -> list[float | None]:
    spec = AccuracyReward.model_validate({"compare": compare, "score": 2.0})
    return AccuracyFunction("accuracy", spec, RewardCounters())(completions, answer=answers)


def test_exact_and_numeric_comparison() -> None:
    completions = [
        "<answer>1,000</answer>",
        "<answer>1000.0</answer>",
        "<answer>1001</answer>",
        "<answer>x</answer>",
    ]
    answers = ["... #### 1,000"] * 4
    assert accuracy("Exact", completions, answers) == [2.0, 0.0, 0.0, 0.0]
    assert accuracy("Numeric", completions, answers) == [2.0, 2.0, 0.0, 0.0]


def test_no_answer_scores_nothing() -> None:
    spec = AccuracyReward(extract="XML", answer_column="solution")
    function = AccuracyFunction("accuracy", spec, RewardCounters())
    assert function(["4", "<answer>4</answer>"], solution=["4", "4"]) == [0.0, 1.0]
