"""Trains small runs that are healthy, and runs that die of a known cause, and keeps their histories
for the tests of the findings.

Bare TRL trains the model of the first job on its sums. Healthy runs differ in seed and learning
rate. Each death is made on purpose, by settings or rewards that cause it in practice. Half an hour
on two cores:

    python -m benchmarks finding_runs [--steps N] [--healthy N] [--each N] [--write]

`--write` replaces the histories that tests/unit/test_finding_runs.py replays; `make codegen` then
writes their table into docs/reference/findings.md.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import table
from grpo_api.findings.diagnosis import diagnose, finding_message
from grpo_api.findings.step_row import step_row
from grpo_codegen.stories.finding_runs import DEATHS, HEALTHY, HISTORIES

KEYS = (
    *("step", "loss", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm"),
    *("clip_ratio/region_mean", "completions/mean_length", "completions/min_length"),
    *("completions/max_length", "completions/clipped_ratio", "step_time"),
)
"""What is kept of each step, beside the means of the reward functions."""
LEARNING_RATES = (2e-5, 4.5e-5, 9e-5)
BATCH = {"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 48}
RESULT = re.compile(r"#### (\d+)\s*$")
Row = dict[str, Any]
Reward = Callable[..., list[float | None]]


def accuracy(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """1 for the right result."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        given = RESULT.search(_text(completion))
        right = RESULT.search(expected)
        scores.append(float(given is not None and given[1] == (right and right[1])))
    return scores


def words(completions: list[Any], **_: Any) -> list[float | None]:
    """More for longer answers: a reward that counts words."""
    return [len(_text(completion)) / 60 for completion in completions]


def sevens(completions: list[Any], **_: Any) -> list[float | None]:
    """The share of sevens among the digits: a format reward that can be gamed."""
    texts = [_text(completion) for completion in completions]
    digits = [re.findall(r"\d", text) for text in texts]
    return [found.count("7") / max(1, len(found)) for found in digits]


def nothing(completions: list[Any], **_: Any) -> list[float | None]:
    """The same for all: a task that is too hard."""
    return [0.0 for _ in completions]


def chance(completions: list[Any], **_: Any) -> list[float | None]:
    """Noise: a reward that says nothing of the answer."""
    return [random.random() for _ in completions]


def _text(completion: Any) -> str:
    return completion[0]["content"] if isinstance(completion, list) else str(completion)


HARSH = {"beta": 0.0, "lr_scheduler_type": "constant"}
LEAP = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 80, "learning_rate": 1e-2}
CAUSES: dict[str, tuple[dict[str, Any], list[Reward], list[float]]] = {
    "entropy": ({**HARSH, "learning_rate": 1e-3}, [sevens], [1.0]),
    "length": ({**HARSH, "learning_rate": 3e-4, "max_completion_length": 96}, [words], [1.0]),
    "hacking": ({**HARSH, "learning_rate": 2e-4}, [accuracy, sevens], [0.3, 2.0]),
    "too hard": ({**HARSH, "learning_rate": 4.5e-5}, [nothing], [1.0]),
    "drift": ({"beta": 1e-4, "learning_rate": 6e-4}, [chance], [1.0]),
    "leap": ({**LEAP, "beta": 0.01, "max_grad_norm": 100.0}, [accuracy], [1.0]),
}
"""Settings, reward functions and their weights, by what a run dies of."""
assert CAUSES.keys() == DEATHS.keys(), "a death that no table explains"


class Task(NamedTuple):
    """A run that is to be trained."""

    name: str
    settings: dict[str, Any]
    rewards: list[Reward]


def tasks(steps: int, healthy: int, each: int) -> list[Task]:
    """All runs."""
    runs = []
    for number in range(healthy):
        settings: dict[str, Any] = {
            "beta": 0.08,
            "learning_rate": LEARNING_RATES[number % len(LEARNING_RATES)],
            "lr_scheduler_type": "constant",
            "scale_rewards": "none",
        }
        common = {"max_steps": steps, "seed": number}
        runs.append(Task(f"{HEALTHY} {number}", settings | common, [accuracy]))
    for name, (cause, rewards, weights) in CAUSES.items():
        for number in range(each):
            own = {"max_steps": steps, "seed": 1000 + number, "reward_weights": weights}
            runs.append(Task(f"{name} {number}", cause | own, rewards))
    return runs


def trained(folder: Path, task: Task) -> list[Row]:
    """One run of bare TRL, step by step."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    config = GRPOConfig(
        output_dir=str(folder / "output"), use_cpu=True, bf16=False, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, gradient_checkpointing=False,
        **{**BATCH, **task.settings},
    )  # fmt: skip
    random.seed(config.seed)
    data = load_dataset("json", data_files=str(folder / "arithmetic.jsonl"), split="train")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=task.rewards, args=config, train_dataset=data.shuffle(seed=config.seed),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [_short(row) for row in trainer.state.log_history if "loss" in row]


def _short(row: Row) -> Row:
    means = {key for key in row if key.startswith("rewards/") and key.endswith("/mean")}
    return {
        key: float(f"{row[key]:.4g}") if isinstance(row[key], float) else row[key]
        for key in (*KEYS, *sorted(means))
        if key in row
    }


def main() -> int:
    """Train all runs, print what was found in each, and keep them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--healthy", type=int, default=60)
    parser.add_argument("--each", type=int, default=6, help="runs of each death")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the histories")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from grpo_trainer import quickstart

    runs = tasks(options.steps, options.healthy, options.each)
    rows = []
    # torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.processes, context) as pool,
    ):
        quickstart.make(Path(folder), problems=512)
        histories = list(pool.map(partial(trained, Path(folder)), runs))
    if options.write:
        lines = [
            json.dumps({"run": run.name, "steps": steps}) + "\n"
            for run, steps in zip(runs, histories, strict=True)
        ]
        HISTORIES.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    for run, steps in zip(runs, histories, strict=True):
        found = diagnose(row for row in map(step_row, steps) if row is not None)
        reward = f"{steps[-1].get('reward', 0):.3g}"
        rows.append([run.name, reward, "; ".join(map(finding_message, found))])
    print(table(["run", "last reward", "findings"], rows))
    return 0
