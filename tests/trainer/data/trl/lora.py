"""GRPO of a LoRA adapter, with a KL term against the base."""

import re
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL_ID = "./model"
DIGIT = re.compile(r"\d")


def count_digits(text: str) -> int:
    """Digits of a text."""
    return len(DIGIT.findall(text))


def digit_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Half a point for each digit."""
    return [0.5 * count_digits(completion[0]["content"]) for completion in completions]


def main() -> GRPOTrainer:
    """Train."""
    dataset = load_dataset("json", data_files="chats.jsonl", split="train")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_ID)
    model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype=torch.float32)
    peft_config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
    )
    config = GRPOConfig(
        output_dir="out",
        learning_rate=5e-3,
        beta=0.04,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=8,
        temperature=0.9,
        max_steps=10,
        logging_steps=1,
        seed=7,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[digit_reward],
        args=config,
        train_dataset=dataset,
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    trainer = main()
