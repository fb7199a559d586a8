"""GRPO as in TRL's quickstart: one reward function on chats."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="chats.jsonl", split="train")


def reward_num_unique_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """Counts the letters that occur."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in contents]


training_args = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    learning_rate=1e-3,
    max_steps=10,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
)
trainer = GRPOTrainer(
    model="./model",
    reward_funcs=reward_num_unique_letters,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
