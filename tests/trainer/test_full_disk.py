"""Disks that fail: a checkpoint's at every write in turn on two ranks, the export's, the claim's,
the outcome's.

None of it may end a run. The disk is a real one of 16 MiB, and what it says is what the kernel
says.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from grpo_api.report.report import Outcome, Result, Wait, WaitTarget
from grpo_trainer.checkpoints import seal
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.outcome import keep_outcome
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime import durable_files
from grpo_trainer.runtime.durable_files import retry_disk_errors
from grpo_trainer.runtime.errors import DiskFailed, Preempted
from grpo_trainer.training.training_run import _finish
from tests.stepped_clock import SteppedClock
from tests.support.facts.disk_facts import DISK, OBSTACLES, fill, small_disk
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import claim_folder, seal_checkpoints
from tests.support.ranks.gang import run_gang

pytestmark = pytest.mark.realtime


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    with small_disk(tmp_path / DISK, 16) as folder:
        yield folder


@pytest.mark.parametrize("strategy", ["Clone", pytest.param("Sharded", marks=pytest.mark.slow)])
def test_a_disk_that_fails_at_any_write_costs_one_checkpoint_and_no_step(
    disk: Path, strategy: str
) -> None:
    first, second = run_gang(
        "tests.support.facts.disk_facts:failing_writes", disk.parent, strategy=strategy
    )
    assert first["losses"] == first["calm"]
    failed = len(OBSTACLES[strategy]) + 1  # and the full disk
    *fails, sealed = first["checkpoints"]
    assert [one["there"] for one in fails] == [False] * failed
    assert [one["failures"] for one in fails] == list(range(1, failed + 1))
    for obstacle, one in zip(OBSTACLES[strategy], fails, strict=False):
        assert "could not be written: rank" in one["problem"], obstacle
        assert "irectory" in one["problem"], obstacle
    assert (
        "No space left on device" in fails[-1]["problem"]
        or "inline_container" in fails[-1]["problem"]
    )
    assert (sealed["there"], sealed["problem"], sealed["failures"]) == (True, "", failed)
    assert fails[-1]["save_seconds"] is None
    assert sealed["save_seconds"] > 0
    assert second["checkpoints"] == first["checkpoints"]
    assert f"checkpoint-{failed + 1}" in first["left"]
    assert sum(name.startswith("checkpoint-") for name in first["left"]) == 1
    assert first["exported"]


def test_a_checkpoint_is_tried_again_after_ever_more_steps_and_told(tmp_path: Path) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path, execution={"saveEverySteps": 100})
    claim_folder(plan)
    recorder, preemption = (
        Recorder(plan.job.attempt, Placement(0, 0, 1, 1), 0.0),
        Preemption(60.0, can_save=True),
    )
    seal = seal_checkpoints(plan, {}, recorder, preemption)

    def write(step: int) -> None:
        (tmp_path / "attempt-1" / f"checkpoint-{step}").mkdir(parents=True)
        if step < 16:
            raise DiskFailed("full")

    saved = []
    for step in range(1, 101):
        control = TrainerControl(should_save=step == 2)
        seal.on_step_end(None, TrainerState(global_step=step), control)
        if control.should_save:
            seal.save(step, partial(write, step))
            saved.append(step)
    assert saved == [2, 3, 5, 9, 17]
    assert seal.last == tmp_path / "attempt-1" / "checkpoint-17"
    assert [path.name for path in (tmp_path / "attempt-1").iterdir()] == ["checkpoint-17"]
    assert recorder.progress.metrics["checkpoint_step"] == 17
    assert recorder.progress.metrics["checkpoint_seconds"] == preemption.save_seconds


def test_a_checkpoint_costs_the_time_of_writing_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    claim_folder(plan)
    recorder, preemption, now = (
        Recorder(plan.job.attempt, Placement(0, 0, 1, 1), 0.0),
        Preemption(60.0, can_save=True),
        [0.0],
    )
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def write() -> None:
        (tmp_path / "attempt-1" / "checkpoint-3").mkdir(parents=True)
        now[0] += 40.0

    seal_checkpoints(plan, {}, recorder, preemption).save(3, write)
    assert (recorder.progress.metrics["checkpoint_seconds"], preemption.save_seconds) == (
        40.0,
        40.0,
    )


def test_a_volume_that_hangs_in_a_checkpoint_is_named_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    claim_folder(plan)
    named = threading.Event()

    class Watched(Recorder):
        def record_wait(self, target: WaitTarget, why: str) -> None:
            super().record_wait(target, why)
            if why:
                named.set()

    recorder = Watched(plan.job.attempt, Placement(0, 0, 1, 1), 0.0)
    preemption = Preemption(60.0, can_save=True)
    waits: list[Wait | None] = []

    def write(step: int) -> None:
        (tmp_path / "attempt-1" / f"checkpoint-{step}").mkdir(parents=True)
        assert named.wait(60)
        waits.append(recorder.progress.waiting)
        named.clear()

    monkeypatch.setattr(seal, "FIRST_LATE_SECONDS", 0.0)
    monkeypatch.setattr(seal, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(seal, "LATE_FACTOR", 0.0)
    checkpoints = seal_checkpoints(plan, {}, recorder, preemption)
    for step in (3, 6):
        checkpoints.save(step, partial(write, step))
        assert recorder.progress.waiting is None
    folder = tmp_path / "attempt-1"
    for step, wait in zip((3, 6), waits, strict=True):
        assert wait is not None
        assert wait.target == "Store"
        assert f"the checkpoint of step {step} to {folder}/checkpoint-{step}" in wait.why
    assert waits[1] is not None
    assert "the last time" in waits[1].why


def test_what_stops_is_not_made_to_save(tmp_path: Path) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    seal = seal_checkpoints(
        plan,
        {},
        Recorder(plan.job.attempt, Placement(0, 0, 1, 1), 0.0),
        Preemption(60.0, can_save=True),
    )

    def write() -> None:
        raise DiskFailed("full")

    seal.save(1, write)
    control = TrainerControl(should_training_stop=True)
    seal.on_step_end(None, TrainerState(global_step=2), control)
    assert not control.should_save


def test_a_preempted_run_whose_checkpoint_failed_says_that_the_one_before_stands(
    tmp_path: Path,
) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    recorder = Recorder(plan.job.attempt, Placement(0, 0, 1, 1), 0.0)
    recorder.record_checkpoint_failure(
        "the checkpoint of step 8 could not be written: rank 0: full"
    )
    run: Any = SimpleNamespace(
        trainer=SimpleNamespace(state=TrainerState(global_step=8)),
        step_exchange=SimpleNamespace(verdict="save"),
        seal=SimpleNamespace(last=tmp_path / "attempt-1" / "checkpoint-4"),
    )
    with pytest.raises(
        Preempted, match="at step 8, the checkpoint before stands, for the checkpoint of"
    ):
        _finish(plan, run, recorder)
    run.seal.last = tmp_path / "attempt-1" / "checkpoint-8"
    with pytest.raises(Preempted, match="a checkpoint was saved at step 8"):
        _finish(plan, run, recorder)


def failing(times: int, error: Callable[[], Exception]) -> Callable[[], str]:
    """An action that fails so often."""
    left = iter(range(times))

    def act() -> str:
        for _ in left:
            raise error()
        return "done"

    return act


def test_what_a_run_can_not_go_on_without_is_tried_until_the_disk_is_well() -> None:
    clock = SteppedClock()
    assert retry_disk_errors(failing(3, DiskFailed), clock) == "done"
    assert clock.sleeps == [1, 2, 4]
    clock = SteppedClock()
    with pytest.raises(DiskFailed):
        retry_disk_errors(failing(99, DiskFailed), clock)
    assert clock.now() == 300
    with pytest.raises(ValueError, match="ours"):
        retry_disk_errors(failing(1, lambda: ValueError("ours")), clock)
    assert clock.now() == 300, "what another try can't mend is told at once"


def test_a_full_disk_keeps_neither_the_claim_nor_the_words_at_the_end(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = runs.plan(Path("/models/demo"), folder=disk)
    claim_folder(plan)
    fill(disk / "ballast")
    keep_outcome(plan, Outcome(result=Result.SUCCEEDED, message="m" * 3000))
    assert "the outcome is in the termination message only: [Errno 28]" in caplog.text
    claim_folder(plan, clock=SteppedClock(after_sleep=(disk / "ballast").unlink))
    assert "tried again in 1 s: OSError: [Errno 28] No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("library", "raised"),
    [
        ("torch", "inline_container"),
        ("safetensors", "os error 28"),
        ("tokenizers", "os error 28"),
        ("python", "Errno 28"),
    ],
)
def test_every_library_is_understood_when_a_disk_is_full(
    disk: Path, library: str, raised: str
) -> None:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from torch import save, zeros

    fill(disk / "ballast")
    vocabulary = {"a": 0}
    writes: dict[str, Callable[[], Any]] = {
        "torch": lambda: save({"a": zeros(9999)}, disk / "file"),
        "safetensors": lambda: save_file({"a": zeros(9999)}, disk / "file"),
        "tokenizers": lambda: Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(
            str(disk / "file")
        ),
        "python": lambda: (disk / "file").write_text("text"),
    }
    with pytest.raises(DiskFailed, match=raised), durable_files.disk_errors():
        writes[library]()
    with suppress(FileNotFoundError):
        (disk / "file").unlink()
