"""`accuracy` by math-verify, in its own process: equal mathematics, and expressions that never end.

A policy that is rewarded for mathematics will write `9^{9^{9^9}}` one day.
"""

from collections.abc import Iterator

import pytest

from grpo_api.rewards import AccuracyReward
from grpo_trainer.rewards.accuracy import AccuracyFunction
from grpo_trainer.rewards.base import RewardCounters


@pytest.fixture(scope="module")
def function() -> Iterator[AccuracyFunction]:
    spec = AccuracyReward.model_validate({"extract": "Boxed", "compare": "Math", "timeoutSeconds": 30})
    function = AccuracyFunction("math", spec, RewardCounters())
    yield function
    function.close()


@pytest.mark.parametrize(
    ("given", "expected", "score"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("1/2", r"\frac12", 1.0),
        ("1,000", "1000", 1.0),
        ("x+1", "1+x", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        (r"50\%", "0.5", 1.0),
        ("$18$", "#### 18", 1.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        ("0.33", r"\frac{1}{3}", 0.0),
        ("x-1", "1-x", 0.0),
        ("(1,2)", "[1,2]", 0.0),
        ("", "0", 0.0),
        (r"\frac{1}{", "1", 0.0),
    ],
)
def test_equal_mathematics(function: AccuracyFunction, given: str, expected: str, score: float) -> None:
    assert function([rf"so \boxed{{{given}}}"], answer=[expected]) == [score]


def test_without_an_answer_nothing_is_compared(function: AccuracyFunction) -> None:
    assert function(["18"], answer=["18"]) == [0.0]


def test_an_endless_expression_costs_its_time_and_no_reward() -> None:
    counters = RewardCounters()
    spec = AccuracyReward.model_validate({"extract": "XML", "compare": "Math", "timeoutSeconds": 5})
    function = AccuracyFunction("math", spec, counters)
    try:
        tower = "<answer>9^{9^{9^{9}}}</answer>"
        assert function(["<answer>1/2</answer>", tower, "<answer>0.5</answer>"], answer=["0.5", "7", r"\frac12"]) == [
            1.0,
            None,
            1.0,
        ]
        assert counters == RewardCounters(timeouts=1)
        assert function.longest_seconds >= 60
    finally:
        function.close()


def test_a_spent_batch_budget_leaves_the_rest_unscored() -> None:
    counters = RewardCounters()
    fields = {"extract": "None", "compare": "Math", "timeoutSeconds": 30, "batchTimeoutSeconds": 1}
    function = AccuracyFunction("math", AccuracyReward.model_validate(fields), counters)
    try:
        texts = ["7", "9^{9^{9^{9}}}", "1/2"]
        assert function(texts, answer=["7", "7", "0.5"]) == [1.0, None, None]
        assert counters == RewardCounters(timeouts=2)
    finally:
        function.close()
