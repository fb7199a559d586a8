"""The `accuracy` reward: does the completion's answer equal the dataset's?

Exists for datasets with one right answer, such as GSM8K. Built by reward_set.
"""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_api.rewards import AccuracyReward

from .answers import EXTRACTORS, expected_answer, same_number, same_text
from .base import Completion, RewardCounters, Scores, completion_text, current_step, reward_error

_COMPARISONS: dict[str, Callable[[str, str], bool]] = {"Exact": same_text, "Numeric": same_number}


class AccuracyFunction:
    """Callable with TRL's reward signature: `score` for a right answer, 0 for a wrong or a missing one."""

    def __init__(self, name: str, spec: AccuracyReward, counters: RewardCounters) -> None:
        """Picks how answers are found and compared."""
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._extract = EXTRACTORS[spec.extract]
        self._same = _COMPARISONS[spec.compare]

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> Scores:
        """One score per completion.

        Raises:
            RewardError: the dataset has no answer column.
        """
        step = current_step(columns)
        if self._spec.answer_column not in columns:
            problem = f"the dataset has no column {self._spec.answer_column!r}; set accuracy.answerColumn"
            raise reward_error(self.__name__, step, problem)
        pairs = zip(completions, columns[self._spec.answer_column], strict=True)
        return [self._score(completion_text(completion), answer) for completion, answer in pairs]

    def _score(self, text: str, answer: str | float) -> float:
        given = self._extract(text)
        right = given is not None and self._same(given, expected_answer(answer))
        return self._spec.score if right else 0.0
