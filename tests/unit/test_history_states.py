"""A run's history in any story of attempts on disks that fail, tear and hang: what it says is true
at any moment, and whole once the disk takes it."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.history import METRICS_FILE, ROLLED_BACK, SAMPLES_FILE, Row, parse_lines
from grpo_cli.__main__ import main
from grpo_operator.pods.manifests import training_plan
from grpo_trainer.delivery import serving
from grpo_trainer.history import run_history
from grpo_trainer.history.run_history import RunHistory
from tests.generated import cases
from tests.unit.test_history import World, generation, patient_steps, row
from tests.unit.test_operator_engine_pods import attempt

__all__ = ["patient_steps"]
pytestmark = pytest.mark.usefixtures("no_fsync")
FULL = OSError(28, "No space left on device")
DISKS = st.sampled_from(["takes", "takes", "takes", "full", "tears"])


class Attempt(NamedTuple):
    """One attempt: what its disk does in each step, and how it ends."""

    disks: list[str]
    start: int
    """Which of the checkpoints that there are it begins with."""
    end: str
    """It finishes, is killed, or is deposed and writes on."""


STORIES = st.lists(
    st.builds(
        Attempt,
        st.lists(DISKS, min_size=1, max_size=8),
        st.integers(0, 8),
        st.sampled_from(["finishes", "is killed", "is deposed"]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine crashes here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def disk(kind: str) -> Iterator[None]:
    """A disk that takes what is written, is full, or takes the first bytes of a line."""

    def tear(self: Any, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line[:9])
        raise FULL

    def refuse(*_: object) -> None:
        raise FULL

    with pytest.MonkeyPatch.context() as patch:
        if kind != "takes":
            patch.setattr(run_history, "write_atomically", refuse)
            patch.setattr(run_history.LinesFile, "_append", tear if kind == "tears" else refuse)
        yield


def take_step(history: RunHistory, rows: list[Row], step: int, attempt: int) -> None:
    if history.is_sample_due(step):
        history.add_samples(step, generation(step))
    rows.append(row(step, attempt))
    history.add_row(rows[-1])


def run_attempt(world: World, number: int, story: Attempt) -> tuple[RunHistory, int]:
    """An attempt's history at its end, and its last step. Its first disk is that of its begin."""
    starts = [None, *world.checkpoints]
    start = starts[story.start % len(starts)]
    with disk(story.disks[0]):
        history = world.attempt(number, start, start[1] if start else 0)
    step = start[1] if start else 0
    for kind in story.disks:
        step += 1
        with disk(kind):
            take_step(history, history._rows, step, number)
        require_true(world)
        if step % 2 == 0 and kind == "takes":
            sealed = world.folder / f"attempt-{number}" / f"checkpoint-{step}"
            history.save_samples(sealed)
            world.checkpoints[number, step] = (json.loads(json.dumps(history._rows)), sealed)
    return history, step


def require_true(world: World) -> None:
    """No row is twice there, a standing step has one row, and each says what its step logged."""
    rows = world.rows()
    places = [(each["attempt"], each["step"]) for each in rows]
    assert places == sorted(set(places))
    assert all(each["loss"] == each["step"] / 7 for each in rows)
    standing = [each["step"] for each in rows if ROLLED_BACK not in each]
    assert standing == list(range(1, len(standing) + 1))


@settings(max_examples=cases(200, gate=10))
@given(stories=STORIES)
def test_a_history_is_true_at_any_moment_and_whole_at_the_end(
    tmp_path_factory: pytest.TempPathFactory, stories: list[Attempt]
) -> None:
    world = World(tmp_path_factory.mktemp("run"))
    deposed: list[RunHistory] = []
    for number, story in enumerate(stories, 1):
        history, last = run_attempt(world, number, story)
        for other in deposed:
            take_step(other, other._rows, len(other._rows) + 1, number - 1)
        deposed = [history] if story.end == "is deposed" else []
        if story.end == "finishes":
            history.finish()
            calm = World(tmp_path_factory.mktemp("calm"))
            calm.attempt(1, None, last)
            assert world.steps() == calm.steps()
            assert world.samples() == calm.samples()
            assert {path.name for path in world.folder.rglob(".*")} == set()


def test_an_attempt_that_ends_before_its_first_step_hides_no_history(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.attempt(1, None, 3)
    (tmp_path / "attempt-2").mkdir()
    RunHistory(tmp_path / "attempt-2", 2, world.spec).finish()
    assert [step for step, _ in world.steps()] == [1, 2, 3]


def test_a_history_whose_attempt_is_replaced_while_it_is_read_is_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "run")
    world.folder.mkdir()
    world.attempt(1, None, 4)
    copy = shutil.copyfile
    begun: list[RunHistory] = []

    def begin_meanwhile(source: Path, target: Path) -> None:
        if not begun:
            begun.append(world.attempt(2, (1, 4), 5))
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", begin_meanwhile)
    plan = training_plan(attempt())
    plan = plan.model_copy(update={"checkpoint_directory": str(world.folder)})
    serving.copy_history(plan, tmp_path / "copy")
    rows = parse_lines((tmp_path / "copy" / METRICS_FILE).read_text())
    assert [each["step"] for each in rows] == [1, 2, 3, 4, 5]
    samples = (tmp_path / "copy" / SAMPLES_FILE).read_text()
    assert samples == world.text(SAMPLES_FILE)


def test_a_run_of_which_no_step_stands_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    world.attempt(1, None, 3)
    world.attempt(2, None, 0)
    for options in ([], ["--key", "loss"], ["-o", "plot"]):
        assert main(["history", str(tmp_path), *options]) == 5
        assert "were rolled back" in capsys.readouterr().err
    assert main(["history", str(tmp_path), "--rolled-back"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
