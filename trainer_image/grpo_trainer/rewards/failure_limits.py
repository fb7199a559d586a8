"""Ends a run when a reward's service failed for more of a generation's completions than declared.

The share is one of all ranks: judged by each for itself, one lost request of a rank with few completions would end a
run that scored nearly all. Every rank judges the same sums, which the step's exchange brings, so all end together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..gang import ranks
from .base import RewardCounters, reward_error

Totals = Mapping[str, tuple[float, float]]
"""Completions without a reward because of failures, and completions asked for; all ranks, since the start, by name."""


@dataclass(slots=True)
class FailureLimits:
    """Compares what was added since the last step with the declared shares."""

    counters: dict[str, RewardCounters]
    """Of this process; they know the last failure's words."""
    shares: dict[str, float]
    """maxFailureShare of every reward that has one, by name."""
    _before: dict[str, tuple[float, float]] = field(default_factory=dict)

    def judge(self, step: int, totals: Totals) -> None:
        """A collective where a share is exceeded.

        Raises:
            RewardError: it is; on all ranks alike.
        """
        for name, limit in self.shares.items():
            before, self._before[name] = self._before.get(name, (0.0, 0.0)), totals[name]
            missing, asked = (now - then for now, then in zip(totals[name], before, strict=True))
            if asked and missing / asked > limit:
                words = next(filter(None, ranks.gather(self.counters[name].last_problem)), "")
                problem = (
                    f"{missing:.0f} of {asked:.0f} completions of all ranks got no reward "
                    f"({missing / asked:.0%}, maxFailureShare is {limit:.0%}); the last failure: {words}"
                )
                raise reward_error(name, step, problem)
