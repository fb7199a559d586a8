"""The scores of a run on prompts that are not trained on: of the whole run, bounded in number."""

from collections.abc import Sequence
from typing import NamedTuple

KEPT_EVALUATIONS = 64
"""Even, so that all are averaged in pairs."""


class Evaluation(NamedTuple):
    """A score on prompts that are not trained on."""

    score: float
    reward: float
    """Level of the training reward then; NaN where none was logged."""


class Evaluations:
    """The evaluations of the whole run. Where there are many, neighbours are averaged."""

    def __init__(self) -> None:
        self.means: list[Evaluation] = []
        self._pending: list[Evaluation] = []
        self._size = 1
        """Evaluations in a mean."""

    def add(self, score: float, reward: float) -> None:
        """Take the newest evaluation."""
        self._pending.append(Evaluation(score, reward))
        if len(self._pending) == self._size:
            self.means.append(_mean(self._pending))
            self._pending = []
        if len(self.means) == KEPT_EVALUATIONS:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [_mean(pair) for pair in pairs]
            self._size *= 2


def _mean(evaluations: Sequence[Evaluation]) -> Evaluation:
    scores, rewards = zip(*evaluations, strict=True)
    return Evaluation(sum(scores) / len(scores), sum(rewards) / len(rewards))
