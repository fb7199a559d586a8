"""The acceptance run on a CPU: its checks on the real trainer, and the command as a cluster's owner
gives it.

What needs a GPU (Triton, memory, an out-of-memory of CUDA, links) is not run here; the report must
say so.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_acceptance import findings, machine_checks, trial_runs
from grpo_acceptance import step_checks as fused_head
from grpo_acceptance.findings import Context, State
from tests.support.ranks.fork_servers import ISOLATED
from tests.support.ranks.gang import run_gang

pytestmark = pytest.mark.realtime

ONLY = ("--only", "gpu", "all-reduce")
"""The quickest checks of one process and of several. Those that train share a process
(acceptance_facts.py); test_gpu_kit_installed.py runs all."""
ARCHES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each check found."""
    return run_gang(
        "tests.support.facts.acceptance_facts:measure", tmp_path_factory.mktemp("acceptance"), 1
    )[0]


@pytest.mark.slow
def test_every_check_passes_on_a_trainer_that_works(facts: dict[str, Any]) -> None:
    good = {
        name: rows
        for name, rows in facts["findings"].items()
        if name not in ("other", "no such device")
    }
    assert [row for rows in good.values() for row in rows if row["state"] != State.PASSED] == []
    assert {name: len(rows) for name, rows in good.items()} == {
        "step": 2, "kl-zero": 4, "adamw-8bit": 1, "resume": 1, "proof": 1, "hash": 1,
        "strategies": 6,
    }  # fmt: skip
    (resume,) = good["resume"]
    assert resume["numbers"] == {"resumed": 0.0, "again": 0.0}
    assert "torch.uint8" in good["adamw-8bit"][0]["message"]
    assert "is not the checkpoint's" in good["proof"][0]["message"]


@pytest.mark.slow
def test_a_step_that_differs_is_found(facts: dict[str, Any]) -> None:
    single, half = facts["findings"]["other"]
    assert (single["state"], half["state"]) == (State.FAILED, State.PASSED)
    assert single["message"].startswith("loss differs by ")


@pytest.mark.slow
def test_a_strategy_that_fails_says_how_and_keeps_no_other_from_its_turn(
    facts: dict[str, Any],
) -> None:
    (row,) = facts["findings"]["no such device"]
    assert row["state"] == State.FAILED
    assert row["message"].startswith("Error: ")


@pytest.mark.slow
def test_the_memory_check_has_the_phases_of_a_prediction(facts: dict[str, Any]) -> None:
    phases = ["backward", "forward", "generate", "reference", "step"]
    assert facts["phases"] == [phases] * 3
    assert all(set(phases) <= case["phases"].keys() for case in findings.cases())


def test_memory_is_judged_by_its_peak_and_by_what_the_device_holds() -> None:
    (case, *_) = findings.cases()
    measured = {
        name: case["phases"][name]
        for name in ("generate", "reference", "forward", "backward", "step")
    }
    exact = findings.compare_with_prediction(case, measured, case["device_bytes"])
    assert (exact.state, exact.numbers["error"]) == (State.PASSED, 0.0)
    over = findings.compare_with_prediction(case, measured, case["device_bytes"] + 1)
    assert (over.state, "more than" in over.message) == (State.FAILED, True)
    small = findings.compare_with_prediction(
        case, {name: value // 2 for name, value in measured.items()}, 0
    )
    assert small.message.startswith("the predicted peak is off by +100.0%")


def test_the_fused_head_is_compared_with_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context("cpu", "/nowhere")
    monkeypatch.setattr(fused_head, "VOCABULARY", 1000)
    monkeypatch.setattr(fused_head, "TILE", 300)
    assert [finding.state for finding in fused_head.compare_fused_head(context)] == [
        State.PASSED,
        State.PASSED,
    ]
    monkeypatch.setattr(
        fused_head,
        "_fused_head",
        lambda hidden, weight, targets: fused_head._plain_head(2 * hidden, weight, targets),
    )
    assert [finding.state for finding in fused_head.compare_fused_head(context)] == [
        State.FAILED,
        State.FAILED,
    ]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 0), False), ((7, 5), True), ((8, 9), True), ((9, 0), True), ((11, 0), False)],
)
def test_machine_code_runs_on_its_own_major_version(
    capability: tuple[int, int], runs: bool
) -> None:
    assert machine_checks.is_built_for(capability, ARCHES) is runs
    assert machine_checks.is_built_for(capability, [*ARCHES, "compute_75"]) is (
        capability >= (7, 5)
    )
    assert not machine_checks.is_built_for(capability, [])


@given(
    st.dictionaries(
        st.integers(1, 9), st.dictionaries(st.sampled_from(trial_runs.NUMBERS), st.floats(-9, 9))
    )
)
def test_a_run_differs_from_itself_by_nothing(steps: dict[int, dict[str, float]]) -> None:
    logged = any(steps.values())
    assert trial_runs.largest_difference(steps, steps) == (0.0 if logged else float("inf"))
    assert trial_runs.nonfinite_problems(steps) == []


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The acceptance run as on a command line, with the tests' environment."""
    whole = [sys.executable, "-m", "grpo_acceptance", *arguments]
    return subprocess.run(
        whole, env=ISOLATED | {"PATH": "/usr/bin"}, capture_output=True, text=True, check=False
    )


def test_the_command_runs_what_a_cpu_can_show(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--output", str(tmp_path / "out"), "--ranks", "2", *ONLY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every version is the image's" in done.stdout.splitlines()[0]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["summary"] == "1 passed, 0 failed, 1 not run"
    assert (tmp_path / "out" / "result.md").read_text() in done.stdout


def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    done = command("--output", str(tmp_path / "out"))
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "this machine has no GPU that torch can use" in done.stdout
