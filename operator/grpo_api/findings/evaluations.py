"""The scores of a run on prompts that are not trained on: of the whole run, bounded in number."""

import math
from collections.abc import Sequence
from typing import NamedTuple

KEPT_EVALUATIONS = 64
"""Even, so that all are averaged in pairs."""


class Evaluation(NamedTuple):
    """A score on prompts that are not trained on."""

    score: float
    reward: float
    """Level of the training reward then; NaN where none was logged."""
    num_rewards: float
    """Training rewards until then."""


BEFORE = 4
"""Newest evaluations before a moment that a gain since then is measured from: earlier ones would
count what was learned before as a gain."""
_MEAN_BEND = 1.9544
"""Mean of |x - 2y + z| for independent normal x, y, z of standard deviation 1: sqrt(12 / pi)."""


class Evaluations:
    """The evaluations of the whole run. Where there are many, neighbours are averaged."""

    def __init__(self) -> None:
        self.means: list[Evaluation] = []
        self._pending: list[Evaluation] = []
        self._size = 1
        """Evaluations in a mean."""

    def add(self, evaluation: Evaluation) -> None:
        """Take the newest evaluation."""
        self._pending.append(evaluation)
        if len(self._pending) == self._size:
            self.means.append(_mean(self._pending))
            self._pending = []
        if len(self.means) == KEPT_EVALUATIONS:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [_mean(pair) for pair in pairs]
            self._size *= 2

    @property
    def noise(self) -> float:
        """Standard deviation of the means, of three at least, by how they bend: by the jumps of so
        few a trend would count as noise."""
        scores = [evaluation.score for evaluation in self.means]
        neighbours = zip(scores, scores[1:], scores[2:], strict=False)
        bends = [abs(before - 2 * between + after) for before, between, after in neighbours]
        return sum(bends) / len(bends) / _MEAN_BEND

    def gain_in_errors(self, num_rewards: int, newest: int = KEPT_EVALUATIONS) -> float:
        """How far the `newest` evaluations after this number of training rewards stand above those
        before, in standard errors; 0 where there are too few of either."""
        before = [each for each in self.means if each.num_rewards <= num_rewards][-BEFORE:]
        after = [each for each in self.means if each.num_rewards > num_rewards][-newest:]
        if not before or len(before) + len(after) < BEFORE or not after:
            return 0.0
        gain = _mean(after).score - _mean(before).score
        error = self.noise * math.sqrt(1 / len(before) + 1 / len(after))
        return in_errors(gain, error)


def in_errors(change: float, error: float) -> float:
    """A change in standard errors of this size, which may be 0."""
    if error > 0:
        return change / error
    return math.copysign(math.inf, change) if change else 0.0


def _mean(evaluations: Sequence[Evaluation]) -> Evaluation:
    return Evaluation(*(sum(column) / len(column) for column in zip(*evaluations, strict=True)))
