"""Reward functions: the kinds of `spec.rewards` as callables for TRL's trainer.

Exists as a package because a reward must never hang or fail a run unnamed, which takes more than a function each.
"""

from .reward_set import RewardSet, build_rewards

__all__ = ["RewardSet", "build_rewards"]
