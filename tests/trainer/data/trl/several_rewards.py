"""GRPO with several weighted rewards, one of which has no opinion on some completions."""

import argparse
from functools import partial
from typing import Any

from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "say it"


def get_data(split: str = "train") -> Dataset:
    """The rows as chats."""
    data = load_dataset("json", data_files="texts.jsonl")[split]
    return data.map(
        lambda row: {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": row["question"]},
            ],
            "solution": row["answer"],
        }
    )


def short_reward(completions: list[Any], limit: int, **kwargs: Any) -> list[float]:
    """One point if short."""
    return [float(len(completion[0]["content"]) < limit) for completion in completions]


def first_letter_reward(
    completions: list[Any], solution: list[str], **kwargs: Any
) -> list[float | None]:
    """Whether the answer's first letter occurs; no opinion on empty completions."""
    scores: list[float | None] = []
    for completion, answer in zip(completions, solution, strict=True):
        text = completion[0]["content"]
        scores.append(float(answer[0] in text) if text else None)
    return scores


def vowels(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Share of vowels."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in texts]


def main(args: argparse.Namespace) -> GRPOTrainer:
    """Train."""
    config = GRPOConfig(
        output_dir="out",
        learning_rate=args.lr,
        loss_type="bnpo",
        beta=0.1,
        reward_weights=[1.0, 0.25, 2.0],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        max_steps=10,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        "./model",
        [partial(short_reward, limit=6), first_letter_reward, vowels],
        config,
        get_data(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-3)
    trainer = main(parser.parse_args([]))
