"""Makes what the first example trains on: a tiny model and small arithmetic problems in GSM8K's answer format.

The demo needs no model hub and no download. The model is a 78,000-parameter Qwen2 with tied embeddings
and one token per character. It gets a short supervised warm-up, first on right answers, then on answers of which most
are wrong and some not in the asked form: afterwards it often could, but mostly doesn't say the right thing, as a base
model before alignment. The rest is GRPO's.
By hand:

    python -m examples.demo.content FOLDER      # writes FOLDER/model and FOLDER/arithmetic.jsonl
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed

SPECIAL = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-=#:.?!ĠĊ"
"""Ġ and Ċ are space and line break in the byte-level alphabet of Qwen2's tokenizer."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LARGEST = 9
"""Operands and results are 0 to 9."""
KNOWN = 0.97
"""The warm-up learns right answers in GSM8K's form until it gives them with this mean probability."""
UNLEARNED = 0.33
"""Then it learns from answers of which most are wrong, until the right ones are down to this."""
RIGHT_SHARE = 0.25
"""Share of right answers in the second part; the others are any digit, which may be right by chance."""
FORM_SHARE = 0.75
"""Share of answers in the form in the second part; the others are the bare number."""
EMBEDDING_SCALE = 8.0
"""Factor on the initial embeddings (standard deviation 0.02): with more, so small a tied model learns much sooner."""
LONGEST = 2000
"""Steps after which a part of the warm-up ends anyhow."""
WARM_UP_BATCH = 64
LEARNING_RATE = 2e-3
UNLEARNING_RATE = 5e-4
"""Lower, so that it forgets what to say sooner than what it knows."""
CHECK_EVERY = 3
"""Steps between two looks at the probability."""


def problem(rng: random.Random) -> tuple[str, int]:
    """A question such as `3+4`, and its one-digit result."""
    result = rng.randint(0, LARGEST)
    if rng.random() < 0.5:
        first = rng.randint(0, result)
        return f"{first}+{result - first}", result
    first = rng.randint(result, LARGEST)
    return f"{first}-{first - result}", result


def write_problems(path: Path, count: int, seed: int) -> None:
    """A JSONL file with `prompt`, a chat, and `answer`, which ends in `#### <number>` as GSM8K's do."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            question, result = problem(rng)
            row = {"prompt": [{"role": "user", "content": question}], "answer": f"{question}={result}\n#### {result}"}
            file.write(json.dumps(row) + "\n")


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per character (byte pairs without merges), with a chat template.

    Qwen2's own class, because AutoTokenizer takes that for every model of type qwen2.
    """
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """The untrained model: two layers of width 64."""
    set_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def warm_up(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, seed: int) -> tuple[int, float]:
    """Supervised training in two parts; returns its steps, and the mean probability of right answers at its end."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    learned = _train(
        model, optimizer, lambda: _batch(tokenizer, rng, 1.0, 1.0), lambda: right(model, tokenizer) >= KNOWN
    )
    optimizer.param_groups[0]["lr"] = UNLEARNING_RATE
    unlearned = _train(
        model,
        optimizer,
        lambda: _batch(tokenizer, rng, RIGHT_SHARE, FORM_SHARE),
        lambda: right(model, tokenizer) <= UNLEARNED,
    )
    return learned + unlearned, right(model, tokenizer)


def _train(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], dict[str, torch.Tensor]],
    done: Callable[[], bool],
) -> int:
    """Steps until done, at most LONGEST; returns their number."""
    for step in range(LONGEST):
        if step % CHECK_EVERY == 0 and done():
            return step
        model(**batch()).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return LONGEST


@torch.no_grad()
def right(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Mean probability of the right digit after `#### `, over a fixed set of problems."""
    rng = random.Random(-1)
    problems = [problem(rng) for _ in range(128)]
    texts = [f"<|user|>{question}<|assistant|>#### " for question, _ in problems]
    digits = tokenizer.convert_tokens_to_ids([str(result) for _, result in problems])
    chances = model(**tokenizer(texts, return_tensors="pt")).logits[:, -1].softmax(dim=-1)
    return float(chances[torch.arange(len(problems)), digits].mean())


def _batch(tokenizer: Qwen2Tokenizer, rng: random.Random, right: float, form: float) -> dict[str, torch.Tensor]:
    texts = []
    for _ in range(WARM_UP_BATCH):
        question, result = problem(rng)
        said = result if rng.random() < right else rng.randint(0, LARGEST)
        lead = "#### " if rng.random() < form else ""
        texts.append(f"<|user|>{question}<|assistant|>{lead}{said}<eos>")
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    tokens = batch["input_ids"]
    assistant = (tokens == tokenizer.convert_tokens_to_ids("<|assistant|>")).int()
    unscored = (assistant.cumsum(dim=1) == assistant) | (batch["attention_mask"] == 0)
    return {**batch, "labels": tokens.masked_fill(unscored, -100)}


def make(folder: Path, problems: int = 2048, seed: int = 0) -> None:
    """Write `model` and `arithmetic.jsonl` into the folder; the same bytes for the same seed on the same machine."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    steps, chance = warm_up(model, tokenizer, seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "arithmetic.jsonl", problems, seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size} parameters, {steps} warm-up steps, right with probability {chance:.2f}; {problems} problems")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the demo's model and problems.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.problems, arguments.seed)
