"""Reward functions: the kinds of `spec.rewards` as callables for TRL's trainer.

A reward must never hang a run, or fail it without a name, which takes more than a function each.
"""
