"""The built-in rewards: `accuracy` compares answers with the dataset's, `format` matches a regular
expression.

`accuracy` is for datasets with one right answer, such as GSM8K. A process of its own runs
math-verify: an answer like `9^{9^{9^9}}` would else keep the training busy for ever.

A pattern of `format` and a completion together can take exponential time. Matching therefore runs
in the `regex` package, which can be timed out and releases the GIL. `regex` measures its time-outs
in CPU seconds of the process, all threads together (C's clock()).
"""

from collections.abc import Sequence
from typing import Any

import regex

from grpo_api.spec.rewards import AccuracyReward, FormatReward
from grpo_api.text.clock import Clock

from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import BadInput
from .answers import EXTRACTORS, expected_answer, is_same_number
from .python_function import START_SECONDS, FunctionFailed, FunctionProcess
from .reward_base import (
    Completion,
    Deadline,
    RewardCounters,
    Scores,
    completion_text,
    current_step,
    reward_error,
)


class AccuracyFunction:
    """Callable with TRL's reward signature: `score` for a right answer, 0 for a wrong or a missing
    one."""

    def __init__(
        self,
        name: str,
        spec: AccuracyReward,
        counters: RewardCounters,
        math: FunctionProcess | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Picks how answers are found and compared. `math` is taken over; where it is needed and
        None, it is started.

        `clock` measures the budget of a batch.
        """
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._extract = EXTRACTORS[spec.extract]
        self._clock = clock
        self._math = math
        if math is None and spec.compare == "Math":
            self._math = FunctionProcess("grpo_trainer.rewards.math_answers:compare_answers")

    @property
    def longest_seconds(self) -> float:
        """The most time that one call can take."""
        return START_SECONDS + self._spec.batch_timeout_seconds if self._math else 0.0

    def close(self) -> None:
        """End math-verify's process."""
        if self._math:
            self._math.close()

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> Scores:
        """One score per completion; None where comparing took too long.

        Raises:
            RewardError: a right answer is missing in the dataset, or math-verify's process ended.
        """
        step = current_step(columns)
        deadline = Deadline(self._spec.batch_timeout_seconds, self._clock)
        answers = columns[self._spec.answer_column]
        scores: Scores = []
        for sample, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
            try:
                scores.append(self._score(completion_text(completion), answer, deadline))
            except FunctionFailed as failure:
                problem = f"math-verify failed: {failure}"
                raise reward_error(self.__name__, step, problem, sample) from failure
        return scores

    def _score(self, text: str, answer: str | float, deadline: Deadline) -> float | None:
        extracted_answer, expected = self._extract(text), expected_answer(answer)
        if extracted_answer is None:
            return 0.0
        same = self._is_same_answer(extracted_answer, expected, deadline)
        if same is None:
            self._counters.count_timeouts(1, f"math-verify: {deadline.timeout_message(self._spec)}")
            return None
        return self._spec.score if same else 0.0

    def _is_same_answer(
        self, extracted_answer: str, expected: str, deadline: Deadline
    ) -> bool | None:
        if self._spec.compare == "Numeric":
            return is_same_number(extracted_answer, expected)
        if extracted_answer.strip() == expected.strip():
            return True
        if self._math is None:
            return False
        seconds = min(self._spec.timeout_seconds, deadline.seconds_left())
        if seconds <= 0:
            return None
        pair = {"completions": [extracted_answer], "expected": [expected]}
        try:
            answer = self._math.call({**pair, "trainer_state": {}}, seconds)
        except TimeoutError:
            return None
        return bool(answer["scores"][0])


class FormatFunction:
    """Callable with TRL's reward signature: `score` for completions that match, 0 for others, None
    after a time-out."""

    def __init__(
        self, name: str, spec: FormatReward, counters: RewardCounters, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Compiles the pattern; `clock` measures the budget of a batch.

        Raises:
            BadInput: the pattern is not a regular expression.
        """
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._clock = clock
        try:
            self._pattern = regex.compile(spec.pattern)
        except regex.error as error:
            problem = f"format.pattern {spec.pattern!r:.200} is not a regular expression: {error}"
            raise BadInput(f"reward {name!r}: {problem}; correct the pattern") from error

    @property
    def longest_seconds(self) -> float:
        """The most time that one call can take, on a node that has a CPU for it."""
        return self._spec.batch_timeout_seconds

    def __call__(self, completions: Sequence[Completion], **_columns: Any) -> Scores:
        """One score per completion, all within the batch's budget."""
        deadline = Deadline(self._spec.batch_timeout_seconds, self._clock)
        return [
            self._score(completion_text(completion).strip(), deadline) for completion in completions
        ]

    def _score(self, text: str, deadline: Deadline) -> float | None:
        seconds = max(0.0, min(self._spec.timeout_seconds, deadline.seconds_left()))
        try:
            matched = self._pattern.fullmatch(text, timeout=seconds, concurrent=True)
        except TimeoutError:
            self._counters.count_timeouts(1, deadline.timeout_message(self._spec))
            return None
        return self._spec.score if matched else 0.0
