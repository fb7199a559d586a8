"""A run's history under kills, rollbacks, foreign and deposed attempts, torn lines and full disks:
what stands is always the undisturbed run's."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.report.history import (
    METRICS_FILE,
    ROLLED_BACK,
    SAMPLES_FILE,
    Row,
    begin_rows,
    json_line,
    newest_attempt,
    parse_lines,
    standing_rows,
    thin_out,
)
from grpo_api.spec.checkpoint import SamplesSpec
from grpo_trainer.history import run_history
from grpo_trainer.history.run_history import (
    CompletionFacts,
    Generation,
    RunHistory,
    sample_groups,
)
from tests.generated import cases

EVERY = 3


@pytest.fixture(scope="module", autouse=True)
def patient_steps() -> Iterator[None]:
    """A busy machine's disk may take longer than a step waits; it is no volume that hangs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_history, "PATIENCE", 60.0)
        yield


def row(step: int, attempt: int) -> Row:
    """What step `step` logs in any attempt."""
    return {"step": step, "attempt": attempt, "loss": step / 7, "kl": math.nan, "findings": []}


def generation(step: int, groups: int = 3, size: int = 2, length: int = 3) -> Generation:
    """Completions that tell the step."""
    count = groups * size
    return Generation(
        [f"p{index // size}" for index in range(count)],
        [[{"role": "assistant", "content": f"{step}-{index}" * length}] for index in range(count)],
        {"digits": [float(index) for index in range(count)], "none": [math.nan] * count},
        [0.5] * count,
        [CompletionFacts(index, index == 1, None) for index in range(count)],
        size,
    )


@dataclass
class World:
    """A run's folder, and what its checkpoints contain."""

    folder: Path
    spec: SamplesSpec = field(default_factory=lambda: SamplesSpec(every_steps=EVERY, groups=1))
    checkpoints: dict[tuple[int, int], tuple[list[Row], Path]] = field(default_factory=dict)
    """Rows and folder by attempt and step."""

    def attempt(
        self,
        number: int,
        start: tuple[int, int] | None,
        last: int,
        *,
        save: int = 2,
        fresh: Callable[[int], bool] = lambda _: True,
        is_own: bool = True,
    ) -> RunHistory:
        """An attempt that goes on from a checkpoint, and is killed after step `last`. `fresh` tells
        whether a step has generated."""
        rows, checkpoint = self.checkpoints[start] if start else ([], None)
        # A checkpoint is read as JSON.
        rows = json.loads(json.dumps(rows))
        folder = self.folder / f"attempt-{number}"
        folder.mkdir(exist_ok=True)
        history = RunHistory(folder, number, self.spec, checkpoint, is_own=is_own)
        history.begin(rows)
        for step in range((start[1] if start else 0) + 1, last + 1):
            if fresh(step) and history.is_sample_due(step):
                history.add_samples(step, generation(step))
            rows.append(row(step, number))
            history.add_row(rows[-1])
            if step % save == 0:
                sealed = folder / f"checkpoint-{step}"
                if history.keeps_samples:
                    history.save_samples(sealed)
                self.checkpoints[number, step] = (json.loads(json.dumps(rows)), sealed)
        return history

    def text(self, name: str) -> str:
        """A file of the newest attempt; empty for none."""
        paths = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob(name)]
        newest = newest_attempt(path.replace(SAMPLES_FILE, METRICS_FILE) for path in paths)
        path = self.folder / str(newest) / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def steps(self) -> list[tuple[int, float]]:
        """Step and loss of the rows that stand, in the file's order."""
        return [(each["step"], each["loss"]) for each in standing_rows(self.rows())]

    def rows(self) -> list[Row]:
        return parse_lines(self.text(METRICS_FILE))

    def samples(self) -> list[Any]:
        return [(each["step"], each["groups"]) for each in parse_lines(self.text(SAMPLES_FILE))]


KILLS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=5)
"""By attempt: how many steps it takes, and which of the checkpoints there are it begins with."""


@settings(max_examples=cases(150, gate=20), deadline=None)
@given(kills=KILLS, save=st.integers(1, 4), ahead=st.integers(1, 3), cut=st.integers(0, 80))
def test_after_any_kills_the_history_is_the_undisturbed_runs(
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[tuple[int, int]],
    save: int,
    ahead: int,
    cut: int,
) -> None:
    def fresh(step: int) -> bool:
        return (step - 1) % ahead == 0

    world = World(tmp_path_factory.mktemp("killed"))
    last, all_rows = 0, set()
    for number, (steps, choice) in enumerate(kills, 1):
        starts = [None, *world.checkpoints]
        start = starts[choice % len(starts)]
        last = (start[1] if start else 0) + steps
        world.attempt(number, start, last, save=save, fresh=fresh)
        all_rows |= {(each["attempt"], each["step"]) for each in world.rows()}
        calm = World(tmp_path_factory.mktemp("calm"))
        calm.attempt(1, None, last, save=save, fresh=fresh)
        assert world.steps() == calm.steps() == [(step, step / 7) for step in range(1, last + 1)]
        assert world.samples() == calm.samples()
        assert {(each["attempt"], each["step"]) for each in world.rows()} == all_rows
        # The kill tears the last line, of which the next attempt needs nothing.
        path = world.folder / f"attempt-{number}" / METRICS_FILE
        text = path.read_bytes()
        torn = text[: len(text) - min(cut, len(text.splitlines()[-1]) + 1)]
        path.write_bytes(torn)
        assert [each["step"] for each in standing_rows(world.rows())][: last - 1] == list(
            range(1, last)
        )
        all_rows = {(each["attempt"], each["step"]) for each in world.rows()}


def test_rows_that_were_rolled_back_stay_marked_over_all_attempts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.attempt(1, None, 5)
    world.attempt(2, (1, 2), 3)
    world.attempt(3, (1, 4), 5)
    marks = [(each["attempt"], each["step"], ROLLED_BACK in each) for each in world.rows()]
    standing = [(1, step, False) for step in (1, 2, 3, 4)]
    assert marks == [*standing, (1, 5, True), (2, 3, True), (3, 5, False)]
    assert {path.parent.name for path in tmp_path.rglob(METRICS_FILE)} == {"attempt-3"}


def test_a_users_copy_of_an_attempt_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.attempt(1, None, 5)
    shutil.copytree(tmp_path / "attempt-1", tmp_path / "attempt-1.bak")
    world.attempt(2, (1, 4), 6)
    assert [step for step, _ in world.steps()] == [1, 2, 3, 4, 5, 6]
    assert {path.parent.name for path in tmp_path.rglob(METRICS_FILE)} == {
        "attempt-1.bak",
        "attempt-2",
    }


def test_an_attempt_that_lives_on_changes_nothing_of_the_history(tmp_path: Path) -> None:
    world = World(tmp_path)
    deposed = world.attempt(1, None, 5)
    world.attempt(2, (1, 4), 6)
    before = world.text(METRICS_FILE), world.text(SAMPLES_FILE)
    deposed.add_row(row(6, 1) | {"loss": 99.0})
    deposed.add_samples(7, generation(99))
    assert (world.text(METRICS_FILE), world.text(SAMPLES_FILE)) == before


def test_steps_of_another_job_are_told_apart(tmp_path: Path) -> None:
    for name in ("other", "own"):
        (tmp_path / name).mkdir()
    other, own = World(tmp_path / "other"), World(tmp_path / "own")
    other.attempt(3, None, 5)
    own.checkpoints = other.checkpoints
    own.attempt(1, (3, 4), 6, is_own=False)
    assert [each["attempt"] for each in own.rows()] == [0, 0, 0, 0, 1, 1]
    assert [json.loads(line)["attempt"] for line in own.text(SAMPLES_FILE).splitlines()] == [0, 0]


def test_a_disk_that_fails_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def torn(self: Any, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line[:9])
        no_room()

    world = World(tmp_path)
    history = world.attempt(1, None, 2)
    rows = history._rows
    for step, is_full in enumerate([True, True, True, False, False, False, False], 3):
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(run_history.LinesFile, "_append", torn)
                patch.setattr(run_history, "write_atomically", no_room)
            rows.append(row(step, 1))
            history.add_row(rows[-1])
        assert {each["step"] for each in world.rows()} <= set(range(1, step + 1))
        assert all(each["loss"] == each["step"] / 7 for each in world.rows())
    assert [each["step"] for each in world.rows()] == list(range(1, 10))
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("name", [SAMPLES_FILE, METRICS_FILE, "attempts"])
@pytest.mark.parametrize("failures", [1, 9])
def test_a_history_that_a_volume_does_not_show_ends_no_run_and_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str, failures: int
) -> None:
    world = World(tmp_path)
    world.attempt(1, None, 3)
    left = [failures]

    def fail_on(call: str, failing: str) -> None:
        work = getattr(Path, call)

        def fail(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == failing and left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return work(path, *arguments, **options)

        monkeypatch.setattr(Path, call, fail)

    if name == "attempts":
        fail_on("iterdir", tmp_path.name)
    else:
        fail_on("read_text", name)
    world.attempt(2, (1, 2), 4)
    monkeypatch.undo()
    assert [step for step, _ in world.steps()] == [1, 2, 3, 4]
    first_files = {path.name for path in (tmp_path / "attempt-1").glob("*.jsonl")}
    if failures == 1:
        assert [step for step, _ in world.samples()][:1] == [1]
        assert [each["step"] for each in world.rows() if ROLLED_BACK in each] == [3]
        assert not first_files
    else:
        assert first_files == {SAMPLES_FILE, METRICS_FILE}
    world.attempt(3, (1, 2), 5)
    rolled_back = [(each["attempt"], each["step"]) for each in world.rows() if ROLLED_BACK in each]
    assert rolled_back == [(1, 3), (2, 3), (2, 4)]
    assert [step for step, _ in world.samples()] == [1, 4]
    assert {path.parent.name for path in tmp_path.glob("*/*.jsonl")} == {"attempt-3"}


def test_samples_stay_where_no_more_are_taken(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.attempt(1, None, 6)
    samples = world.samples()
    world.spec = SamplesSpec(groups=0)
    world.attempt(2, (1, 4), 8)
    world.attempt(3, (2, 8), 9)
    assert world.samples() == samples[:2]
    assert [step for step, _ in samples] == [1, 4]


def test_a_volume_that_hangs_holds_one_step_and_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun = Event(), list[str]()

    def hang(self: Any, line: str) -> None:
        begun.append(line)
        answers.wait()
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    world = World(tmp_path)
    history = world.attempt(1, None, 2)
    monkeypatch.setattr(run_history, "PATIENCE", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(run_history.LinesFile, "_append", hang)
        for step in range(3, 9):
            history._rows.append(row(step, 1))
            history.add_row(history._rows[-1])
    assert len(begun) == 1, "one thread waits for the volume, and no step does after that"
    assert [each["step"] for each in world.rows()] == [1, 2]
    monkeypatch.undo()
    answers.set()
    for step in range(9, 20):
        history._rows.append(row(step, 1))
        history.add_row(history._rows[-1])
        writer = history._metrics_file._writer
        assert writer is not None
        writer.join()
    assert [each["step"] for each in world.rows()] == list(range(1, 20))


def test_whole_groups_are_kept_with_what_became_of_each_completion() -> None:
    (group,) = sample_groups(generation(7, groups=1, length=1), 5)
    assert group["prompt"] == "p0"
    assert group["completions"][1] == {
        "completion": "7-1",
        "tokens": 1,
        "truncated": True,
        "rewards": {"digits": 1.0},
        "advantage": 0.5,
    }
    assert [each["prompt"] for each in sample_groups(generation(7, groups=9), 3)] == [
        "p0",
        "p3",
        "p6",
    ]


def test_off_keeps_nothing_and_a_bound_is_kept(tmp_path: Path) -> None:
    off = World(tmp_path / "off", SamplesSpec(groups=0))
    bounded = World(tmp_path / "bounded", SamplesSpec(every_steps=1, groups=2, max_bytes=65536))
    for world in (off, bounded):
        world.folder.mkdir()
        history = world.attempt(1, None, 4)
    assert off.samples() == []
    for step in range(5, 60):
        assert len(history.add_samples(step, generation(step, size=8, length=200))) == 2
        assert len(bounded.text(SAMPLES_FILE).encode()) <= 65536
    assert history.add_samples(60, generation(60, size=8, length=9999)) == []
    kept = [step for step, _ in bounded.samples()]
    assert (kept[0], kept[-1]) == (1, 59), "60 is larger than all that may be kept"


@settings(max_examples=cases(40, gate=10), deadline=None)
@given(groups=st.integers(1, 30), length=st.integers(1, 900), asked=st.integers(1, 30))
@example(groups=30, length=900, asked=30)
def test_as_many_groups_are_kept_as_fit_and_each_is_written_twice_at_most(
    tmp_path_factory: pytest.TempPathFactory, groups: int, length: int, asked: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    history = RunHistory(folder, 1, SamplesSpec(groups=asked, max_bytes=65536))
    history.begin([])
    written: list[int] = []

    def count_bytes(row: Row) -> str:
        line = json_line(row)
        written.append(len(line.encode()))
        return line

    made = generation(3, groups, length=length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_history, "json_line", count_bytes)
        kept = history.add_samples(3, made)
    chosen = sample_groups(made, asked)
    sizes = [
        len(json_line({"step": 3, "attempt": 1, "groups": chosen[:count]}).encode())
        for count in range(1, len(chosen) + 1)
    ]
    assert kept == chosen[: sum(size < 65536 for size in sizes)]
    assert sum(written) <= 2 * sizes[-1] + 100


LINES = st.lists(st.text(max_size=30), max_size=40)


@settings(max_examples=cases(300))
@given(lines=LINES, limit=st.integers(31, 400))
def test_thinning_keeps_the_bound_the_order_and_the_newest(lines: list[str], limit: int) -> None:
    numbered = [f"{index:02}{line}"[:30] for index, line in enumerate(lines)]
    kept = thin_out(numbered, limit * 4)
    assert sum(len(line.encode()) + 1 for line in kept) <= limit * 4 or len(kept) <= 1
    assert kept == sorted(kept)
    assert kept[-1:] == numbered[-1:]
    assert thin_out(kept, limit * 4) == kept


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=cases(300, gate=30))
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["step", "attempt", "loss"]), VALUES)),
    earlier=st.lists(st.dictionaries(st.text(), VALUES)),
    cut=st.integers(0, 400),
)
def test_any_rows_are_written_as_json_and_any_cut_leaves_whole_ones(
    rows: list[Row], earlier: list[Row], cut: int
) -> None:
    written = [json_line(each) for each in begin_rows(rows, earlier)]
    text = "\n".join(written)
    whole = parse_lines(text)
    assert len(whole) == len(written)
    strict = [json.loads(line, parse_constant=pytest.fail) for line in written]
    assert strict == whole
    left = parse_lines(text[: max(0, len(text) - cut)])
    assert left == whole[: len(left)]


@settings(max_examples=cases(200))
@given(text=st.text() | st.just("[" * 100000))
def test_any_text_is_read(text: str) -> None:
    found: Iterable[Row] = parse_lines(text)
    assert all(isinstance(each, dict) for each in found)
