"""GRPO of a thinking model whose template is told not to think."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward


def upper_case(completions: list[Any], **kwargs: Any) -> list[float]:
    """Capital letters."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(sum(letter.isupper() for letter in content)) for content in contents]


trainer = GRPOTrainer(
    model="./thinking-model",
    reward_funcs=[think_format_reward, upper_case],
    args=GRPOConfig(
        output_dir="out",
        chat_template_kwargs={"enable_thinking": False},
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        max_steps=10,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="chats.jsonl", split="train"),
)
trainer.train()
