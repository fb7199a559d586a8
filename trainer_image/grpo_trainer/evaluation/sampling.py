"""Completions of an exported model: loaded as anybody would load it, sampled as the job sampled while it trained."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from grpo_api.spec.training import TrainingSpec

from ..data.prompts import Prompt
from ..rewards.base import Completion


def load(folder: Path, dtype: str, device: torch.device, *, remote_code: bool) -> PreTrainedModel:
    """The model of a folder as transformers loads it: of an adapter its base with the adapter on top."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=remote_code)
    return model.to(device).eval()


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    training: TrainingSpec,
    *,
    batch: int,
    seed: int,
) -> list[tuple[Completion, list[int]]]:
    """One completion per prompt, `batch` at a time, and its tokens; the same for the same seed on the same machine."""
    set_seed(seed)
    config = _settings(tokenizer, training)
    found: list[tuple[Completion, list[int]]] = []
    for start in range(0, len(prompts), batch):
        found += _complete(model, tokenizer, prompts[start : start + batch], config)
    return found


def _settings(tokenizer: PreTrainedTokenizerBase, training: TrainingSpec) -> GenerationConfig:
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], config: GenerationConfig
) -> Iterator[tuple[Completion, list[int]]]:
    encoded = _encoded(tokenizer, prompts).to(model.device)
    tokens: Any = model.generate(**encoded, generation_config=config)
    for prompt, row in zip(prompts, tokens[:, encoded["input_ids"].size(1) :].tolist(), strict=True):
        own = _until_end(row, config.eos_token_id)
        text = str(tokenizer.decode(own, skip_special_tokens=True))
        yield (text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]), own


def _encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> Any:
    if isinstance(prompts[0], str):
        return tokenizer(text=list(prompts), padding=True, return_tensors="pt")
    return tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, tokenize=True, padding=True, return_dict=True, return_tensors="pt"
    )


def _until_end(tokens: list[int], end: int | None) -> list[int]:
    """Up to the token that ended it, and with it."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
