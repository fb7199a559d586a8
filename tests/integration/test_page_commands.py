"""Commands of the pages that look at a job, on a real API server through a real kubectl; and the
Kubeflow Pipelines step, which creates one."""

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kubernetes import client, config

from harness.fixtures import AnyCluster
from harness.programs.build import component
from harness.programs.patience import run_to_end
from harness.programs.processes import until
from tests.samples import SPEC, job
from tests.unit.test_commands import COMMANDS, FENCE, Block, place

ROOT = Path(__file__).parents[2]
MARK = f"run: {Path(__file__).relative_to(ROOT)}"
BLOCKS = [block for block in COMMANDS if block.mark == MARK]
JOBS = ("my-job", "quickstart", "gsm8k-llama")
ENDED = {
    "phase": "Failed",
    "observedGeneration": 1,
    "preflight": {"digest": "0" * 64},
    "conditions": [
        {
            "type": name,
            "status": "True",
            "lastTransitionTime": "2026-01-31T12:00:00Z",
            "reason": "BadInput",
            "message": "spec.dataset.promptColumn: the dataset has no column 'question'",
        }
        for name in ("Checked", "Failed", "Finished")
    ],
}
EXPORT = {"to": "Volume", "path": "pvc://a/b", "format": "Model", "bytes": 1}
EXPORT |= {"weightsHash": f"sha256:{'0' * 64}"}


def write_status(cluster: AnyCluster, name: str, status: dict[str, Any]) -> None:
    patch = ("patch", "grpojob", name, "--subresource=status", "--type=merge")
    cluster.kubectl(*patch, "--patch", json.dumps({"status": status}))


@pytest.fixture(scope="module")
def ended_jobs(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """The pages' jobs, which have failed."""
    for name in JOBS:
        crd_cluster.kubectl("create", "--filename", "-", input=json.dumps(job(name, SPEC)))
        write_status(crd_cluster, name, ENDED)
    yield crd_cluster
    crd_cluster.kubectl("delete", "grpojobs", *JOBS)


@pytest.mark.realtime
@pytest.mark.parametrize("block", BLOCKS, ids=place)
def test_a_page_s_commands_work_as_they_stand(ended_jobs: AnyCluster, block: Block) -> None:
    kubectl = shlex.join(map(str, component("kubectl")))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = f'kubectl() {{ {kubectl} "$@"; }}\n{block.text}'
    environment = ended_jobs.environment | {"PATH": path, "KUBECTL": kubectl}
    done = run_to_end(["bash", "-e", "-c", script], 60, env=environment)
    assert done.returncode == 0, (block.text, done.stdout, done.stderr)


def pipeline_step(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[..., None]
) -> Callable[..., str]:
    """The page's function, without Kubeflow around it. `connect` is `load_incluster_config`."""
    page = (ROOT / "docs/how-to/integrate/kubeflow-pipelines.md").read_text()
    (code,) = (
        found["text"] for found in FENCE.finditer(page) if "pipeline.py" in found["language"]
    )
    kfp = ModuleType("kfp")
    as_it_is = {"component": lambda **_: lambda function: function}
    kfp.dsl = type("dsl", (), as_it_is | {"pipeline": lambda **_: lambda function: function})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kfp", kfp)
    monkeypatch.setattr("kubernetes.config.load_incluster_config", connect)
    names: dict[str, Any] = {}
    exec(compile(code, "pipeline.py", "exec"), names)
    step: Callable[..., str] = names["train_grpo"]
    return step


@pytest.mark.realtime
def test_the_pipeline_s_step_ends_as_its_job_does(
    crd_cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = partial(config.load_kube_config, str(crd_cluster.kubeconfig), None)
    step = pipeline_step(monkeypatch, connect)
    ends: dict[str, dict[str, Any]] = {
        "step-trains": {"phase": "Succeeded", "export": EXPORT},
        "step-fails": {"phase": "Failed"},
    }
    results: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            results[name] = step(job(name, SPEC), "default", poll_seconds=1)
        except RuntimeError as error:
            results[name] = str(error)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in ends]
    for thread in threads:
        thread.start()
    for name, status in ends.items():
        until(f"{name} to be created", partial(exists, crd_cluster, name))
        write_status(crd_cluster, name, status)
    until("both steps to end", lambda: results.keys() == ends.keys())
    crd_cluster.kubectl("delete", "grpojobs", *ends)
    assert results == {"step-trains": "pvc://a/b", "step-fails": "step-fails: failed"}


class RestartingApi(BaseHTTPRequestHandler):
    """An API server that is away whenever a job is read for the first time."""

    reads = 0

    def do_POST(self) -> None:
        self.answer(201, {"metadata": {"name": "run"}})

    def do_GET(self) -> None:
        type(self).reads += 1
        is_away = self.reads == 1
        self.answer(503 if is_away else 200, {"status": {"phase": "Succeeded", "export": EXPORT}})

    def answer(self, code: int, body: dict[str, Any]) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.mark.realtime
def test_the_pipeline_s_step_outlives_a_restart_of_the_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(configuration: client.Configuration) -> None:
        configuration.host = f"http://127.0.0.1:{server.server_port}"

    step = pipeline_step(monkeypatch, connect)
    with ThreadingHTTPServer(("127.0.0.1", 0), RestartingApi) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert step(job("run", SPEC), "default") == "pvc://a/b"
        server.shutdown()


def exists(cluster: AnyCluster, name: str) -> bool:
    listed = cluster.kubectl("get", "grpojobs", "--output", "name")
    return bool(re.search(rf"/{name}$", listed, re.MULTILINE))
