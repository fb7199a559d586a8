"""`python -m grpo_trainer.quickstart FOLDER`: makes the tiny model and the small sums of a first
job.

So the quickstart needs no model hub, no download and no GPU. The model is a 78,500-parameter Qwen2
with tied embeddings. Its tokens are characters and the few words of an answer. Its pretraining has
two parts. First it learns the sums, until it knows them. Then it sees more and more random results.
In the end it prefers the right result, but gives it in a third of its answers only. GRPO makes it
give the right one. Little has to change for that, so the KL to the pretrained model stays small.
"""

import argparse
import json
import os
import random
from pathlib import Path

import torch
from transformers import BatchEncoding, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed

SPECIAL = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-=#:.?!ĠĊ"
"""Ġ and Ċ are space and line break in the byte-level alphabet of Qwen2's tokenizer."""
WORDS = ["Ġplus", "Ġminus", "Ġis", "####"]
"""Each is a token: an answer of characters alone has 22 tokens, not 13, and takes longer."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' "
    "%}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LARGEST = 9
"""Operands and results are 0 to 9."""
PROBLEMS = [
    *(
        (f"{first}+{second}", first + second)
        for first in range(LARGEST + 1)
        for second in range(LARGEST + 1 - first)
    ),
    *(
        (f"{first}-{second}", first - second)
        for first in range(LARGEST + 1)
        for second in range(first + 1)
    ),
]
"""All questions such as `3+4`, with their one-digit results. They are equally frequent: of two that
are not, one would be learned long before the other."""
SIGNS = {"+": "plus", "-": "minus"}
EMBEDDING_SCALE = 8.0
"""Factor on the initial embeddings (standard deviation 0.02): with more, so small a tied model
learns much sooner."""
BATCH = 64
SECOND_MOMENT_DECAY = 0.98
"""Adam's beta2, shorter than its default: a pretraining of some hundred steps learns sooner."""
KNOWN = 0.98
"""The pretraining on right sums ends when the mean probability of the right answer is so high."""
KNOWING_RATE = 2e-3
CHECK_EVERY = 20
"""Steps between two looks at the probability."""
LONGEST = 2000
"""Steps after which it ends in any case."""
DOUBT_STEPS = 150
"""Steps of the second part, in which more and more results are random."""
DOUBT_RATE = 1e-3
RIGHT_SHARE = 0.28
"""Share of right results in the end; all others are random digits, of which a tenth is right."""
RAMP_STEPS = 105
"""Steps until RIGHT_SHARE is reached. A sudden change would make the model forget how to
calculate."""
Batch = tuple[BatchEncoding, torch.Tensor]
"""Chats, and the distribution of each next token of their answers: (batch, length - 1,
vocabulary)."""


def answer(question: str, result: int) -> str:
    """Return the answer as GSM8K writes one: a sentence, and a last line of `#### <number>`."""
    first, sign, second = tuple(question)
    return f"{first} {SIGNS[sign]} {second} is {result}.\n#### {result}"


def write_problems(path: Path, count: int, seed: int) -> None:
    """A JSONL file with `prompt`, a chat, and `answer`."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            question, result = rng.choice(PROBLEMS)
            row = {
                "prompt": [{"role": "user", "content": question}],
                "answer": answer(question, result),
            }
            file.write(json.dumps(row) + "\n")


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-pair tokenizer of characters and WORDS, with a chat template.

    Qwen2's own class, because AutoTokenizer takes that for every model of type qwen2.
    """
    merges = [(word[:end], word[end]) for word in WORDS for end in range(1, len(word))]
    tokens = [*SPECIAL, *CHARACTERS, *("".join(pair) for pair in merges)]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
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
            # 32 wide each: an engine on CPUs has no kernels for narrower ones
            num_attention_heads=2,
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


def pretrain(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, seed: int) -> int:
    """Train the model to know its sums, and then to doubt them. Return the number of steps."""
    rng = random.Random(seed)
    optimizer = _optimizer(model)
    learned = 0
    while learned < LONGEST and right_chance(model, tokenizer) < KNOWN:
        for _ in range(CHECK_EVERY):
            _train(model, optimizer, KNOWING_RATE, _batch(tokenizer, rng, right_share=1.0))
        learned += CHECK_EVERY
    optimizer = _optimizer(model)
    for step in range(DOUBT_STEPS):
        learning_rate, right_share = doubt(step)
        _train(model, optimizer, learning_rate, _batch(tokenizer, rng, right_share))
    return learned + DOUBT_STEPS


def doubt(step: int) -> tuple[float, float]:
    """Return the learning rate and the share of right results of a step of the second part, counted
    from 0."""
    rise = (step + 1) / 10
    fall = (DOUBT_STEPS - step) / (DOUBT_STEPS - RAMP_STEPS)
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return DOUBT_RATE * min(1.0, rise, fall), 1 - (1 - RIGHT_SHARE) * ramp


def _optimizer(model: Qwen2ForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, SECOND_MOMENT_DECAY))


def _train(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, learning_rate: float, batch: Batch
) -> None:
    """Train for one step."""
    optimizer.param_groups[0]["lr"] = learning_rate
    inputs, targets = batch
    logprobs = model(**inputs).logits[:, :-1].log_softmax(dim=-1)
    loss = -(targets * logprobs).sum() / targets.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _batch(tokenizer: Qwen2Tokenizer, rng: random.Random, right_share: float) -> Batch:
    """Return chats, a share of which have the right result, and their targets.

    The target of a result is its distribution over all chats, not the digit of this chat. The model
    then learns within few steps to doubt all results alike.
    """
    problems = rng.choices(PROBLEMS, k=BATCH)
    chat_results = [
        result if rng.random() < right_share else rng.randint(0, LARGEST) for _, result in problems
    ]
    inputs = _chats(tokenizer, [question for question, _ in problems], chat_results)
    tokens = inputs["input_ids"]
    digits = torch.tensor(
        tokenizer.convert_tokens_to_ids([str(digit) for digit in range(LARGEST + 1)])
    )
    results = torch.zeros(BATCH, len(tokenizer))
    results[:, digits] = (1 - right_share) / len(digits)
    results[torch.arange(BATCH), digits[[result for _, result in problems]]] += right_share
    targets = torch.nn.functional.one_hot(tokens[:, 1:], len(tokenizer)).float()
    # The full stop follows the first result; the model copies the second one from it.
    full_stop = tokenizer.convert_tokens_to_ids(".")
    row, column = (tokens[:, 2:] == full_stop).nonzero(as_tuple=True)
    targets[row, column] = results
    return inputs, targets * _answer_mask(tokenizer, inputs).unsqueeze(-1)


def _chats(tokenizer: Qwen2Tokenizer, questions: list[str], results: list[int]) -> BatchEncoding:
    texts = [
        f"<|user|>{question}<|assistant|>{answer(question, result)}<eos>"
        for question, result in zip(questions, results, strict=True)
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")


def _answer_mask(tokenizer: Qwen2Tokenizer, inputs: BatchEncoding) -> torch.Tensor:
    """Return whether the next token belongs to the assistant's answer: (batch, length - 1)."""
    assistant_marks = (
        inputs["input_ids"] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    ).cumsum(dim=1)
    return torch.logical_and(assistant_marks[:, :-1] > 0, inputs["attention_mask"][:, 1:] == 1)


@torch.no_grad()
def right_chance(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Return the mean probability of the whole right answer, over all problems."""
    inputs = _chats(
        tokenizer, [question for question, _ in PROBLEMS], [result for _, result in PROBLEMS]
    )
    logprobs = model(**inputs).logits[:, :-1].log_softmax(dim=-1)
    of_tokens = logprobs.gather(-1, inputs["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    return float((of_tokens * _answer_mask(tokenizer, inputs)).sum(dim=1).exp().mean())


def make_model_folder(folder: Path, seed: int = 0) -> str:
    """Write the model, whole or not at all; one that is there stays, since a restart must find the
    same.

    The same bytes for the same seed on the same machine. Returns what it did, in words.
    """
    if folder.exists():
        return f"{folder} is there already"
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    steps = pretrain(model, tokenizer, seed)
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    chance = right_chance(model, tokenizer)
    return (
        f"{folder}: {size} parameters, {steps} steps of pretraining, right with probability "
        f"{chance:.2f}"
    )


def make(folder: Path, problems: int, seed: int = 0) -> None:
    """Write `model` into the folder, and `arithmetic.jsonl` where `problems` is not 0."""
    folder.mkdir(parents=True, exist_ok=True)
    print(make_model_folder(folder / "model", seed))
    if problems:
        write_problems(folder / "arithmetic.jsonl", problems, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m grpo_trainer.quickstart", description=__doc__)
    parser.add_argument("folder", type=Path, help="where `model` is written")
    parser.add_argument(
        "--problems",
        type=int,
        default=0,
        help="also write arithmetic.jsonl with this many problems",
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.problems, arguments.seed)
