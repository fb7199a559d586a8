"""GRPO with completions by a colocated vLLM."""

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """Letters that occur."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


trainer = GRPOTrainer(
    model="./model",
    reward_funcs=[letters],
    args=GRPOConfig(
        output_dir="out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.2,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
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
