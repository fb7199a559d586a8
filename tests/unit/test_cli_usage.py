"""`grpo usage`: sums that add up, in a table of eighty columns and as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.__main__ import main

pytestmark = pytest.mark.realtime


def job(name: str, **usage: Any) -> dict[str, Any]:
    """A GRPOJob of a namespace with this usage; without any, one on CPUs."""
    told = {"usage": {"asOf": "2026-01-31T12:00:00Z", **usage}} if usage else {}
    return {"metadata": {"namespace": "team-a", "name": name}, "status": told}


FIRST = job(
    "gsm8k-llama",
    gpuSeconds={"training": 7200, "generating": 3600, "lost": 1800, "other": 1800},
    heldGpuSeconds=14400,
    effective="0.750",
    cost=10.0,
    queuedSeconds=360,
    attempts=[{"attempt": 1, "gpus": 2, "nodes": 1, "startTime": "2026-01-31T12:00:00Z"}],
)
SECOND = job("math", gpuSeconds={"training": 3600}, heldGpuSeconds=3600, effective="1.000")
LIST = {"items": [FIRST, job("on-cpus"), SECOND]}


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that prints the file that is returned."""
    answer = tmp_path / "answer.json"
    (tmp_path / "kubectl.py").write_text(f"print(open({str(answer)!r}).read())")
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {tmp_path}/kubectl.py")
    return answer


def test_a_namespace_has_a_row_per_job_and_their_sum(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.write_text(json.dumps(LIST))
    assert main(["usage"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines] == [
        ["job", "GPU-h", "effective", "lost", "other", "queued", "cost"],
        ["gsm8k-llama", "4.0", "0.750", "0.5", "0.5", "0.1", "10.00"],
        ["math", "1.0", "1.000", "0.0", "0.0", "0.0", "-"],
        ["all", "5.0", "0.800", "0.5", "0.5", "0.1", "10.00"],
    ]
    assert main(["usage", "-A"]) == 0
    assert "team-a/math" in capsys.readouterr().out


def test_one_job_tells_every_state(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.write_text(json.dumps(FIRST))
    assert main(["usage", "gsm8k-llama"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    wanted = "effective 0.750: generating 25 %, training 50 %, lost 12 %, other 12 %; cost 10.00"
    assert said == f"4.00 GPU-hours, {wanted}"


def test_json_has_the_numbers_that_the_status_has(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.write_text(json.dumps(LIST))
    assert main(["usage", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told["items"]] == ["gsm8k-llama", "math"]
    assert told["items"][0]["gpuSeconds"]["lost"] == 1800
    assert (told["total"]["heldGpuSeconds"], told["total"]["cost"]) == (18000, 10.0)


def test_a_job_of_another_version_hides_no_other(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = job("odd", heldGpuSeconds="much")
    kubectl.write_text(json.dumps({"items": [odd, *LIST["items"]]}))
    assert main(["usage", "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert [item["name"] for item in json.loads(printed.out)["items"]] == ["gsm8k-llama", "math"]
    assert printed.err.startswith("grpo: left out: odd was written by another version")


@pytest.mark.parametrize(
    ("answer", "line", "says"),
    [
        ({"items": [job("on-cpus")]}, ["usage"], "no GRPOJob here has a status.usage"),
        (
            job("odd", heldGpuSeconds="much"),
            ["usage", "odd"],
            "odd was written by another version of the operator",
        ),
        (LIST, ["usage", "math", "-A"], "leave math out, or name its namespace with -n"),
    ],
)
def test_what_can_not_be_shown_is_a_sentence(
    kubectl: Path, capsys: pytest.CaptureFixture[str], answer: Any, line: list[str], says: str
) -> None:
    kubectl.write_text(json.dumps(answer))
    assert main(line) in (2, 4, 5)
    assert says in capsys.readouterr().err
