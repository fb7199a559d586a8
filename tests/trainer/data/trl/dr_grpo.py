"""Dr. GRPO: no division by the length or by the deviation of the rewards; a moving reference."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

train_dataset = load_dataset("json", data_files={"train": "chats.jsonl"})["train"]


async def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """A tenth of the letters."""
    return [len(completion[0]["content"]) / 10 for completion in completions]


trainer = GRPOTrainer(
    model="./model",
    reward_funcs=[length_reward],
    args=GRPOConfig(
        output_dir="out",
        loss_type="dr_grpo",
        scale_rewards=False,
        beta=0.05,
        sync_ref_model=True,
        ref_model_sync_steps=3,
        ref_model_mixup_alpha=0.5,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        max_steps=10,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=train_dataset,
)
trainer.train()
