"""`accuracy` by math-verify, in its own process: equal mathematics, and expressions that never end.

A policy that is rewarded for mathematics will write `9^{9^{9^9}}` one day.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.spec.rewards import AccuracyReward
from grpo_trainer.rewards.builtin_rewards import AccuracyFunction
from grpo_trainer.rewards.python_function import FunctionProcess
from grpo_trainer.rewards.reward_base import RewardCounters
from tests.generated import cases
from tests.stepped_clock import SteppedClock

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def function() -> Iterator[AccuracyFunction]:
    spec = AccuracyReward.model_validate(
        {"extract": "Boxed", "compare": "Math", "timeoutSeconds": 60}
    )
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
def test_equal_mathematics(
    function: AccuracyFunction, given: str, expected: str, score: float
) -> None:
    assert function([rf"so \boxed{{{given}}}"], answer=[expected]) == [score]


def test_without_an_answer_nothing_is_compared(function: AccuracyFunction) -> None:
    assert function(["18"], answer=["18"]) == [0.0]


@pytest.mark.slow
def test_an_endless_expression_costs_its_time_and_no_reward() -> None:
    counters = RewardCounters()
    spec = AccuracyReward.model_validate(
        {"extract": "XML", "compare": "Math", "timeoutSeconds": 10}
    )
    function = AccuracyFunction("math", spec, counters)
    try:
        tower = "<answer>9^{9^{9^{9}}}</answer>"
        assert function(
            ["<answer>1/2</answer>", tower, "<answer>0.5</answer>"], answer=["0.5", "7", r"\frac12"]
        ) == [
            1.0,
            None,
            1.0,
        ]
        assert counters == RewardCounters(timeouts=1)
        assert function.longest_seconds >= 60
    finally:
        function.close()


class Scripted(FunctionProcess):
    """Stands in for math-verify's process: each comparison takes the seconds that its answer
    says."""

    def __init__(self, clock: SteppedClock) -> None:
        self.clock = clock

    def call(self, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Right, if there was the time."""
        needed = float(arguments["completions"][0])
        self.clock.advance(min(needed, seconds))
        if needed > seconds:
            raise TimeoutError
        return {"scores": [1.0]}


@settings(max_examples=cases(50))
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 200)
)
def test_each_completion_has_its_time_and_all_of_a_batch_have_theirs(
    needed: list[int], seconds: int, batch_seconds: int
) -> None:
    """`needed`: seconds of each comparison, in turn."""
    clock, counters = SteppedClock(), RewardCounters()
    fields = {
        "extract": "None",
        "compare": "Math",
        "timeoutSeconds": seconds,
        "batchTimeoutSeconds": batch_seconds,
    }
    spec = AccuracyReward.model_validate(fields)
    function = AccuracyFunction("math", spec, counters, Scripted(clock), clock)
    scores = function([str(one) for one in needed], answer=["right"] * len(needed))
    left, expected = float(batch_seconds), []
    for one in needed:
        expected.append(1.0 if one <= min(seconds, left) else None)
        left -= min(one, seconds, left)
    assert scores == expected
    assert counters == RewardCounters(timeouts=expected.count(None))
    assert clock.now() <= batch_seconds
