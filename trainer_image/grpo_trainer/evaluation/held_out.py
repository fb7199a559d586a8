"""An evaluation from its plan to its score: model, rows, completions, rewards. Imports torch and
all that it needs.

The exported model is loaded as anybody would load it, and sampled as the job sampled while it
trained. Each reward function is called as TRL calls it.
"""

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from trl.data_utils import apply_chat_template

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.contract import DATA_MOUNT, DATA_MOUNT_ENV

from ..data.dataset import load_prompts
from ..data.prompts import Prompt
from ..hub.repositories import Hub
from ..rewards.reward_base import Completion, Scores
from ..rewards.reward_set import RewardSet, build_rewards
from ..runtime.errors import BadInput
from ..training.build_run import device
from ..weights.model_files import Source, load_tokenizer
from .score import Score, score

Columns = Mapping[str, Sequence[Any]]
"""The dataset's columns but the prompt's, a cell per completion."""


def score_completions(
    rewards: RewardSet,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, list[int]]],
    columns: Columns,
    size: int,
) -> dict[str, Scores]:
    """The scores of each reward by its name: one per completion, before weighting.

    Each call of a reward scores at most `size` completions, as in a step: its time budget is meant
    for that number.

    Raises:
        RewardError: a reward failed.
    """
    found: dict[str, Scores] = {name: [] for name in rewards.names}
    named = list(zip(rewards.names, rewards.functions, rewards.processing_classes, strict=True))
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        arguments = {name: cells[part] for name, cells in columns.items()}
        arguments |= {
            "prompts": prompts[part],
            "completions": [text for text, _ in completions[part]],
        }
        arguments["completion_ids"] = [ids for _, ids in completions[part]]
        for name, function, tokenizer in named:
            by_model = isinstance(function, nn.Module)
            found[name] += (
                _by_model(function, tokenizer, arguments)
                if by_model
                else _by_function(function, arguments)
            )
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
        text=texts,
        return_tensors="pt",
        padding=True,
        padding_side="right",
        add_special_tokens=False,
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


def weighted_sums(rewards: RewardSet, scores: Mapping[str, Scores]) -> Scores:
    """The weighted sum of the scores of each completion; None for a completion that no reward
    scored."""
    sums: Scores = []
    for row in zip(*(scores[name] for name in rewards.names), strict=True):
        products = [
            weight * one
            for weight, one in zip(rewards.weights, row, strict=True)
            if one is not None
        ]
        sums.append(sum(products) if products else None)
    return sums


def mean_scores(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Mean of each reward over the completions that it scored, by its name. Omits rewards that
    scored none."""
    found: dict[str, float] = {}
    for name, row in scores.items():
        known = [one for one in row if one is not None]
        if known:
            found[name] = fmean(known)
    return found


def load_exported_model(
    folder: Path, dtype: str, device: torch.device, *, remote_code: bool
) -> PreTrainedModel:
    """The model of a folder as transformers loads it: of an adapter its base with the adapter on
    top."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=remote_code
    )
    return model.to(device).eval()


def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    training: TrainingSpec,
    *,
    batch: int,
    seed: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[tuple[Completion, list[int]]]:
    """One completion per prompt, `batch` at a time, and its tokens; the same for the same seed on
    the same machine. `on_batch` is called after each."""
    set_seed(seed)
    config = _generation_settings(tokenizer, training)
    found: list[tuple[Completion, list[int]]] = []
    for start in range(0, len(prompts), batch):
        found += _complete(model, tokenizer, prompts[start : start + batch], config)
        on_batch()
    return found


def _generation_settings(
    tokenizer: PreTrainedTokenizerBase, training: TrainingSpec
) -> GenerationConfig:
    """The sampling of spec.training."""
    return GenerationConfig(
        max_new_tokens=training.max_completion_length,
        do_sample=True,
        temperature=training.temperature,
        top_p=training.top_p,
        top_k=training.top_k,
        min_p=training.min_p,
        repetition_penalty=training.repetition_penalty,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        disable_compile=True,
    )


@torch.no_grad()
def _complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
) -> Iterator[tuple[Completion, list[int]]]:
    encoded = _encoded(tokenizer, prompts).to(model.device)
    tokens: Any = model.generate(**encoded, generation_config=config)
    for prompt, row in zip(
        prompts, tokens[:, encoded["input_ids"].size(1) :].tolist(), strict=True
    ):
        own = _until_end(row, config.eos_token_id)
        text = str(tokenizer.decode(own, skip_special_tokens=True))
        yield (text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]), own


def _encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> Any:
    if isinstance(prompts[0], str):
        return tokenizer(text=list(prompts), padding=True, return_tensors="pt")
    return tokenizer.apply_chat_template(
        list(prompts),
        add_generation_prompt=True,
        tokenize=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )


def _until_end(tokens: list[int], end: int | None) -> list[int]:
    """Up to the token that ended it, and with it."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def evaluate_held_out(
    plan: TrainingPlan,
    folder: Path,
    completions: int | None = None,
    seed: int | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> Score:
    """Score the model in the folder on the plan's dataset, sampled as in the plan's training.

    Args:
        plan: whose dataset, rewards and sampling.
        folder: the exported model.
        completions: of each row; None for training.numGenerations.
        seed: of the sampling; None for training.seed.
        on_batch: called after each batch of completions.

    Raises:
        BadInput: the model, the dataset or a reward can't be used.
        RewardError: a reward failed.
    """
    hub = Hub(plan.revisions)
    rewards = build_rewards(plan.rewards, device=device(plan.execution), hub=hub)
    each = completions or plan.training.num_generations
    if seed is None:
        seed = plan.training.seed
    try:
        scores = _scores(plan, folder, rewards, hub, each=each, seed=seed, on_batch=on_batch)
    finally:
        rewards.close()
    sums = weighted_sums(rewards, scores)
    by_row = [sums[start : start + each] for start in range(0, len(sums), each)]
    try:
        return score(by_row, mean_scores(scores))
    except ValueError as error:
        raise BadInput(
            f"evaluation: {error}: the rewards had nothing to say about any of them"
        ) from error


def _scores(
    plan: TrainingPlan,
    folder: Path,
    rewards: RewardSet,
    hub: Hub,
    *,
    each: int,
    seed: int,
    on_batch: Callable[[], None],
) -> dict[str, Scores]:
    """What each reward says of each completion; those of one row follow each other."""
    execution, remote_code = plan.execution, plan.model.trust_remote_code
    tokenizer = load_tokenizer(Source(str(folder), folder, "", execution.dtype), remote_code)
    prompts, columns = _rows(plan.dataset, plan.training, tokenizer, rewards, hub, each=each)
    model = load_exported_model(
        folder, execution.dtype, device(plan.execution), remote_code=remote_code
    )
    batch = execution.generation_sub_batch or execution.micro_batch
    completions = sample_completions(
        model, tokenizer, prompts, plan.training, batch=batch, seed=seed, on_batch=on_batch
    )
    size = plan.training.prompts_per_step * plan.training.num_generations
    return score_completions(rewards, prompts, completions, columns, size)


def _rows(
    dataset: DatasetSpec,
    training: TrainingSpec,
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardSet,
    hub: Hub,
    *,
    each: int,
) -> tuple[list[Prompt], Columns]:
    """Prompts and columns of the dataset, with each row repeated for each of its completions."""
    root = Path(os.environ.get(DATA_MOUNT_ENV, DATA_MOUNT))
    few = training.model_copy(
        update={"prompts_per_step": 1, "generation_batch_size": None}
    )  # no step to fill
    rows = load_prompts(dataset, few, tokenizer, root=root, hub=hub).rows
    rewards.check_dataset(rows)
    repeated = rows.select([index for index in range(len(rows)) for _ in range(each)])
    columns = {name: list(repeated[name]) for name in repeated.column_names if name != "prompt"}
    return list(repeated["prompt"]), columns
