"""Keeps a few sample completions on the checkpoint volume: `attempt-N/samples.jsonl`, one JSON object per line.

/progress shows the latest completions only and ends with its pod, while how the answers changed over a run is what
people look at afterwards. The samples are rank 0's own.
"""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.plan.plan import TrainingPlan

from ..paths import attempt_folder
from .observer import StepObserver

EVERY_STEPS = 10
"""Optimizer steps between two lines; the first step has one."""
FILE = "samples.jsonl"
OLDER = "samples.older.jsonl"
FILE_BYTES = 8 * 2**20
"""Size at which FILE takes the place of OLDER: together they have the newest 8 to 16 MiB of an attempt."""


class KeepSamples(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Appends the last generation's samples every EVERY_STEPS steps; a full disk costs samples, never the run."""

    def __init__(self, plan: TrainingPlan, observer: StepObserver) -> None:
        self._folder = attempt_folder(plan)
        self._observer = observer

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        """Write a line where one is due. Not atomically: a crash can tear the last line, and readers skip it."""
        if self._folder is None or not state.is_world_process_zero or (state.global_step - 1) % EVERY_STEPS:
            return
        try:
            append(self._folder, {"step": state.global_step, "samples": self._observer.samples})
        except OSError as error:
            print(f"samples of step {state.global_step} are not kept: {error}", flush=True)


def append(folder: Path, line: dict[str, Any]) -> None:
    """Append a line to FILE, which moves aside first when it is full.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    path = folder / FILE
    if path.exists() and path.stat().st_size >= FILE_BYTES:
        path.replace(folder / OLDER)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
