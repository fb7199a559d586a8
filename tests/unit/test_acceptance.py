"""The acceptance run without a device: versions, the processes of checks, what is told of a bad
end, the report.

Here the checks are stand-ins that load no library; tests/trainer/test_acceptance.py runs the real
ones.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_acceptance import __main__ as acceptance
from grpo_acceptance import report, runner
from grpo_acceptance.findings import (
    CHECKS,
    ENGINES,
    MEMORY_CASES,
    Check,
    Context,
    Finding,
    State,
    dump_findings,
    load_findings,
    make_finding,
)
from grpo_acceptance.runner import CheckResult, run_checks, skip_message
from grpo_api.job import parse_spec
from grpo_api.report.report import Outcome, Result
from grpo_api.text.contract import INDEX_ENV, PLAN_ENV, TERMINATION_LOG_ENV
from grpo_cli.inputs.manifest import load_jobs
from grpo_codegen.acceptance import CASES, ROOT, predictions
from grpo_operator.pods.manifests import Attempt, indexed_job, training_plan
from grpo_trainer.runtime.clock import SYSTEM_CLOCK
from harness.programs.processes import until
from tests import faulty_checks
from tests.unit.operator_world import KEY, PLAN, PODS, SPEC, UID

TEXT = st.text(max_size=40)
FINDINGS = st.lists(
    st.builds(
        Finding,
        TEXT,
        st.sampled_from(State),
        TEXT,
        st.dictionaries(TEXT, st.floats(allow_nan=False) | TEXT, max_size=3),
    ),
    max_size=4,
)
WHERE = report.Surroundings("Python", "cpu", {"torch": "2.11.0"}, {"torch": ("2.11.0", "2.13.0")})


def check(function: str, seconds: int = 60, **rest: Any) -> Check:
    """A stand-in."""
    return Check(function, "tests.faulty_checks", function, seconds, **rest)


@pytest.mark.realtime
def test_what_differs_from_the_image_is_told_before_anything_is_imported() -> None:
    image = {"torch": "2.13.0", "trl": "1.16.0", "no-such-package": "1.0"}
    different = report.differing_versions(
        {"torch": "2.13.0+cu130", "trl": "1.15.0", "no-such-package": "missing"}, image
    )
    assert different == {"trl": ("1.15.0", "1.16.0"), "no-such-package": ("missing", "1.0")}
    assert report.versions_sentence(different) == (
        "other than the image: no-such-package missing (image 1.0), trl 1.15.0 (image 1.16.0)"
    )
    assert report.versions_sentence({}) == "every version is the image's"
    code = (
        "import sys, grpo_acceptance.__main__; print({'torch', 'pydantic', 'trl'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_package_of_the_trainer_is_among_the_versions() -> None:
    pins = report.image_versions()
    assert {
        "torch",
        "triton",
        "transformers",
        "trl",
        "peft",
        "deepspeed",
        "bitsandbytes",
        "pydantic",
    } <= pins.keys()
    here = report.installed_versions(pins)
    assert report.differing_versions(here, pins) == {}, "the tests run on the image's versions"


@given(FINDINGS)
def test_findings_travel_between_processes_unchanged(findings: list[Finding]) -> None:
    assert load_findings(dump_findings(findings)) == findings


@given(FINDINGS, st.floats(0, 1e6), st.text(max_size=200))
def test_a_report_of_anything_is_a_table_with_a_row_per_finding(
    findings: list[Finding], seconds: float, log: str
) -> None:
    result = json.loads(
        json.dumps(report.as_json(WHERE, [CheckResult("one", findings, seconds, log)]))
    )
    rows = [line for line in report.markdown_page(result).split("\n") if line.startswith("|")]
    assert len(rows) == 3 + 2 + len(findings)
    assert all(row.count("|") == 4 for row in rows)


@pytest.mark.realtime
def test_a_bad_end_spoils_no_other_check_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    checks = [
        check("aborts"),
        check("passes"),
        check("hangs", seconds=3),
        check("passes", on_cpu=True),
        check("no_such_function"),
        check("one_rank_raises", ranks=True),
        check("passes", needs_gpu=True),
    ]
    done = list(
        run_checks(checks, Context("cpu", str(tmp_path), world=2), SYSTEM_CLOCK.now() + 120)
    )
    seen = [(one.findings[0].state, one.findings[0].message) for one in done]
    assert seen == [
        (State.FAILED, "ended with exit code -6; CUDA error: device-side assert triggered"),
        (State.PASSED, "cpu, 1 ranks, GPUs '0'"),
        (State.FAILED, "no answer within 3 s; "),
        (State.PASSED, "cpu, 1 ranks, GPUs ''"),
        (State.FAILED, "ended with exit code 1; AttributeError: module 'tests.faulty_checks' has "
                       "no attribute "
         "'no_such_function'"),
        (State.FAILED, "ended with exit code 1; RuntimeError: NCCL error"),
        (State.NOT_RUN, "needs a GPU"),
    ]  # fmt: skip
    child = Path("/proc") / (tmp_path / faulty_checks.CHILD).read_text()
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2], (
        "what a check started is ended with it"
    )


@pytest.mark.realtime
def test_what_does_not_fit_the_budget_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(runner, "LEAST_SECONDS", 1.0)
    checks = [check("hangs"), check("passes")]
    done = list(run_checks(checks, Context("cpu", str(tmp_path)), SYSTEM_CLOCK.now() + 1.5))
    assert [one.findings[0].message for one in done] == ["time", "time"]
    assert {one.findings[0].state for one in done} == {State.NOT_RUN}


@contextmanager
def faulty_run(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The acceptance command with the checks passes, hangs and aborts."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "tests.faulty_checks",
        "--device",
        "cpu",
        "--output",
        str(folder / "out"),
    ]
    environment = os.environ | {
        "PYTHONPATH": ":".join(sys.path),
        "TMPDIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def messages(folder: Path) -> dict[str, str]:
    """What result.json says of each check."""
    result = json.loads((folder / "out" / "result.json").read_text())
    return {check["check"]: check["findings"][0]["message"] for check in result["checks"]}


@pytest.mark.realtime
def test_a_run_that_is_killed_leaves_a_whole_report_and_no_process(tmp_path: Path) -> None:
    with faulty_run(tmp_path) as process:
        assert process.stdout
        begun = (
            line.split()[1].rstrip(",") for line in process.stdout if line.startswith("begins")
        )
        assert next(name for name in begun if name != "passes") == "hangs"
        (pid,) = until(
            "the hanging check", lambda: list(tmp_path.glob(f"acceptance-*/{faulty_checks.CHILD}"))
        )
        child = Path("/proc") / until("its child", pid.read_text)
        process.kill()
    assert messages(tmp_path) == {
        "passes": "cpu, 1 ranks, GPUs ''", "hangs": report.CUT_OFF, "aborts": report.NEVER_BEGUN,
    }  # fmt: skip
    assert (
        "| hangs | not run | the run ended during it |"
        in (tmp_path / "out" / "result.md").read_text()
    )
    until(
        "the hanging check's end",
        lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2],
    )


@pytest.mark.realtime
def test_an_installation_that_used_the_whole_budget_leaves_no_time_for_checks(
    tmp_path: Path,
) -> None:
    with faulty_run(tmp_path, "--used", "600") as process:
        assert process.wait() == 0
    assert messages(tmp_path) == dict.fromkeys(("passes", "hangs", "aborts"), "time")


def test_a_check_runs_only_where_it_shows_something() -> None:
    cpu, gpus = Context("cpu", "/nowhere"), Context("cuda", "/nowhere", world=8)
    assert skip_message(check("one", needs_gpu=True), cpu) == "needs a GPU"
    assert (
        skip_message(check("all", ranks=True), replace(gpus, world=1)) == "one rank can't show it"
    )
    assert all(skip_message(one, gpus) == "" for one in CHECKS)


def test_names_of_checks_are_unique_and_all_numbered_cases_are_among_them() -> None:
    assert len({one.name for one in CHECKS}) == len(CHECKS)
    assert [one.arguments[0] for one in CHECKS if one.module == ".memory_checks"] == list(
        range(MEMORY_CASES)
    )
    assert len(json.loads(predictions())) == len(CASES) == MEMORY_CASES
    engines = [one.arguments[0] for one in CHECKS if one.function == "train_engine"]
    assert engines == list(range(ENGINES)), "tests/trainer counts the cells"


def test_the_page_of_gpus_explains_every_check() -> None:
    text = (ROOT / "docs/internals/gpu.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`([-\w]+)`", row)}
    in_rows = {f"engine-{ENGINES}", f"memory-{MEMORY_CASES}"}
    numbered = re.compile(r"(engine|memory)-[2-9]")
    assert {one.name for one in CHECKS if not numbered.fullmatch(one.name)} | in_rows == explained


def test_the_page_shows_what_differs_what_failed_and_numbers() -> None:
    finding = make_finding("step, float32", ["loss differs by 0.5"], "2 steps", {"loss": 0.5})
    done = [
        CheckResult("gpu", [make_finding("GPU", [], "1 × H100", {"product": "H100"})]),
        CheckResult("step", [finding], 9.5),
    ]
    page = report.markdown_page(report.as_json(WHERE, done))
    assert page.startswith(
        "1 passed, 1 failed, 0 not run. Python, H100; versions that are not the image's:"
    )
    assert "| torch | 2.11.0 | 2.13.0 |" in page
    assert "| step, float32 | failed | loss differs by 0.5; 2 steps; loss 0.5 |" in page


def test_three_files_are_written(tmp_path: Path) -> None:
    report.write_report(
        tmp_path / "out",
        WHERE,
        [CheckResult("gpu", [make_finding("GPU", [], "1 × H100")], 1.0, "a line")],
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "log.txt",
        "result.json",
        "result.md",
    ]
    assert (
        json.loads((tmp_path / "out" / "result.json").read_text())["summary"]
        == "1 passed, 0 failed, 0 not run"
    )
    assert "==== gpu, 1.0 s\na line" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("wrong", "result"), [([], Result.SUCCEEDED), (["step: differs"], Result.ERROR)]
)
def test_in_a_pod_it_ends_with_the_attempt_s_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str], result: Result
) -> None:
    attempt = Attempt(key=KEY, uid=UID, spec=parse_spec(SPEC), plan=PLAN, number=3)
    (tmp_path / "plan.json").write_text(training_plan(attempt).model_dump_json(by_alias=True))
    monkeypatch.setenv(INDEX_ENV, "1")
    monkeypatch.setenv(PLAN_ENV, str(tmp_path / "plan.json"))
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    acceptance.write_outcome("acceptance: 3 passed", wrong)
    outcome = Outcome.model_validate_json((tmp_path / "end").read_text())
    assert (outcome.result, outcome.rank, outcome.attempt) == (result, 1, 3)
    assert outcome.message == "; ".join(["acceptance: 3 passed", *wrong])


def test_a_job_runs_it_in_the_trainer_s_place() -> None:
    (example,) = load_jobs(str(ROOT / "examples" / "10-acceptance.yaml"))
    attempt = Attempt(key=KEY, uid=UID, spec=parse_spec(example["spec"]), plan=PLAN, number=1)
    (container,) = indexed_job(attempt, PODS)["spec"]["template"]["spec"]["containers"]
    interpreter, *command = container["command"]
    assert (interpreter, command[:2]) == ("python", ["-m", "grpo_acceptance"])
    assert acceptance.parse_options(command[2:]).output == Path("/tmp/acceptance")
    plain = Attempt(key=KEY, uid=UID, spec=parse_spec(SPEC), plan=PLAN, number=1)
    (container,) = indexed_job(plain, PODS)["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "grpo_trainer"]


def test_outside_a_pod_there_is_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLAN_ENV, raising=False)
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    acceptance.write_outcome("acceptance: 3 passed", [])
    assert not (tmp_path / "end").exists()
