"""The commands that submit, follow and change jobs, through a real kubectl against an operator on a
real API server."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from grpo_api.text.contract import API_VERSION, KIND
from grpo_cli.__main__ import main
from harness.programs.build import component
from tests.integration.operator_bench import GRPOJOBS, SPEC, Bench, outcome
from tests.integration.operator_thread import OperatorThread


@pytest.fixture
def namespace(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """The bench's namespace, with kubectl for the commands."""
    monkeypatch.setenv("KUBECTL", shlex.join(map(str, component("kubectl"))))
    monkeypatch.setenv("KUBECONFIG", str(bench.cluster.kubeconfig))
    return bench.namespace


def test_a_job_is_submitted_followed_changed_and_deleted(
    bench: Bench,
    operator: OperatorThread,
    namespace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def grpo(*arguments: str, code: int = 0) -> str:
        assert main([*arguments, "-n", namespace]) == code
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert "no GRPOJobs found" in grpo("list")
    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "run"}, "spec": SPEC}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    grpo("submit", "-f", str(tmp_path / "job.yaml"))
    bench.wait_running()
    assert "run" in grpo("list")
    assert json.loads(grpo("list", "-o", "json"))["items"][0]["metadata"]["name"] == "run"
    assert yaml.safe_load(grpo("list", "-o", "yaml"))["items"][0]["kind"] == KIND
    assert "run is Running" in grpo("why", "run")
    assert "run: Running" in grpo("wait", "run", "--timeout", "0", code=6)
    grpo("suspend", "run")
    bench.wait_phase("Suspended", hurry=True)
    assert "Suspended" in grpo("why", "run")
    grpo("resume", "run")
    pods = bench.wait_running(attempt=2)
    assert "only a job that has failed" in grpo("retry", "run", code=5)
    bench.end(pods[0], 43, outcome("BadInput", message="no such reward function"))
    assert "run: Failed" in grpo("wait", "run", code=1)
    assert "no such reward function" in grpo("why", "run")
    grpo("retry", "run")
    bench.end(bench.wait_running(attempt=3)[0], message=outcome("Succeeded"))
    assert "run: Succeeded" in grpo("wait", "run")
    grpo("delete", "run")
    bench.wait("the job to be gone", lambda: not bench.exists(GRPOJOBS, "run"))
    assert "NotFound" in grpo("wait", "run", code=4)
