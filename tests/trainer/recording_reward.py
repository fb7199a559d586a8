"""A `python` reward that writes down what it was asked for: each rank's completions by step.

Runs in the trainer's reward process.
"""

import json
import os
from pathlib import Path
from typing import Any

from grpo_api.text.contract import INDEX_ENV
from tests.trainer import stopping_reward

RECORD_ENV = "GRPO_TEST_RECORD"
"""Folder of what is written."""


def digits(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """Share of digits in each completion."""
    with (Path(os.environ[RECORD_ENV]) / f"{os.environ[INDEX_ENV]}.jsonl").open("a") as record:
        record.write(json.dumps([trainer_state.global_step, completions]) + "\n")
    return stopping_reward.digits(completions, trainer_state)


def recorded(folder: Path, ranks: int) -> dict[int, list[str]]:
    """By the number of finished steps, the completions of all ranks in the order of the ranks."""
    found: dict[int, list[str]] = {}
    for rank in range(ranks):
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            step, completions = json.loads(line)
            found.setdefault(step, []).extend(completions)
    return found
