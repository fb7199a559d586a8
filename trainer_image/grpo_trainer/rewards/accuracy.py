"""The `accuracy` reward: does the completion's answer equal the dataset's?

For datasets with one right answer, such as GSM8K. math-verify runs in a process of its own: an answer like
`9^{9^{9^9}}` would else keep the training busy for ever.
"""

from collections.abc import Sequence
from typing import Any

from grpo_api.spec.rewards import AccuracyReward
from grpo_api.text.clock import Clock

from ..clock import SYSTEM_CLOCK
from .answers import EXTRACTORS, expected_answer, same_number, same_text
from .base import Completion, Deadline, RewardCounters, Scores, completion_text, current_step, reward_error
from .child_process import START_SECONDS, FunctionFailed, FunctionProcess


class AccuracyFunction:
    """Callable with TRL's reward signature: `score` for a right answer, 0 for a wrong or a missing one."""

    def __init__(
        self,
        name: str,
        spec: AccuracyReward,
        counters: RewardCounters,
        math: FunctionProcess | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Picks how answers are found and compared. `math` is taken over; where it is needed and None, it is started.

        `clock` measures the budget of a batch.
        """
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._extract = EXTRACTORS[spec.extract]
        self._clock = clock
        self._math = math
        if math is None and spec.compare == "Math":
            self._math = FunctionProcess("grpo_trainer.rewards.math_answers:compare")

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
                raise reward_error(self.__name__, step, f"math-verify failed: {failure}", sample) from failure
        return scores

    def _score(self, text: str, answer: str | float, deadline: Deadline) -> float | None:
        given, expected = self._extract(text), expected_answer(answer)
        if given is None:
            return 0.0
        same = self._same(given, expected, deadline)
        if same is None:
            self._counters.timed_out(1, f"math-verify: {deadline.missed(self._spec)}")
            return None
        return self._spec.score if same else 0.0

    def _same(self, given: str, expected: str, deadline: Deadline) -> bool | None:
        if self._spec.compare == "Numeric":
            return same_number(given, expected)
        if same_text(given, expected):
            return True
        return self._same_math(given, expected, deadline) if self._math else False

    def _same_math(self, given: str, expected: str, deadline: Deadline) -> bool | None:
        assert self._math is not None, "only called when comparing by math-verify"
        seconds = min(self._spec.timeout_seconds, deadline.left())
        if seconds <= 0:
            return None
        try:
            answer = self._math.call({"completions": [given], "expected": [expected], "trainer_state": {}}, seconds)
        except TimeoutError:
            return None
        return bool(answer["scores"][0])
