"""The rewards of completions outside of training: each function is called as TRL calls it."""

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn
from trl.data_utils import apply_chat_template

from ..data.prompts import Prompt
from ..rewards import RewardSet
from ..rewards.base import Completion, Scores

Columns = Mapping[str, Sequence[Any]]
"""The dataset's columns but the prompt's, a cell per completion."""


def rewarded(
    rewards: RewardSet,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, list[int]]],
    columns: Columns,
    size: int,
) -> dict[str, Scores]:
    """The scores of each reward by its name: one per completion, before weighting.

    Each call of a reward scores at most `size` completions, as in a step: its time budget is meant for that number.

    Raises:
        RewardError: a reward failed.
    """
    found: dict[str, Scores] = {name: [] for name in rewards.names}
    named = list(zip(rewards.names, rewards.functions, rewards.processing_classes, strict=True))
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        arguments = {name: cells[part] for name, cells in columns.items()}
        arguments |= {"prompts": prompts[part], "completions": [text for text, _ in completions[part]]}
        arguments["completion_ids"] = [ids for _, ids in completions[part]]
        for name, function, tokenizer in named:
            by_model = isinstance(function, nn.Module)
            found[name] += _by_model(function, tokenizer, arguments) if by_model else _by_function(function, arguments)
    return found


def _by_function(function: Any, arguments: Mapping[str, Any]) -> Scores:
    found = function(**arguments)
    return list(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)


async def _awaited(found: Any) -> Any:
    return await found


def _by_model(model: Any, tokenizer: Any, arguments: Mapping[str, Any]) -> Scores:
    pairs = zip(arguments["prompts"], arguments["completions"], strict=True)
    texts = [
        prompt + completion
        if isinstance(prompt, str)
        else apply_chat_template({"messages": prompt + completion}, tokenizer)["text"]
        for prompt, completion in pairs
    ]
    encoded = tokenizer(
        text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    ).to(next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(**encoded).logits[:, 0]
    return [None if math.isnan(logit) else logit for logit in logits.tolist()]


def weighted(rewards: RewardSet, scores: Mapping[str, Scores]) -> Scores:
    """The weighted sum of the scores of each completion; None for a completion that no reward scored."""
    named = zip(rewards.names, rewards.weights, strict=True)
    columns = [[one if one is None else weight * one for one in scores[name]] for name, weight in named]
    rows = ([one for one in row if one is not None] for row in zip(*columns, strict=True))
    return [sum(row) if row else None for row in rows]


def means(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Mean of each reward over the completions that it scored, by its name. Omits rewards that scored none."""
    return {name: fmean(known) for name, row in scores.items() if (known := [one for one in row if one is not None])}
