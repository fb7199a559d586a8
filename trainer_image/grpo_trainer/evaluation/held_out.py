"""An evaluation from its plan to its score: model, rows, completions, rewards. Imports torch and
all that it needs.

The exported model is loaded as anybody would load it, and sampled as the job sampled while it
trained. Each reward function is called as TRL calls it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    set_seed,
)
from trl.data_utils import apply_chat_template

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.training import TrainingSpec

from ..data.dataset import load_prompts
from ..data.prompts import Prompt, PromptEncoder
from ..generation.stop_strings import StopStrings
from ..hub.repositories import Hub
from ..process.step_counters import weighted_sum
from ..rewards.reward_base import Completion, Scores, reward_arguments
from ..rewards.reward_set import RewardSet, ScoredCompletions, build_rewards, call_reward
from ..runtime.errors import BadInput
from ..training.build_run import device
from ..weights.model_files import Source, load_tokenizer, require_decoder
from .score import Score, mean_score, score

Columns = Mapping[str, Sequence[Any]]
"""The dataset's columns but the prompt's, a cell per completion."""


def score_completions(
    rewards: RewardSet,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, list[int]]],
    columns: Columns,
    *,
    size: int,
    max_steps: int | None,
    template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Scores]:
    """The scores of each reward by its name: one per completion, before weighting.

    Each call of a reward scores at most `size` completions, those of one process and generation:
    its time budget is meant for that number. TRL gives the template of a reward model
    spec.model.chatTemplateKwargs, too.

    Raises:
        RewardError: a reward failed.
    """
    scores_by_name: dict[str, Scores] = {name: [] for name in rewards.names}
    named = list(zip(rewards.names, rewards.functions, rewards.processing_classes, strict=True))
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        arguments = reward_arguments(
            {name: cells[part] for name, cells in columns.items()},
            prompts[part],
            [text for text, _ in completions[part]],
            [ids for _, ids in completions[part]],
            max_steps,
            is_over=True,
        )
        for name, function, tokenizer in named:
            if isinstance(function, nn.Module):
                scores = _model_scores(function, tokenizer, arguments, template_kwargs or {})
            else:
                scores = call_reward(function, arguments)
            scores_by_name[name] += scores
    return scores_by_name


def _model_scores(
    model: Any, tokenizer: Any, arguments: Mapping[str, Any], template_kwargs: Mapping[str, Any]
) -> Scores:
    pairs = zip(arguments["prompts"], arguments["completions"], strict=True)
    texts = [_judged_text(*pair, tokenizer, template_kwargs) for pair in pairs]
    encoded = tokenizer(
        text=texts, return_tensors="pt", padding=True, padding_side="right",
        add_special_tokens=False,
    ).to(next(model.parameters()).device)  # fmt: skip
    with torch.inference_mode():
        logits = model(**encoded).logits[:, 0]
    return [None if math.isnan(logit) else logit for logit in logits.tolist()]


def _judged_text(
    prompt: Any, completion: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> str:
    """What a reward model reads of one completion: plain text, or the rendered conversation."""
    if isinstance(prompt, str):
        return f"{prompt}{completion}"
    messages = {"messages": prompt + completion}
    return str(apply_chat_template(messages, tokenizer, **template_kwargs)["text"])


def weighted_sums(rewards: RewardSet, scores: Mapping[str, Scores]) -> Scores:
    """The weighted sum of the scores of each completion; None for a completion that no reward
    scored."""
    sums: Scores = []
    for row in zip(*(scores[name] for name in rewards.names), strict=True):
        rewards_of_row = [math.nan if reward is None else reward for reward in row]
        total = weighted_sum(rewards_of_row, rewards.weights)
        sums.append(None if math.isnan(total) else total)
    return sums


def mean_scores(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Mean of each reward over the completions that it scored, by its name. Omits rewards that
    scored none."""
    means = {name: mean_score(row) for name, row in scores.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def sample_completions(
    model: PreTrainedModel,
    encoder: PromptEncoder,
    prompts: Sequence[Prompt],
    training: TrainingSpec,
    *,
    generation: GenerationSpec,
    batch: int,
    seed: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[tuple[Completion, list[int]]]:
    """One completion per prompt, `batch` at a time, and its tokens; the same for the same seed on
    the same machine. `on_batch` is called after each.

    Raises:
        BadInput: spec.generation.kwargs are vLLM's, or the tokenizer knows no stop strings.
    """
    stop = generation.stop or ()
    if stop:
        require_decoder(encoder.tokenizer)
    end_tokens = _end_tokens(model, encoder.tokenizer)
    config = _generation_settings(encoder.tokenizer, end_tokens, training, generation)
    set_seed(seed)
    completions: list[tuple[Completion, list[int]]] = []
    for start in range(0, len(prompts), batch):
        completions += _complete(model, encoder, list(prompts[start : start + batch]), config, stop)
        on_batch()
    return completions


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion, as TRL finds them: the model may have several, and the
    tokenizer knows one."""
    own = model.generation_config.eos_token_id
    tokens = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return [token for token in dict.fromkeys(tokens) if token is not None]


def _generation_settings(
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: list[int],
    training: TrainingSpec,
    generation: GenerationSpec,
) -> GenerationConfig:
    """The sampling of spec.training and spec.generation."""
    kwargs = generation.kwargs or {}
    if kwargs and generation.engine != "Transformers":
        raise BadInput(
            f"spec.generation.kwargs are for engine {generation.engine}, and an evaluation samples "
            "with Transformers: set spec.generation.engine to it, or remove kwargs"
        )
    settings = {
        "max_new_tokens": training.max_completion_length,
        "do_sample": True,
        "temperature": training.temperature,
        "top_p": training.top_p,
        "top_k": training.top_k,
        "min_p": training.min_p,
        "repetition_penalty": training.repetition_penalty,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_tokens or None,
    }
    return GenerationConfig(**settings, **kwargs, disable_compile=True)


@torch.no_grad()
def _complete(
    model: PreTrainedModel,
    encoder: PromptEncoder,
    prompts: list[Prompt],
    config: GenerationConfig,
    stop: Sequence[str],
) -> Iterator[tuple[Completion, list[int]]]:
    encoded = encoder.encode(prompts, padding=True, return_tensors="pt").to(model.device)
    prompt_ids = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    ]
    criterion = None
    if stop:
        criterion = StopStrings(stop, encoder.tokenizer, config.eos_token_id or (), prompt_ids)
    criteria = StoppingCriteriaList([criterion] if criterion else [])
    tokens: Any = model.generate(**encoded, generation_config=config, stopping_criteria=criteria)
    rows = tokens[:, encoded["input_ids"].size(1) :].tolist()
    if criterion:
        rows = criterion.remove_padding(rows)
    for prompt, row in zip(prompts, rows, strict=True):
        # Up to the token that ended it, and with it.
        ends = (at for at, token in enumerate(row) if token in (config.eos_token_id or ()))
        completion_ids = row[: next(ends, len(row)) + 1]
        text = str(encoder.tokenizer.decode(completion_ids, skip_special_tokens=True))
        is_text = isinstance(prompt, str)
        yield text if is_text else [{"role": "assistant", "content": text}], completion_ids


def evaluate_held_out(
    plan: TrainingPlan,
    folder: Path,
    completions: int | None = None,
    seed: int | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> Score:
    """Score the model in the folder on the plan's dataset, sampled as in the plan's training:
    `completions` of each row (None: training.numGenerations) by `seed` (None: training.seed).
    `on_batch` is called after each batch of completions.

    Raises:
        BadInput: the model, the dataset or a reward can't be used.
        RewardError: a reward failed, or it did for too many completions.
    """
    execution, model_spec, training = plan.execution, plan.model, plan.training
    remote_code, hub, on = model_spec.trust_remote_code, Hub(plan.revisions), device(execution)
    rewards = build_rewards(plan.rewards, device=on, hub=hub)
    each = completions or training.num_generations
    batch = execution.generation_sub_batch or execution.micro_batch
    try:
        # The export has the template that it was trained with; this job's own goes before it.
        source = Source(str(folder), folder, "", execution.dtype)
        tokenizer = load_tokenizer(source, remote_code, model_spec.chat_template)
        encoder = PromptEncoder(tokenizer, model_spec.chat_template_kwargs)
        prompts, columns = _rows(plan.dataset, training, encoder, rewards, hub, each=each)
        # Of an adapter transformers loads the base, with the adapter on top.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, execution.dtype), trust_remote_code=remote_code
        )
        sampled = sample_completions(
            model.to(on).eval(), encoder, prompts, training,
            generation=plan.generation, batch=batch, on_batch=on_batch,
            seed=training.seed if seed is None else seed,
        )  # fmt: skip
        scores = score_completions(
            rewards, prompts, sampled, columns,
            size=execution.micro_batch * execution.steps_per_generation,
            max_steps=training.max_steps,
            template_kwargs=model_spec.chat_template_kwargs,
        )  # fmt: skip
    finally:
        rewards.close()
    counters = rewards.counters.items()
    missing = {name: float(counted.failures + counted.timeouts) for name, counted in counters}
    scored = ScoredCompletions(len(sampled), missing)
    rewards.failure_limits.judge(0, scored, is_last=True)
    sums = weighted_sums(rewards, scores)
    by_row = [sums[start : start + each] for start in range(0, len(sums), each)]
    try:
        return score(by_row, mean_scores(scores))
    except ValueError as error:
        raise BadInput(
            f"evaluation: {error}: the rewards had nothing to say about any of them"
        ) from error


def _rows(
    dataset: DatasetSpec,
    training: TrainingSpec,
    encoder: PromptEncoder,
    rewards: RewardSet,
    hub: Hub,
    *,
    each: int,
) -> tuple[list[Prompt], Columns]:
    """Prompts and columns of the dataset, with each row repeated for each of its completions."""
    # There is no step to fill.
    few = training.model_copy(update={"prompts_per_step": 1, "generation_batch_size": None})
    kwargs = encoder.template_kwargs
    rows = load_prompts(dataset, few, encoder.tokenizer, template_kwargs=kwargs, hub=hub).rows
    rewards.check_dataset(rows)
    repeated = rows.select([index for index in range(len(rows)) for _ in range(each)])
    columns = {name: list(repeated[name]) for name in repeated.column_names if name != "prompt"}
    return list(repeated["prompt"]), columns
