"""`grpo preflight`: what it prints and the Job that it makes; a script stands in for kubectl, and
for the trainer's checks."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from grpo_api.job import parse_spec
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import (
    PreflightProblem,
    PreflightReport,
    PromptLengths,
    SkippedCheck,
)
from grpo_api.spec.model import Architecture
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_cli.__main__ import main
from grpo_cli.cluster import job_pods, kubectl
from grpo_cli.commands.preflight import check_job
from grpo_cli.inputs import local_preflight
from grpo_cli.show.errors import MISSING, WRONG, KubectlExitError
from grpo_cli.show.preflight_report import print_report
from tests.stepped_clock import SteppedClock
from tests.unit.operator_world import PODS

SPEC: dict[str, Any] = {
    "model": {"name": "team/model", "parameters": "1B"},
    "dataset": {"name": "team/rows"},
    "rewards": [{"format": {"pattern": "a"}}],
    "checkpoint": {"volume": {"claimName": "checkpoints"}},
}
METADATA = {
    **{"namespace": "team-a", "name": "run"},
    **{"labels": {"cost-center": "17"}, "annotations": {"team": "a"}},
}
PROBLEM = PreflightProblem(
    path="spec.dataset.promptColumn",
    message="the dataset has no column 'question'; it has prompt, answer",
)
AWAY = PreflightProblem(path="spec.model.name", message="nobody answers", transient=True)
REPORT = PreflightReport(
    problems=[PROBLEM, AWAY],
    omitted_problems=2,
    skipped=[SkippedCheck(path="spec.checkpoint", message="in the cluster only")],
    prompts=PromptLengths(rows=2000, mean=120.4, p95=300, dropped=7),
    architecture=Architecture(
        model_type="qwen2",
        layers=24,
        hidden_size=896,
        intermediate_size=4864,
        attention_heads=14,
        vocab_size=151936,
    ),
    revisions={"model": "c0" * 20},
)


@dataclass(frozen=True)
class World:
    """A file with a job, in a folder for stand-ins of programs."""

    folder: Path
    patch: pytest.MonkeyPatch
    job_file: str

    def replace_python(self, code: str) -> None:
        """Put a program in the place of the checks on this machine."""
        path = self.folder / "python"
        path.write_text(f"#!{sys.executable}\n{code}")
        path.chmod(0o755)
        self.patch.setattr(sys, "executable", str(path))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    body = {
        "apiVersion": "grpo.dev/v1alpha1",
        "kind": "GRPOJob",
        "metadata": {"name": "run", "namespace": "team-a"},
        "spec": SPEC,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(body))
    return World(tmp_path, monkeypatch, str(tmp_path / "job.yaml"))


@pytest.mark.parametrize("width", [40, 80, 240])
def test_a_report_is_whole_and_readable_at_any_width(width: int) -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=width), "run", REPORT)
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    flat = " ".join(text.split())
    for told in (
        "run: 4 problems",
        "spec.dataset.promptColumn",
        PROBLEM.message,
        "may pass by itself: nobody answers",
        "and 2 more",
        "mean 120 tokens, 95 % at most 300, of the first 2000; 7 too long",
        "qwen2, 24 layers of width 896",
    ):
        assert told in flat, flat


@pytest.mark.realtime
@pytest.mark.parametrize(("report", "code"), [(REPORT, 1), (PreflightReport(), 0)])
def test_the_trainer_s_checks_run_here_with_the_job_s_plan(
    world: World, capsys: pytest.CaptureFixture[str], report: PreflightReport, code: int
) -> None:
    said, plan = world.folder / "said", world.folder / "plan"
    said.write_text(report.model_dump_json())
    world.replace_python(
        "import os, shutil, sys\n"
        "assert sys.argv[1:4] == ['-m', 'grpo_trainer.preflight', '--local'], sys.argv\n"
        "assert sys.argv[4] == '--prompt' and len(sys.argv) == 6, sys.argv\n"
        "open(sys.argv[5], 'w').write('<|user|>2+2?\\x1b[31m')\n"
        f"shutil.copy(os.environ['GRPO_PLAN'], {str(plan)!r})\n"
        f"shutil.copy({str(said)!r}, os.environ['GRPO_TERMINATION_LOG'])\n",
    )
    assert main(["preflight", "-f", world.job_file]) == code
    made = TrainingPlan.model_validate_json(plan.read_text())
    assert (made.job.namespace, made.job.name, made.model.name) == ("team-a", "run", "team/model")
    out = capsys.readouterr().out
    assert "first prompt:\n<|user|>2+2?\\x1b[31m\n" in out, "nothing steers the terminal"
    assert f"run: {4 if code else 'no'} problems" in out
    assert main(["preflight", "-f", world.job_file, "-o", "json"]) == code
    (document,) = json.loads(capsys.readouterr().out)
    assert document == {"name": "run"} | report.model_dump(mode="json", by_alias=True)


@pytest.mark.realtime
def test_checks_that_end_without_a_report_show_what_they_printed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.replace_python("import sys\nprint('why')\nsys.exit(9)\n")
    assert main(["preflight", "-f", world.job_file]) == MISSING
    err = capsys.readouterr().err
    assert "why" in err
    assert "the checks ended with exit code 9 and no report" in err


def test_a_model_s_folder_that_only_this_machine_has_is_no_check_of_the_hub_s_model(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = local_preflight.LocalPreflight(PreflightReport(), "")
    world.patch.setattr(local_preflight, "require_trainer", lambda _: None)
    world.patch.setattr(local_preflight, "check_here", lambda *_: checked)
    world.patch.chdir(world.folder)
    assert main(["preflight", "-f", world.job_file]) == 0
    assert "not checked" not in capsys.readouterr().out
    (world.folder / "team" / "model").mkdir(parents=True)
    assert main(["preflight", "-f", world.job_file]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not checked spec.model.name the folder team/model of this machine was" in shown


def test_a_laptop_without_the_trainer_is_told_what_to_install(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.patch.setattr(local_preflight, "find_spec", lambda _: None)
    assert main(["preflight", "-f", world.job_file]) == WRONG
    assert "pip install 'grpo-operator[trainer]'" in capsys.readouterr().err


def test_the_job_in_the_cluster_is_the_operator_s_but_nobody_s() -> None:
    body = check_job(METADATA, parse_spec(SPEC), PODS)
    assert body["metadata"]["name"] == "run-check"
    assert "ownerReferences" not in body["metadata"]
    template = body["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["command"] == ["python", "-m", "grpo_trainer.preflight"]
    plan = TrainingPlan.model_validate_json(template["metadata"]["annotations"][PLAN_ANNOTATION])
    assert plan.model.name == "team/model"
    assert not any("managed-by" in label for label in body["metadata"]["labels"])
    assert template["metadata"]["labels"]["cost-center"] == "17"
    assert template["metadata"]["annotations"]["team"] == "a"


KUBECTL = """
import json, sys
from pathlib import Path
folder = Path(__file__).parent
with (folder / "log").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if "create" in sys.argv:
    print(sys.stdin.read())
if "get" in sys.argv and {"grpojobclasses.grpo.dev", "events"} & {*sys.argv}:
    print('{"items": []}')
elif "get" in sys.argv:
    kind = "pods" if "pods" in sys.argv else "jobs"
    answers = json.loads((folder / f"{kind}.json").read_text())
    (folder / f"{kind}.json").write_text(json.dumps(answers[1:] or answers))
    print(json.dumps({"items": answers[0]}))
"""


def ended_pod(message: str) -> dict[str, Any]:
    state = {"terminated": {"message": message}}
    return {"metadata": {"name": "a"}, "status": {"containerStatuses": [{"state": state}]}}


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        (REPORT.model_dump_json(), 1, "spec.dataset.promptColumn"),
        ("Killed", MISSING, "without a report"),
    ],
)
def test_the_pod_s_report_is_printed_and_its_job_deleted(
    world: World, capsys: pytest.CaptureFixture[str], last: str, code: int, told: str
) -> None:
    world.patch.setenv("KUBECTL", f"{sys.executable} {world.folder}/kubectl.py")
    world.patch.setattr(job_pods, "SYSTEM_CLOCK", SteppedClock())
    (world.folder / "kubectl.py").write_text(KUBECTL)
    waits = {"status": {"conditions": [{"reason": "Unschedulable", "message": "no room"}]}}
    pods = [[], [waits], [waits], [ended_pod(last)]]
    (world.folder / "pods.json").write_text(json.dumps(pods))
    failed = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    (world.folder / "jobs.json").write_text(json.dumps([[{}], [{}], [{}], [failed]]))
    command = ["preflight", "-f", world.job_file, "--in-cluster", "--trainer-image", "trainer:1"]
    assert main(command) == code
    out, err = capsys.readouterr()
    assert told in out + err
    assert err.count("job run-check: Unschedulable: no room") == 1
    log = (world.folder / "log").read_text().splitlines()
    namespaced = [line for line in log if "grpojobclasses" not in line]
    assert all("--namespace=team-a" in line for line in namespaced)
    assert "delete job run-check --wait=false" in log[-1]


@dataclass
class CheckJobs:
    """The Jobs of checks behind a kubectl that is no process; each has ended with REPORT."""

    names: set[str]
    may_delete: bool = True

    def answer(self, line: list[str], stdin: str | None = None) -> str:
        """What kubectl prints."""
        if "create" in line:
            name = json.loads(stdin or "")["metadata"]["name"]
            if name in self.names:
                raise KubectlExitError(f'jobs.batch "{name}" already exists')
            self.names.add(name)
            return stdin or ""
        if "delete" in line:
            if not self.may_delete:
                raise KubectlExitError("deletes are forbidden")
            self.names.discard("run-check")
            return ""
        failed = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
        answers = {"jobs": [failed], "pods": [ended_pod(REPORT.model_dump_json())]}
        kind = next((word for word in line if word in answers), "")
        return json.dumps({"items": answers.get(kind, [])})


@pytest.mark.parametrize("jobs", [CheckJobs({"run-check"}), CheckJobs(set(), may_delete=False)])
def test_a_job_that_is_left_over_costs_neither_this_report_nor_the_next(
    world: World, capsys: pytest.CaptureFixture[str], jobs: CheckJobs
) -> None:
    world.patch.setattr(kubectl, "_run", jobs.answer)
    command = ["preflight", "-f", world.job_file, "--in-cluster", "--trainer-image", "trainer:1"]
    assert main(command) == 1
    assert PROBLEM.path in capsys.readouterr().out
    assert jobs.names == (set() if jobs.may_delete else {"run-check"})
