"""GRPO of a base model on plain texts, without a chat template."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="texts.jsonl", split="train")
dataset = dataset.rename_column("question", "prompt")
dataset = dataset.remove_columns(["answer"])


def reward_spread(completions: list[str], **kwargs: Any) -> list[float]:
    """Near six different letters."""
    return [-float(abs(6 - len(set(completion)))) for completion in completions]


trainer = GRPOTrainer(
    model="./model",
    reward_funcs=[reward_spread],
    args=GRPOConfig(
        output_dir="out",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=0.3,
        adam_beta2=0.95,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-3,
        max_grad_norm=0.1,
        scale_rewards="batch",
        shuffle_dataset=False,
        max_steps=10,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=dataset,
)
trainer.train()
