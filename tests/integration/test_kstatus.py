"""What Flux, Helm 4 and Argo CD make of a GRPOJob, by their own libraries.

harness/programs/go/health holds these. The statuses are those that the operator renders. The Flux
expressions and the Lua health check are those of docs/how-to/integrate.
"""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from grpo_api.report.report import Outcome, Result
from grpo_api.status.status import GRPOJobStatus
from grpo_api.text.contract import API_VERSION, KIND
from grpo_codegen.crd import job_schema
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.report.status import to_json
from harness.programs.build import toolchain
from tests.unit.operator_world import (
    GPU_PLAN,
    PLAN,
    after,
    condition,
    job_object,
    make_job,
    make_pull,
    make_seen,
    running,
)

PAGES = Path(__file__).parents[2] / "docs/how-to/integrate"
PAGE = "".join((PAGES / name).read_text() for name in ("flux.md", "argo-cd.md"))
OOM = Outcome(result=Result.OUT_OF_MEMORY, message="CUDA out of memory")
DONE = Outcome(result=Result.SUCCEEDED, message="finished after step 10")
FAILED_BEFORE = {"attempt": 1, "conditions": [condition("Failed"), condition("Stalled")]}


class Verdict(NamedTuple):
    """What the three say."""

    kstatus: str
    flux: str
    argocd: str


def block(language: str, words: str) -> str:
    """The page's block of code in that language with these words."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = (code for code in blocks if words in code)
    return str(found)


def judge(*statuses: dict[str, Any], generation: int = 1) -> list[dict[str, Any]]:
    """The verdicts on jobs with these statuses."""
    (expressions,) = yaml.safe_load(block("yaml", "healthCheckExprs"))["healthCheckExprs"]
    assert (expressions["apiVersion"], expressions["kind"]) == (API_VERSION, KIND)
    command = [
        str(toolchain(("health",)).program("health")),
        json.dumps(expressions),
        block("lua", "obj.status"),
    ]
    head = {"apiVersion": API_VERSION, "kind": KIND}
    objects = (head | job_object(status=status, generation=generation) for status in statuses)
    text = "\n".join(map(json.dumps, objects))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def decided(
    action: Action, reason: str = "", *, seen: Any = None, message: str = "why", **more: Any
) -> GRPOJobStatus:
    """The status that a decision leads to; without a look, of a job that was never admitted."""
    return after(seen or make_seen(make_job()), Decision(action, reason, message, **more))


def unsaved_checkpoint() -> GRPOJobStatus:
    pull = make_pull(checkpoint_problem="no space left on device")
    return after(replace(running(), pull=pull), Decision(Action.WAIT))


WAITING = Verdict("InProgress", "InProgress", "Progressing")
RUNNING = Verdict("Current", "InProgress", "Progressing")
FAILED = Verdict("Failed", "Failed", "Degraded")
STORIES: dict[str, tuple[GRPOJobStatus | dict[str, Any], Verdict]] = {
    "empty": (job_schema()["properties"]["status"]["default"], WAITING),
    "queued": (decided(Action.QUEUE, "WaitingForGPUs", plan=GPU_PLAN), WAITING),
    "without GPUs in the cluster": (decided(Action.QUEUE, "NoGPUs"), WAITING),
    "being checked": (decided(Action.QUEUE, "Checking", plan=GPU_PLAN), WAITING),
    "failed its preflight": (decided(Action.FAIL, "BadInput"), FAILED),
    "waiting for a preflight that can't run": (
        decided(Action.QUEUE, "PreflightBlocked", plan=GPU_PLAN),
        WAITING,
    ),
    "starting": (decided(Action.COMMIT, "Admitted", plan=PLAN), WAITING),
    "restarting": (
        decided(Action.COMMIT, "OutOfMemory", seen=running(), plan=PLAN, ended=OOM),
        WAITING,
    ),
    "running": (after(running(), Decision(Action.WAIT)), RUNNING),
    "running without checkpoints": (unsaved_checkpoint(), RUNNING),
    "suspended": (
        decided(Action.SUSPEND, "Suspended", seen=running()),
        Verdict("Current", "InProgress", "Suspended"),
    ),
    "succeeded": (
        decided(Action.SUCCEED, "Succeeded", seen=running(), ended=DONE),
        Verdict("Current", "Current", "Healthy"),
    ),
    "failed": (decided(Action.FAIL, "OutOfMemory", seen=running(), ended=OOM), FAILED),
    "retried": (
        decided(Action.RETRY, "Retrying", seen=make_seen(make_job(status=FAILED_BEFORE))),
        WAITING,
    ),
    "invalid": (decided(Action.REJECT, "InvalidSpec"), FAILED),
    "without a plan on any hardware": (decided(Action.QUEUE, "UnknownModel"), FAILED),
}


def test_a_job_is_judged_as_a_job_of_kubernetes_is() -> None:
    statuses = [
        status if isinstance(status, dict) else to_json(status) for status, _ in STORIES.values()
    ]
    found = {
        name: Verdict(one["kstatus"], one["flux"], one["argocd"]["status"])
        for name, one in zip(STORIES, judge(*statuses), strict=True)
    }
    assert found == {name: verdict for name, (_, verdict) in STORIES.items()}


def test_a_verdict_says_why() -> None:
    waiting = to_json(decided(Action.QUEUE, "WaitingForGPUs", message="2 of 8 GPUs are free"))
    failed = to_json(decided(Action.FAIL, "OutOfMemory", seen=running(), message="too large"))
    on_waiting, on_failed = judge(waiting, failed)
    assert (on_waiting["message"], on_waiting["argocd"]["message"]) == ("2 of 8 GPUs are free",) * 2
    assert (on_failed["message"], on_failed["argocd"]["message"]) == ("too large",) * 2


@pytest.mark.parametrize("name", ["running", "succeeded", "failed"])
def test_a_changed_spec_is_in_progress_until_the_operator_has_seen_it(name: str) -> None:
    status, _ = STORIES[name]
    assert isinstance(status, GRPOJobStatus)
    (found,) = judge(to_json(status), generation=2)
    assert Verdict(found["kstatus"], found["flux"], found["argocd"]["status"]) == WAITING
