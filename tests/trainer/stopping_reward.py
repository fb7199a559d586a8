"""A `python` reward that stops answering where a test wants to kill the run.

A kill between two polls could come a step too early or too late. Runs in the trainer's reward
process.
"""

import os
import time
from typing import Any

STOP_ENV = "GRPO_TEST_STOP_AFTER"
"""Finished steps after which the function never answers; unset: it always does."""


def digits(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """Share of digits in each completion."""
    if str(trainer_state.global_step) == os.environ.get(STOP_ENV):
        time.sleep(3600)
    return [sum(letter.isdigit() for letter in completion) / 8 for completion in completions]
