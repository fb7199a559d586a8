"""`grpo history`, `grpo samples` and `grpo diagnose` on folders, files and jobs: what is printed,
and what is said where there is nothing."""

import contextlib
import csv
import hashlib
import io
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_api.job_object import GRPOJob
from grpo_api.report.artifacts import FileEntry, Listing
from grpo_api.report.history import METRICS_FILE, SAMPLES_FILE, json_line
from grpo_cli.__main__ import main
from grpo_cli.cluster import kubectl
from grpo_cli.inputs import run_history
from grpo_cli.show.pictures import curves_of, plot_lines
from tests.generated import cases
from tests.unit.operator_world import make_job

ROWS: list[dict[str, Any]] = [
    {"step": 1, "attempt": 1, "reward": 0.5, "kl": "nan", "findings": ["NoSignal"]},
    {"step": 2, "attempt": 1, "reward": 0.1, "rolledBack": True},
    {"step": 2, "attempt": 2, "reward": 0.7, "loss": 1e-9},
]


def completion(text: str, digits: float, advantage: float) -> dict[str, Any]:
    return {
        "completion": text,
        "tokens": 3,
        "truncated": digits == 0,
        "rewards": {"digits": digits},
        "advantage": advantage,
    }


SAMPLES = [
    {
        "step": step,
        "attempt": 1,
        "groups": [
            {
                "prompt": [{"role": "user", "content": f"say {step}"}],
                "completions": [
                    completion(f"good {step}", step + 1.0, 0.5),
                    completion(f"bad {step}\x1b[2J", 0.0, -0.5 - step),
                ],
            }
        ],
    }
    for step in (1, 11, 21)
]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of two attempts, as on its volume; the last line of the newest is torn."""
    for attempt, rows in ((1, ROWS[:1]), (2, ROWS)):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        lines = [json_line(row) for row in rows]
        (folder / METRICS_FILE).write_text("\n".join([*lines, '{"step": 3, "rew']))
        (folder / SAMPLES_FILE).write_text("".join(json_line(line) + "\n" for line in SAMPLES))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_run_is_a_table_of_the_steps_that_it_consists_of(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (run_folder, run_folder / "attempt-2", run_folder / "attempt-2" / METRICS_FILE):
        rows = list(csv.DictReader(io.StringIO(printed(capsys, "history", place))))
        assert [(row["step"], row["attempt"], row["reward"]) for row in rows] == [
            ("1", "1", "0.5"),
            ("2", "2", "0.7"),
        ]
        assert (rows[0]["kl"], rows[0]["findings"]) == ("nan", '["NoSignal"]')
    assert json.loads(printed(capsys, "history", run_folder, "-o", "json", "--key", "reward")) == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": 0.7},
    ]
    everything = printed(capsys, "history", run_folder, "--rolled-back", "--key", "rolledBack")
    assert everything == "step,rolledBack\n1,\n2,True\n2,\n"


def test_curves_are_drawn_in_the_terminal_and_as_a_picture(
    run_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plot = printed(capsys, "history", run_folder, "-o", "plot")
    assert "reward: 0.5 at step 1, 0.7 at step 2" in plot
    assert "█" in plot
    ElementTree.fromstring(printed(capsys, "history", run_folder, "-o", "svg"))
    assert not printed(capsys, "history", run_folder, "-o", "svg", "--to", tmp_path / "a.svg")
    assert ">reward<" in (tmp_path / "a.svg").read_text()
    assert not printed(capsys, "history", run_folder, "-o", "png", "--to", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "name its file by --to" in printed(capsys, "history", run_folder, "-o", "png", code=2)
    nowhere = ("history", run_folder, "-o", "png", "--to", tmp_path / "no" / "a.png")
    assert "can't be written: No such file" in printed(capsys, *nowhere, code=2)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install matplotlib" in printed(capsys, *nowhere, code=2)
    nothing = printed(capsys, "history", run_folder, "-o", "plot", "--key", "kl", code=2)
    assert "has no numbers under kl" in nothing
    tracked, log = tmp_path / "wandb.csv", tmp_path / "run.log"
    tracked.write_text("_step,train/global_step,train/reward\n5,1,0.5\n9,,\n11,2,0.7\n")
    log.write_text("1/2 {'reward': 0.5}\n2/2 {'reward': '0.7'}\n")
    for source in (tracked, log):
        plot = printed(capsys, "history", source, "-o", "plot")
        assert "reward: 0.5 at step 1, 0.7 at step 2" in plot
    unknown = printed(capsys, "history", tracked, "--key", "kl", code=2)
    assert "--key kl: there are _step, train/global_step, train/reward" in unknown


NAMES = st.sampled_from(["groups", "completions", "completion", "rewards", "digits", "advantage"])
NUMBERS = st.floats() | st.integers() | st.sampled_from([10**400, -1, 2**53, 1.797e308, "nan"])
VALUES = st.none() | NUMBERS | st.text(st.characters(), max_size=9) | st.booleans()


@settings(max_examples=cases(100), suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.fixed_dictionaries({"step": VALUES, "reward": VALUES}), max_size=40),
    width=st.integers(1, 200),
)
def test_any_values_are_drawn_within_the_width(rows: list[dict[str, Any]], width: int) -> None:
    drawn = curves_of(rows, ["reward", "absent"])
    bars = [line for line in plot_lines(drawn, max(60, width)) if "│" in line]
    assert len(bars) == 5 * len(drawn)
    assert all(len(line) <= max(60, width) for line in bars)


ANYTHING = VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(NAMES, VALUES, max_size=2)


def damaged(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A dictionary of which a field has another form in one case of four."""

    def choose(field: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.integers(0, 3).flatmap(lambda number: field if number else ANYTHING)

    return st.fixed_dictionaries({name: choose(field) for name, field in fields.items()})


SAMPLED = damaged(
    completion=st.text(max_size=5),
    rewards=st.dictionaries(NAMES, VALUES | st.sampled_from(["0.5", 10**400]), max_size=2),
    advantage=st.floats(),
)
LINES = damaged(
    step=st.integers(0, 3),
    groups=st.lists(damaged(completions=st.lists(SAMPLED, max_size=3)), max_size=2),
)


def shown(lines: list[dict[str, Any]], command: str, *options: str) -> tuple[int, str]:
    """The exit code of a command on a file of these lines, and what a terminal gets of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            code = main([command, str(path), *options])
        output.flush()
        output.seek(0)
        return code, output.read()


@settings(max_examples=cases(300), suppress_health_check=[HealthCheck.too_slow])
@given(lines=st.lists(LINES, max_size=3))
def test_samples_of_any_form_are_shown_or_named_as_missing(lines: list[dict[str, Any]]) -> None:
    for options in ([], ["--best", "2"], ["--worst", "2", "--reward", "digits"]):
        code, _ = shown(lines, "samples", *options)
        assert code in (0, 2, 5)
    code, text = shown(lines, "samples", "-o", "json")
    assert code or json.loads(text, parse_constant=pytest.fail) is not None


KEYS = st.sampled_from(["step", "train/global_step", "reward", "kl", "loss", "rolledBack", "grad"])


@settings(max_examples=cases(200), suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.lists(st.dictionaries(KEYS, NUMBERS | VALUES), max_size=12))
def test_rows_of_any_form_are_listed_drawn_and_judged(rows: list[dict[str, Any]]) -> None:
    for options in ([], ["--rolled-back"], ["-o", "plot", "--key", "reward"]):
        code, _ = shown(rows, "history", *options)
        assert code in (0, 2, 5)
    code, text = shown(rows, "diagnose", "-o", "json")
    assert code == 2 or json.loads(text, parse_constant=pytest.fail) is not None


def test_a_curve_beyond_what_axes_take_is_drawn_without_these_points() -> None:
    rows = [{"step": step, "reward": value} for step, value in enumerate([1.0, 1e308, -1e308, 2.0])]
    code, text = shown(rows, "history", "-o", "svg")
    assert code == 0
    ElementTree.fromstring(text)


def test_samples_are_those_of_a_step_or_the_best_and_worst(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = printed(capsys, "samples", run_folder)
    assert "good 21" in last
    assert "say 21" in last
    assert "good 11" not in last
    assert "\x1b[2J" not in last
    assert "good 11" in printed(capsys, "samples", run_folder, "--step", 20)
    found = printed(capsys, "samples", run_folder, "--step", 0, code=5)
    assert "has no samples up to step 0; sampled steps: 1, 11, 21" in found

    def texts(*arguments: object) -> list[str]:
        text = printed(capsys, "samples", run_folder, "-o", "json", *arguments)
        return [one["completion"].partition("\x1b")[0] for one in json.loads(text)]

    assert texts("--worst", 2) == ["bad 21", "bad 11"]
    assert texts("--best", 2, "--reward", "digits") == ["good 21", "good 11"]
    assert texts("--best", 1, "--reward", "digits", "--step", 1) == ["good 1"]
    unscored = completion("unscored", 0, 0.0) | {"rewards": {"digits": "nan"}, "advantage": "nan"}
    samples = run_folder / "attempt-2" / SAMPLES_FILE
    first = json_line({"step": 0, "groups": [{"completions": [unscored]}]})
    samples.write_text(f"{first}\n{samples.read_text()}")
    assert texts("--worst", 2) == ["bad 21", "bad 11"]
    assert texts("--best", 2, "--reward", "digits") == ["good 21", "good 11"]
    wrong = printed(capsys, "samples", run_folder, "--best", 1, "--reward", "x", code=2)
    assert "--reward x: there are digits" in wrong
    for option in ("--best", "--worst"):
        wrong = printed(capsys, "samples", run_folder, option, 0, code=2)
        assert f"{option} is 0; it takes 1 or more" in wrong
    assert "add --best" in printed(capsys, "samples", run_folder, "--reward", "x", code=2)


def test_a_folder_without_a_history_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no metrics.jsonl" in printed(capsys, "history", tmp_path, code=2)
    assert "No such file" in printed(capsys, "history", tmp_path / "gone.csv", code=2)
    (tmp_path / "empty.jsonl").touch()
    assert "no logged steps" in printed(capsys, "history", tmp_path / "empty.jsonl", code=2)
    assert "has no samples\n" in printed(capsys, "samples", tmp_path / "empty.jsonl", code=5)
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    assert "no steps with TRL's key reward" in printed(
        capsys, "diagnose", tmp_path / "binary.jsonl", code=2
    )


class FakeDelivery:
    """Stands for the pod: what it serves are the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wait_for_listing(self) -> Listing:
        data = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        return Listing(
            files={
                name: FileEntry(bytes=len(one), sha256=hashlib.sha256(one).hexdigest())
                for name, one in data.items()
            }
        )

    def read_file(self, name: str, offset: int) -> Iterator[bytes]:
        yield (self.folder / name).read_bytes()[offset:]


def test_a_file_that_a_new_attempt_deletes_meanwhile_is_read_in_its_folder(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_file, newest = run_history._file_in, run_folder / "attempt-3"

    def overtaken(folder: Path, name: str) -> Path:
        file = find_file(folder, name)
        if not newest.exists():
            file.parent.rename(newest)
        return file

    monkeypatch.setattr(run_history, "_file_in", overtaken)
    assert run_history.load_history(Namespace(), str(run_folder)) == ROWS


def test_a_job_is_read_through_a_pod_and_judged(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: list[dict[str, Any]] = []
    lasting = {"checkpoint": {"volume": {"claimName": "team"}}}

    @contextlib.contextmanager
    def start(_: Namespace, __: Any, ___: GRPOJob, **asked: Any) -> Iterator[FakeDelivery]:
        wanted.append(asked)
        yield FakeDelivery(run_folder / "attempt-2")

    def job(_: Namespace, name: str) -> tuple[dict[str, Any], GRPOJob]:
        known = make_job(lasting if name == "run" else {})
        assert known.spec is not None
        return {"name": name}, GRPOJob(spec=known.spec, status=known.status)

    monkeypatch.setattr(run_history, "start_delivery", start)
    monkeypatch.setattr(kubectl, "get_job", job)
    assert printed(capsys, "history", "run").splitlines()[1].startswith("1,1,0.5")
    assert "good 21" in printed(capsys, "samples", "run")
    assert "run: no findings in 2 steps" in printed(capsys, "diagnose", "run")
    assert wanted == [{"history": True}] * 3
    assert "bare keeps no history" in printed(capsys, "history", "bare", code=5)
    (run_folder / "attempt-2" / SAMPLES_FILE).unlink()
    assert "run has no samples.jsonl yet" in printed(capsys, "samples", "run", code=5)


def test_a_long_cell_of_a_table_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.csv"
    path.write_text(f"step,reward,completion\n1,0.5,{'a' * 200_000}\n")
    assert main(["history", str(path), "--key", "reward"]) == 0
    assert capsys.readouterr().out == "step,reward\n1,0.5\n"
