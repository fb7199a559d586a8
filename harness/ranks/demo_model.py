"""Tiny random models with a character tokenizer, saved as Hugging Face folders.

There is no model hub where the tests run, and bit-for-bit facts need full control of the weights.
"""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, set_seed

from .tiny_tokenizer import tiny_tokenizer

HIDDEN = 64


def config(tied: bool = True, dropout: float = 0.0) -> Qwen2Config:
    """Two layers, about 84,000 parameters; large enough that ZeRO-3 partitions some and keeps some."""
    return Qwen2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def save_policy(folder: Path, seed: int = 0, tied: bool = True, dropout: float = 0.0, shard: str = "50GB") -> Path:
    """A causal language model in float32; the embedding is scaled so that completions vary with the prompt."""
    set_seed(seed)
    model = Qwen2ForCausalLM(config(tied, dropout))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(4)
    model.save_pretrained(folder, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_reward_model(folder: Path, labels: int = 1) -> Path:
    """A sequence-classification model."""
    set_seed(1)
    settings = config()
    settings.num_labels = labels
    Qwen2ForSequenceClassification(settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
