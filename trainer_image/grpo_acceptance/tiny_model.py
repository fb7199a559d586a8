"""A tiny random model and its character tokenizer, made on the spot.

A machine on which the acceptance runs may reach no model hub, and bit-for-bit facts need full
control of the weights. The harness's tests train the same ones.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

SPECIAL = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character of printable ASCII, `<unk>` for others, one token per role marker."""
    printable = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate(SPECIAL + printable)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        additional_special_tokens=SPECIAL[3:],
    )
    fast.chat_template = chat_template
    return fast


def tiny_config(
    tied: bool = True, dropout: float = 0.0, hidden: int = 64, layers: int = 2
) -> Qwen2Config:
    """With the defaults about 84,000 parameters; large enough that ZeRO-3 partitions some and keeps
    some."""
    return Qwen2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def save_tiny(
    folder: Path, config: Qwen2Config | None = None, seed: int = 0, shard: str = "50GB"
) -> Path:
    """Save a causal language model in float32; the embedding is scaled so that completions vary
    with the prompt."""
    set_seed(seed)
    model = Qwen2ForCausalLM(config or tiny_config())
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(4)
    model.save_pretrained(folder, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(folder)
    return folder
