"""A TRL script, and what `grpo init --from-trl` makes of it."""

from pathlib import Path
from typing import Any

from grpo_api.job import parse_spec
from grpo_cli.__main__ import main
from grpo_cli.show.kubectl_yaml import load_documents

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SCRIPT = f"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def letters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

trainer = GRPOTrainer(
    model="{MODEL}",
    reward_funcs=letters,
    args=GRPOConfig(SETTINGS),
    train_dataset=load_dataset("openai/gsm8k", "main", split="train"),
)
trainer.train()
"""


def script(settings_text: str = "", **replaced: str) -> str:
    """The script with these settings, and other texts in place of some of its own."""
    text = SCRIPT.replace("SETTINGS", settings_text)
    for old, new in replaced.items():
        text = text.replace({"dataset": 'load_dataset("openai/gsm8k", "main", split="train")',
                             "model": f'"{MODEL}"', "rewards": "=letters"}[old], new)  # fmt: skip
    return text


def init(folder: Path, text: str, *options: str, name: str = "train.py") -> list[dict[str, Any]]:
    """The objects that the command writes."""
    path, output = folder / name, folder / "job.yaml"
    path.write_text(text)
    output.unlink(missing_ok=True)
    arguments = ["init", "--from-trl", str(path), "-o", str(output), "--processes", "1", *options]
    assert main(arguments) == 0
    return load_documents(output.read_text())


def spec_of(folder: Path, text: str, *options: str, name: str = "train.py") -> dict[str, Any]:
    """The job's spec, which parses."""
    spec: dict[str, Any] = init(folder, text, *options, name=name)[-1]["spec"]
    parse_spec(spec, creating=True)
    return spec


def notes(folder: Path) -> list[str]:
    """What the file says it could not take."""
    lines = (folder / "job.yaml").read_text().splitlines()
    return [line.removeprefix("# - ") for line in lines if line.startswith("# - ")]


CHAT = (
    'load_dataset("openai/gsm8k", "main")["train"].map(lambda x: {"prompt": [{"role": "system", '
    '"content": "Be brief."}, {"role": "user", "content": x["question"]}], "goal": x["answer"]})'
)
"""Rows of chats, all of which the spec can say."""
