"""The `format` reward: hand-computed matches, and patterns that take exponential time.

A completion is adversarial input to the user's pattern.
"""

import threading
import time

import pytest

from grpo_api.spec.rewards import FormatReward
from grpo_trainer.rewards.builtin_rewards import FormatFunction
from grpo_trainer.rewards.reward_base import RewardCounters
from grpo_trainer.runtime.errors import BadInput

TAGS = r"<reasoning>[\s\S]*</reasoning>\s*<answer>[\s\S]*</answer>"
LETTERS = "a" * 60 + "b"
CATASTROPHES = [
    (r"(a|aa)+", LETTERS),
    (r"(?:\s|\S|\s\S)*</answer>", "word </answer> x" * 20),
    (r"(<b>|<b><b>|.)*z", "<b>" * 30 + "z."),
]


class CPUClock:
    """The time by which `regex` measures, too, so that a busy machine spends none of it."""

    def now(self) -> float:
        """CPU seconds of this process."""
        return time.process_time()

    def sleep(self, _: float) -> None:
        """Nobody does."""


def format_function(pattern: str, **fields: float) -> tuple[FormatFunction, RewardCounters]:
    counters = RewardCounters()
    return FormatFunction(
        "format", FormatReward(pattern=pattern, **fields), counters, CPUClock()
    ), counters


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<reasoning>2+2</reasoning><answer>4</answer>", 0.5),
        ("\n <reasoning>\n2+2\n</reasoning>\n\n<answer>\n4\n</answer> \n", 0.5),
        ("<reasoning>2+2</reasoning><answer>4</answer> so 4", 0.0),
        ("So: <reasoning>2+2</reasoning><answer>4</answer>", 0.0),
        ("<answer>4</answer><reasoning>2+2</reasoning>", 0.0),
        ("<reasoning>2+2</reasoning><answer>4", 0.0),
        ("", 0.0),
    ],
)
def test_only_whole_completions_match(completion: str, score: float) -> None:
    function, _ = format_function(TAGS, score=0.5)
    assert function([completion]) == [score]
    assert function([[{"role": "assistant", "content": completion}]]) == [score]


def test_each_message_is_scored_on_its_own() -> None:
    function, _ = format_function("[0-9]+")
    completions = [[{"role": "assistant", "content": text}] for text in ("12", "no", "7 ")]
    assert function(completions, answer=["a", "b", "c"]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("pattern", "text"), CATASTROPHES)
def test_a_catastrophe_costs_its_budget_and_no_reward(pattern: str, text: str) -> None:
    function, counters = format_function(pattern, timeout_seconds=1)
    assert function(["a", text, "a"])[1] is None
    assert counters.timeouts == 1


def test_other_threads_go_on_while_a_pattern_runs_away() -> None:
    """With `concurrent=False`, or in `re`, the GIL is held for the whole match and the counter does
    not move."""
    function, counters = format_function(r"(a|aa)+", timeout_seconds=1)
    stop, beats = threading.Event(), 0

    def beat() -> None:
        nonlocal beats
        while not stop.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert function([LETTERS]) == [None]
    finally:
        stop.set()
        thread.join()
    assert counters.timeouts == 1
    assert beats > 20


def test_a_spent_batch_budget_leaves_the_rest_unscored() -> None:
    function, counters = format_function(r"(a|aa)+", timeout_seconds=60, batch_timeout_seconds=1)
    assert function(["a", LETTERS, "a", "a"]) == [1.0, None, None, None]
    assert counters.timeouts == 3
    assert function.longest_seconds == 1
    assert function(["aaa"]) == [1.0], "the next batch has a budget of its own"


def test_a_pattern_that_only_re_takes_is_bad_input() -> None:
    """The API rejects what `re` rejects; `regex` knows fuzzy counts that `re` takes for text."""
    with pytest.raises(
        BadInput,
        match=r"reward 'format': format.pattern 'a{e<x}' is not a regular expression: bad fuzzy",
    ):
        format_function("a{e<x}")
