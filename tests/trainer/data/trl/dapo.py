"""DAPO: clip-higher, token-level loss, overlong completions punished and left out of the loss."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

MAX_LENGTH = 12
CACHE = 4


def lower_case(completions: list[Any], **kwargs: Any) -> list[float]:
    """Share of small letters."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.islower() for letter in text) / MAX_LENGTH for text in texts]


config = GRPOConfig(
    output_dir="out",
    loss_type="dapo",
    beta=0.0,
    epsilon=0.2,
    epsilon_high=0.28,
    num_iterations=2,
    mask_truncated_completions=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=8,
    max_completion_length=MAX_LENGTH,
    learning_rate=2e-3,
    weight_decay=0.1,
    max_steps=10,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
)
trainer = GRPOTrainer(
    model="./model",
    args=config,
    train_dataset=load_dataset("json", data_files="chats.jsonl", split="train"),
    reward_funcs=[
        lower_case,
        get_soft_overlong_punishment(max_completion_len=MAX_LENGTH, soft_punish_cache=CACHE),
    ],
)
trainer.train()
