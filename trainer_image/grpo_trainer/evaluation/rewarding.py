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
from ..rewards.base import Completion, Scores
from ..rewards.reward_set import RewardSet

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
    texts = [_judged_text(prompt, completion, tokenizer) for prompt, completion in pairs]
    encoded = tokenizer(
        text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    ).to(next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(**encoded).logits[:, 0]
    return [_number_or_none(logit) for logit in logits.tolist()]


def _judged_text(prompt: Any, completion: Any, tokenizer: Any) -> str:
    """What a reward model reads of one completion: plain text, or the rendered conversation."""
    if isinstance(prompt, str):
        text: str = prompt + completion
    else:
        text = apply_chat_template({"messages": prompt + completion}, tokenizer)["text"]
    return text


def _number_or_none(score: float) -> float | None:
    return None if math.isnan(score) else score


def weighted(rewards: RewardSet, scores: Mapping[str, Scores]) -> Scores:
    """The weighted sum of the scores of each completion; None for a completion that no reward scored."""
    sums: Scores = []
    for row in zip(*(scores[name] for name in rewards.names), strict=True):
        products = [weight * one for weight, one in zip(rewards.weights, row, strict=True) if one is not None]
        sums.append(sum(products) if products else None)
    return sums


def means(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Mean of each reward over the completions that it scored, by its name. Omits rewards that scored none."""
    found: dict[str, float] = {}
    for name, row in scores.items():
        known = [one for one in row if one is not None]
        if known:
            found[name] = fmean(known)
    return found
