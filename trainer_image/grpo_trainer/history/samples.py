"""Chooses whole groups of a generation for people to read, with what became of each completion."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class CompletionFacts(NamedTuple):
    """What TRL's own log of completions lacks."""

    tokens: int
    """Tokens of the completion, with the one that ended it."""
    is_truncated: bool
    """Whether it was cut at the longest length."""
    weights_version: int | None
    """Number of the weights that an engine sampled it with; None where the policy sampled."""


class Generation(NamedTuple):
    """The completions of all ranks, groups one after the other."""

    prompts: Sequence[Any]
    """Texts or chats, one for each completion."""
    completions: Sequence[Any]
    """Texts or chats."""
    rewards: Mapping[str, Sequence[float]]
    """By name of the reward function; NaN where it gave none."""
    advantages: Sequence[float]
    facts: Sequence[CompletionFacts]
    group_size: int
    """Completions of one prompt."""


def sample_groups(generation: Generation, count: int) -> list[dict[str, Any]]:
    """`count` whole groups, spread over the generation; all where there are fewer."""
    size = generation.group_size
    groups = len(generation.prompts) // size
    starts = [position * size for position in spread_positions(groups, count)]
    return [
        {
            "prompt": generation.prompts[start],
            "completions": [_completion(generation, index) for index in range(start, start + size)],
        }
        for start in starts
    ]


def spread_positions(count: int, limit: int) -> list[int]:
    """At most `limit` positions spread over `count`."""
    if count < limit:
        return list(range(count))
    return [index * count // limit for index in range(limit)]


def _completion(generation: Generation, index: int) -> dict[str, Any]:
    facts = generation.facts[index]
    scores = {name: values[index] for name, values in generation.rewards.items()}
    shown = {
        "completion": _text(generation.completions[index]),
        "tokens": facts.tokens,
        "truncated": facts.is_truncated,
        "rewards": {name: score for name, score in scores.items() if not math.isnan(score)},
        "advantage": generation.advantages[index],
    }
    if facts.weights_version is not None:
        shown["weights_version"] = facts.weights_version
    return shown


def _text(completion: Any) -> str:
    """A completion as text; of a chat the last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
