"""`python -m grpo_trainer.quickstart FOLDER`: makes the tiny model and the small sums of a first job.

So the quickstart needs no model hub, no download and no GPU. The model is a 78,000-parameter Qwen2 with tied embeddings
and one token per character. It gets a short supervised warm-up, first on answers in the asked form, then on some that
mostly lack it: afterwards it can calculate, but mostly doesn't answer as it is asked to, as a base model before
alignment. The rest is GRPO's, and it holds for sums that GRPO never trains on: what can be calculated is known before.
"""

import argparse
import json
import os
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
KNOWN = 0.99
"""The warm-up learns right answers in GSM8K's form until it gives them with this mean probability."""
FORM_SHARE = 0.2
"""Share of answers in the form in the second part; the others are the bare number."""
FORM_LEFT = 0.35
"""It ends when the mean probability of an answer in the form is down to this."""
EMBEDDING_SCALE = 8.0
"""Factor on the initial embeddings (standard deviation 0.02): with more, so small a tied model learns much sooner."""
LONGEST = 2000
"""Steps after which a part of the warm-up ends anyhow."""
WARM_UP_BATCH = 64
LEARNING_RATE = 2e-3
UNLEARNING_RATE = 5e-5
"""Lower, so that it forgets how to answer and not what."""
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
            num_attention_heads=2,  # 32 wide each: an engine on CPUs has no kernels for narrower ones
            num_key_value_heads=1,
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


def warm_up(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, seed: int) -> int:
    """Supervised training in two parts; returns its steps."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    learned = _train(model, optimizer, lambda: _batch(tokenizer, rng, 1.0), lambda: right(model, tokenizer) >= KNOWN)
    optimizer.param_groups[0]["lr"] = UNLEARNING_RATE
    unlearned = _train(
        model, optimizer, lambda: _batch(tokenizer, rng, FORM_SHARE), lambda: in_form(model, tokenizer) <= FORM_LEFT
    )
    return learned + unlearned


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


def right(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Mean probability of the right digit after `#### `, over a fixed set of problems."""
    return _chance(model, tokenizer, "#### ", str)


def in_form(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Mean probability that an answer begins with `#`, over the same problems."""
    return _chance(model, tokenizer, "", lambda _: "#")


@torch.no_grad()
def _chance(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, lead: str, following: Callable[[int], str]) -> float:
    rng = random.Random(-1)
    problems = [problem(rng) for _ in range(128)]
    texts = [f"<|user|>{question}<|assistant|>{lead}" for question, _ in problems]
    wanted = tokenizer.convert_tokens_to_ids([following(result) for _, result in problems])
    chances = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, -1].softmax(dim=-1)
    return float(chances[torch.arange(len(problems)), wanted].mean())


def _batch(tokenizer: Qwen2Tokenizer, rng: random.Random, form: float) -> dict[str, torch.Tensor]:
    texts = []
    for _ in range(WARM_UP_BATCH):
        question, result = problem(rng)
        lead = "#### " if rng.random() < form else ""
        texts.append(f"<|user|>{question}<|assistant|>{lead}{result}<eos>")
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    tokens = batch["input_ids"]
    assistant = (tokens == tokenizer.convert_tokens_to_ids("<|assistant|>")).int()
    unscored = (assistant.cumsum(dim=1) == assistant) | (batch["attention_mask"] == 0)
    return {**batch, "labels": tokens.masked_fill(unscored, -100)}


def make_model_folder(folder: Path, seed: int = 0) -> str:
    """Write the model, whole or not at all; one that is there stays, since a restart must find the same.

    The same bytes for the same seed on the same machine. Returns what it did, in words.
    """
    if folder.exists():
        return f"{folder} is there already"
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    steps = warm_up(model, tokenizer, seed)
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    chances = f"right with probability {right(model, tokenizer):.2f}, in the form with {in_form(model, tokenizer):.2f}"
    return f"{folder}: {size} parameters, {steps} warm-up steps, {chances}"


def make(folder: Path, problems: int, seed: int = 0) -> None:
    """Write `model` into the folder, and `arithmetic.jsonl` with so many problems if any are asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    print(make_model_folder(folder / "model", seed))
    if problems:
        write_problems(folder / "arithmetic.jsonl", problems, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m grpo_trainer.quickstart", description=__doc__)
    parser.add_argument("folder", type=Path, help="where `model` is written")
    parser.add_argument("--problems", type=int, default=0, help="also write arithmetic.jsonl with so many problems")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.problems, arguments.seed)
