"""Makes what the first example trains on: a tiny model and small arithmetic problems in GSM8K's answer format.

Exists so that the demo needs no model hub and no download. The model is a 77,000-parameter Qwen2 with tied embeddings
and one token per character. It gets a short supervised warm-up on answers of which most are wrong: afterwards it knows
the form of an answer and leans a little towards the right one, as a real base model does, and leaves the rest to GRPO.
Called by the demo, the example's preparation Job and the trainer's tests:

    python -m examples.demo.content FOLDER      # writes FOLDER/model and FOLDER/arithmetic.jsonl
"""

import argparse
import json
import random
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
SYSTEM_PROMPT = "answer like #### 7"
"""What examples/01-first-job.yaml sets as dataset.systemPrompt: the warm-up must have seen it."""
LARGEST = 9
"""Operands are 0 to 9; results 0 to 18."""
RIGHT_SHARE = 0.3
"""Share of the warm-up's answers that are right."""
FORM_SHARE = 0.8
"""Share of the warm-up's answers in GSM8K's form, `#### 7`; the others are the bare number."""
WARM_UP_STEPS = 500
WARM_UP_BATCH = 64
WARM_UP_LEARNING_RATE = 3e-3


def problem(rng: random.Random) -> tuple[str, int]:
    """A question such as `3+4` and its result, never negative."""
    first, second = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    if rng.random() < 0.5:
        return f"{first}+{second}", first + second
    high, low = max(first, second), min(first, second)
    return f"{high}-{low}", high - low


def write_problems(path: Path, count: int, seed: int) -> None:
    """A JSONL file with columns `question` and `answer`, whose answer ends in `#### <number>` as GSM8K's do."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            question, result = problem(rng)
            row = {"question": question, "answer": f"{question}={result}\n#### {result}"}
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
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def warm_up(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, seed: int) -> float:
    """Supervised training on noisy answers; returns the last loss."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WARM_UP_STEPS)
    loss = torch.zeros(())
    for _ in range(WARM_UP_STEPS):
        loss = model(**_batch(tokenizer, rng)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


def _batch(tokenizer: Qwen2Tokenizer, rng: random.Random) -> dict[str, torch.Tensor]:
    prompts, texts = [], []
    for _ in range(WARM_UP_BATCH):
        question, result = problem(rng)
        said = result if rng.random() < RIGHT_SHARE else rng.randint(0, 2 * LARGEST)
        prompts.append(f"<|system|>{SYSTEM_PROMPT}<|user|>{question}<|assistant|>")
        texts.append(f"{prompts[-1]}{'#### ' if rng.random() < FORM_SHARE else ''}{said}<eos>")
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, prompt in enumerate(prompts):
        labels[row, : len(tokenizer(prompt)["input_ids"])] = -100
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def make(folder: Path, problems: int = 2048, seed: int = 0) -> None:
    """Write `model` and `arithmetic.jsonl` into the folder; the same bytes for the same seed on the same machine."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    loss = warm_up(model, tokenizer, seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "arithmetic.jsonl", problems, seed)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, warm-up loss {loss:.3f}, {problems} problems")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the demo's model and problems.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.problems, arguments.seed)
