"""Ends a run when a reward failed for a larger share of the completions than declared.

Judged are the last ten generations of all ranks together. By a rank or a generation alone, one time-out of a function,
which costs its whole batch, would end a run that scored nearly all. Every rank judges the same sums, which the step's
exchange brings, so all end together.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_api.spec.rewards import JUDGED_GENERATIONS

from ..gang import ranks
from .base import RewardCounters, reward_error


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of the completions of all ranks since the start."""

    completions: float
    """Those that were put to the rewards."""
    missing: Mapping[str, float]
    """Those of them that got no reward because of failures and time-outs, by reward."""


@dataclass(slots=True)
class FailureLimits:
    """Compares what was added in the last generations with the declared shares."""

    counters: dict[str, RewardCounters]
    """Of this process; they know the last failure's words."""
    shares: dict[str, float]
    """maxFailureShare by reward."""
    _sums: deque[Scored] = field(default_factory=lambda: deque([Scored(0.0, {})], JUDGED_GENERATIONS + 1))
    """After each of the last generations, and before them."""

    def judge(self, step: int, scored: Scored, *, last: bool) -> None:
        """To be called after every step, with `last` after the run's. A collective where a share is exceeded.

        A run that has made fewer than ten generations is judged as if those to come lost nothing, until it has made its
        last: so a failure at its beginning may pass, and a reward that never answers ends it after the second.

        Raises:
            RewardError: a share is exceeded; on all ranks alike.
        """
        if scored.completions > self._sums[-1].completions:
            self._sums.append(scored)
        before, generations = self._sums[0], len(self._sums) - 1
        asked = scored.completions - before.completions
        # As many completions as JUDGED_GENERATIONS generations ask for; after the last step, as many as there were.
        is_final = last or not generations
        judged = asked if is_final else asked / generations * JUDGED_GENERATIONS
        for name, limit in self.shares.items():
            missing = scored.missing[name] - before.missing.get(name, 0.0)
            if judged and missing / judged > limit:
                of = "" if judged == asked else f" of {JUDGED_GENERATIONS} generations"
                share = f"{missing / judged:.1%}{of}, more than its maxFailureShare, {limit:.1%}"
                self._end(
                    name, step, f"{missing:.0f} of the {asked:.0f} completions of {generations} generations", share
                )

    def unscored(self) -> dict[str, float]:
        """Share of the judged generations' completions that got no reward, by reward; as of the last `judge`."""
        first, last = self._sums[0], self._sums[-1]
        asked = last.completions - first.completions
        if not asked:
            return {}
        missing = {name: count - first.missing.get(name, 0.0) for name, count in last.missing.items()}
        return {name: count / asked for name, count in missing.items()}

    def _end(self, name: str, step: int, lost: str, share: str) -> None:
        """Raise the error, in the words of a rank that met a failure. A collective."""
        words = next(filter(None, ranks.gather(self.counters[name].last_problem)), "unknown")
        raise reward_error(name, step, f"{lost}, all ranks together, got no reward: {share}. The last failure: {words}")
