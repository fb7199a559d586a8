"""GRPO with a reward model."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="./model",
    reward_funcs="./reward-model",
    args=GRPOConfig(
        output_dir="out",
        model_init_kwargs={"dtype": "float32"},
        beta=0.02,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
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
