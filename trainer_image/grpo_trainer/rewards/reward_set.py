"""RewardSet: `spec.rewards` as the functions, weights and names that TRL's trainer takes.

Exists as the one place where a declared reward becomes a callable. Built by the worker before the trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo_api.rewards import RewardSpec, reward_names

from .accuracy import AccuracyFunction
from .base import RewardCounters
from .formats import FormatFunction

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a run; positions agree in all lists."""

    names: list[str]
    """Distinct names, as metrics show them; each function's `__name__`."""
    weights: list[float]
    """Factor of each reward in the sum."""
    functions: list[RewardFunction]
    """Callables with TRL's reward signature."""
    counters: dict[str, RewardCounters] = field(default_factory=dict)
    """Live counters of this process, by name."""

    @property
    def longest_seconds(self) -> float:
        """The most time that scoring one batch can take: the process group must wait longer than this."""
        return max((getattr(function, "longest_seconds", 0.0) for function in self.functions), default=0.0)

    def close(self) -> None:
        """Ends what the rewards started. Harmless when called twice."""
        for function in self.functions:
            if hasattr(function, "close"):
                function.close()


def build_rewards(rewards: list[RewardSpec]) -> RewardSet:
    """The functions of `spec.rewards`.

    Raises:
        BadInput: a pattern is no regular expression.
    """
    names = reward_names(rewards)
    counters = {name: RewardCounters() for name in names}
    functions = [_build(reward, name, counters[name]) for reward, name in zip(rewards, names, strict=True)]
    return RewardSet(names, [reward.weight for reward in rewards], functions, counters)


def _build(reward: RewardSpec, name: str, counters: RewardCounters) -> RewardFunction:
    if reward.format:
        return FormatFunction(name, reward.format, counters)
    if reward.accuracy:
        return AccuracyFunction(name, reward.accuracy, counters)
    raise NotImplementedError(reward.kind)
