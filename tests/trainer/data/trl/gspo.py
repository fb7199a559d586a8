"""GSPO: one ratio per sequence, small clip range, several updates per generation."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

common: dict[str, Any] = {"use_cpu": True, "bf16": False, "logging_steps": 1}
training_args = GRPOConfig(
    output_dir="out",
    importance_sampling_level="sequence",
    loss_type="grpo",
    beta=0.0,
    epsilon=3e-4,
    epsilon_high=4e-4,
    gradient_accumulation_steps=1,
    steps_per_generation=4,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    learning_rate=1e-3,
    top_p=0.9,
    max_steps=10,
    **common,
)


def punctuation(completions: list[Any], **kwargs: Any) -> list[float]:
    """Marks of a completion."""
    return [
        float(sum(not letter.isalnum() for letter in completion[0]["content"]))
        for completion in completions
    ]


trainer = GRPOTrainer(
    model="./model",
    reward_funcs=[punctuation],
    args=training_args,
    train_dataset=load_dataset("json", data_files="chats.jsonl", split="train"),
)
trainer.train()
