"""Tiny random models with a character tokenizer, saved as Hugging Face folders.

There is no model hub where the tests run, and bit-for-bit facts need full control of the weights.
The policy is the acceptance run's (grpo_acceptance.tiny_model).
"""

from pathlib import Path

from transformers import Qwen2Config, Qwen2ForSequenceClassification, set_seed

from grpo_acceptance.tiny_model import save_tiny, tiny_config, tiny_tokenizer


def config(tied: bool = True, dropout: float = 0.0) -> Qwen2Config:
    """The policy's configuration."""
    return tiny_config(tied, dropout)


def save_policy(
    folder: Path, seed: int = 0, tied: bool = True, dropout: float = 0.0, shard: str = "50GB"
) -> Path:
    """A causal language model in float32."""
    return save_tiny(folder, config(tied, dropout), seed, shard)


def save_reward_model(folder: Path, labels: int = 1) -> Path:
    """A sequence-classification model."""
    set_seed(1)
    settings = config()
    settings.num_labels = labels
    Qwen2ForSequenceClassification(settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
