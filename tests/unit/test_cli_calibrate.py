"""`grpo calibrate`: finished jobs become rows of a file, which `grpo plan` takes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.__main__ import main
from grpo_cli.inputs.calibration_file import save_measured_rows
from grpo_cli.show.errors import InventoryError
from grpo_planner.time.measured_runs import FIT
from tests.unit.operator_world import at
from tests.unit.planning import H100, QWEN_7B, nodes, plan, spec
from tests.unit.test_operator_measured_runs import STEP

pytestmark = pytest.mark.realtime

PLAN = plan(spec(QWEN_7B), nodes(1, 8, H100))
PLANNED = ["plan", QWEN_7B, "--gpus", "8xH100", "--host-memory", "1Ti"]


def job(name: str, ended: float | None = 0.0) -> dict[str, Any]:
    """A GRPOJob with a measured step."""
    body = spec(QWEN_7B).model_dump(mode="json", by_alias=True, exclude_unset=True)
    status = {
        "plan": PLAN.model_dump(mode="json"),
        "learned": {"step": STEP.model_dump(mode="json")},
    } | ({"completionTime": at(ended)} if ended is not None else {})
    return {"metadata": {"namespace": "team-a", "name": name}, "spec": body, "status": status}


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that prints the file that is returned, or the name of a context."""
    answer = tmp_path / "answer.json"
    program = f"import sys; print('dev' if 'config' in sys.argv else open({str(answer)!r}).read())"
    (tmp_path / "kubectl.py").write_text(program)
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {tmp_path}/kubectl.py")
    monkeypatch.chdir(tmp_path)
    return answer


def test_finished_jobs_become_rows_and_correct_a_plan(
    kubectl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unreadable = job("new") | {"status": {"phase": "Dreaming"}}
    kubectl.write_text(json.dumps({"items": [job("done"), job("runs", None), unreadable]}))
    assert main(["calibrate"]) == 0
    shown = capsys.readouterr().out
    assert "team-a/done" in shown
    assert "team-a/runs" not in shown
    file = tmp_path / "calibration.yaml"
    assert '"cluster": "dev"' in file.read_text()
    assert main([*PLANNED, "--calibration", str(file)]) == 0
    planned = capsys.readouterr().out
    assert "measured  by runs " in planned
    # What is there stays; the same job again is the same row.
    kubectl.write_text(json.dumps({"items": [job("done"), job("later", 60.0)]}))
    assert main(["calibrate", "-A"]) == 0
    assert "calibration.yaml has 2 runs" in capsys.readouterr().out
    # The text of the operator's ConfigMap is read as well, alone and inside of the object.
    lines = file.read_text().splitlines()[2:]
    document = {"runs": [json.loads(line[2:]) for line in lines]}
    config_map = {"kind": "ConfigMap", "data": {"runs.json": json.dumps(document)}}
    for content in (document, config_map):
        file.write_text(json.dumps(content))
        assert main([*PLANNED, "--sizes", "--calibration", str(file)]) == 0
        assert "measured  by runs " in capsys.readouterr().out


def test_rows_of_another_time_model_are_named_and_change_nothing(
    kubectl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.write_text(json.dumps(job("done")))
    assert main(["calibrate", "done"]) == 0
    file = tmp_path / "calibration.yaml"
    file.write_text(file.read_text().replace(FIT, "00000000"))
    capsys.readouterr()
    assert main(PLANNED) == 0
    usual = capsys.readouterr().out
    assert main([*PLANNED, "--calibration", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == usual
    assert "1 of 1 rows are of another version of the time model" in printed.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("runs: [{", "is no YAML"),
        ("[]", "runs: a list of measured rows is missing; `grpo calibrate` writes one"),
        ("runs: [{kind: measured}]", "runs[0].source: is required"),
        ("kind: ConfigMap", "runs: a list of measured rows is missing"),
        ("{kind: ConfigMap, data: {a: '{'}}", "is no YAML"),
        ("\xff", "is no YAML"),
    ],
)
def test_a_file_that_can_not_be_read_is_refused_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    file = tmp_path / "calibration.yaml"
    file.write_bytes(text.encode("latin-1"))
    assert main([*PLANNED, "--calibration", str(file)]) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert str(file) in printed


def test_without_a_measured_step_there_is_nothing_to_collect(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.write_text(json.dumps({"items": [job("runs", None)]}))
    assert main(["calibrate"]) == 5
    assert "no finished job here has measured a step" in capsys.readouterr().err
    assert main(["calibrate", "a", "-A"]) == 2


def test_a_full_disk_loses_no_row_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calibration.yaml"
    save_measured_rows(file, [])
    before = file.read_bytes()

    def write_nothing(path: Path, *_: Any, **__: Any) -> int:
        path.write_bytes(b"")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_nothing)
    with pytest.raises(InventoryError, match="No space left"):
        save_measured_rows(file, [])
    assert file.read_bytes() == before
