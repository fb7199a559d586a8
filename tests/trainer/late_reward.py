"""A `python` reward that comes too late on rank 0 in some steps, for a test of what that costs.

Runs in the trainer's reward process, which inherits the rank's environment.
"""

import os
import time
from typing import Any

from grpo_api.text.contract import INDEX_ENV

LATE_STEPS = (2, 5, 7)


def score(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """The same for all."""
    if trainer_state.global_step + 1 in LATE_STEPS and os.environ[INDEX_ENV] == "0":
        time.sleep(600)
    return [1.0] * len(completions)
