"""Sample completions on the volume: which steps, how much, and that a disk without room doesn't end
the run.

Telemetry must be bounded and harmless. The live run's file is seen in test_resume.py.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo_trainer.telemetry import observer as observer_module
from grpo_trainer.telemetry.observer import (
    OLDER_SAMPLES_FILE,
    SAMPLES_EVERY_STEPS,
    SAMPLES_FILE,
    KeepSamples,
    StepObserver,
)


def run_steps(folder: Path, steps: int, is_main: bool = True) -> None:
    """A callback that sees `steps` steps end."""
    observer = StepObserver()
    keeper = KeepSamples(folder / "attempt-1", observer)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none")
    for step in range(1, steps + 1):
        observer.record_completions(["say 1"], [f"answer {step}"], torch.ones(1, 1), ["digits"])
        keeper.on_step_end(
            arguments,
            TrainerState(global_step=step, is_world_process_zero=is_main),
            TrainerControl(),
        )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_tenth_step_is_kept_from_the_first_on(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    run_steps(tmp_path, SAMPLES_EVERY_STEPS + 2)
    assert lines(tmp_path / "attempt-1" / SAMPLES_FILE) == [
        {
            "step": step,
            "samples": [{"prompt": "say 1", "completion": f"answer {step}", "digits": 1.0}],
        }
        for step in (1, SAMPLES_EVERY_STEPS + 1)
    ]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    run_steps(tmp_path, 1, is_main=False)
    assert list((tmp_path / "attempt-1").iterdir()) == []


def test_the_files_are_bounded_and_keep_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attempt-1").mkdir()
    monkeypatch.setattr(observer_module, "SAMPLES_FILE_BYTES", 200)
    run_steps(tmp_path, 9 * SAMPLES_EVERY_STEPS)
    kept = [
        line["step"]
        for name in (OLDER_SAMPLES_FILE, SAMPLES_FILE)
        for line in lines(tmp_path / "attempt-1" / name)
    ]
    assert kept == list(range(1, 9 * SAMPLES_EVERY_STEPS, SAMPLES_EVERY_STEPS))[-len(kept) :]
    assert sum(path.stat().st_size for path in (tmp_path / "attempt-1").iterdir()) < 2 * (200 + 100)


def test_a_folder_that_can_t_be_written_costs_samples_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_steps(tmp_path, 1)
    assert "samples of step 1 are not kept: " in caplog.text
