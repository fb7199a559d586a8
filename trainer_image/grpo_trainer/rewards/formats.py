"""The `format` reward: does the whole completion match a regular expression?

A pattern and a completion together can take exponential time. Matching therefore runs in the `regex` package, which can
be timed out and releases the GIL: a bad pattern costs its budget and freezes nobody. `regex` measures its time-outs in
CPU seconds of the process, all threads together (C's clock()).
"""

from collections.abc import Sequence
from typing import Any

import regex

from grpo_api.spec.rewards import FormatReward
from grpo_api.text.clock import Clock

from ..clock import SYSTEM_CLOCK
from ..errors import BadInput
from .base import Completion, Deadline, RewardCounters, Scores, completion_text


class FormatFunction:
    """Callable with TRL's reward signature: `score` for completions that match, 0 for others, None after a time-out."""

    def __init__(self, name: str, spec: FormatReward, counters: RewardCounters, clock: Clock = SYSTEM_CLOCK) -> None:
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
        return [self._score(completion_text(completion).strip(), deadline) for completion in completions]

    def _score(self, text: str, deadline: Deadline) -> float | None:
        seconds = max(0.0, min(self._spec.timeout_seconds, deadline.left()))
        try:
            matched = self._pattern.fullmatch(text, timeout=seconds, concurrent=True)
        except TimeoutError:
            self._counters.timed_out(1, deadline.missed(self._spec))
            return None
        return self._spec.score if matched else 0.0
