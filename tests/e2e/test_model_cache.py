"""Models that are there before the job: from an image, and from a cache that `grpo prefetch` has
filled.

The hub is a pod with the tests' own, which is gone when the job starts.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_cli.__main__ import main
from harness.fixtures import AnyCluster
from harness.images.archives import write_image
from harness.images.recipes import Image
from harness.jobs import Jobs, Object
from harness.programs.build import component
from tests.e2e.conftest import CLAIM, NAMESPACE
from tests.trainer import hub

pytestmark = pytest.mark.slow

STEPS = 2
HUB = """
from pathlib import Path
import hub
server = hub.HubServer(8000, "")
server.add("model", "team/model", hub.files_of(Path("/content/model")))
server.add("dataset", "team/rows", {"train.jsonl": Path("/content/arithmetic.jsonl").read_bytes()})
server.serve_forever()
"""
CACHED: dict[str, Any] = {
    "model": {
        "name": "team/model",
        "parameters": "77K",
        "cache": {"claimName": CLAIM, "subPath": "cache"},
    },
    "dataset": {"name": "team/rows", "promptColumn": "prompt"},
}


def content(jobs: Jobs) -> Path:
    """The folder with the demo's model and its problems."""
    return jobs.checkpoints.parent


def test_a_job_trains_a_model_from_an_image(
    installed: AnyCluster, jobs: Jobs, tmp_path: Path
) -> None:
    name, archive = "localhost/models/tiny:1", tmp_path / "tiny.tar"
    write_image({"tiny": content(jobs) / "model"}, name, archive, {})
    installed.load(archive)
    model = {
        "name": "/models/tiny",
        "parameters": "77K",
        "image": {"reference": name, "pullPolicy": "Never"},
    }
    jobs.create("from-image", {"maxSteps": STEPS}, model=model)
    job = jobs.wait_succeeded("from-image")
    assert job["status"]["progress"]["step"] == STEPS
    asked = job["status"]["plan"]["ephemeralStorageBytes"]
    assert asked > 0, "the nodes report their disks"
    for pod in jobs.list("pods", "from-image"):
        assert {"name": "model", "image": model["image"]} in pod["spec"]["volumes"]
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["requests"]["ephemeral-storage"] in (str(asked), f"{asked // 2**20}Mi")
        assert "ephemeral-storage" not in resources.get("limits", {})


@pytest.fixture
def job_file(jobs: Jobs, hub_pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that fetches of the hub, as a file; and kubectl for the commands."""
    monkeypatch.setenv("KUBECTL", shlex.join(map(str, component("kubectl"))))
    monkeypatch.setenv("KUBECONFIG", str(jobs.access.kubeconfig))
    spec = {**jobs.template["spec"], **CACHED, "env": [{"name": "HF_ENDPOINT", "value": hub_pod}]}
    job = {**jobs.template, "metadata": {"name": "cached", "namespace": NAMESPACE}, "spec": spec}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


@pytest.fixture
def hub_pod(jobs: Jobs, trainer_image: Image) -> Iterator[str]:
    """A hub in the cluster, by its address."""
    beside = {"name": "hub", "labels": {"app": "hub"}}
    secure = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    container = {
        "name": "hub",
        "image": trainer_image.name,
        "command": ["python3", "-c", HUB],
        "env": [{"name": "PYTHONPATH", "value": "/code"}],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "securityContext": secure,
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("code", "content")],
    }
    pod: Object = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "code", "configMap": {"name": "hub"}},
            {"name": "content", "persistentVolumeClaim": {"claimName": CLAIM}},
        ],
    }
    objects: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "data": {"hub.py": Path(hub.__file__).read_text()},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "spec": {"selector": beside["labels"], "ports": [{"port": 8000}]},
        },
        {"apiVersion": "v1", "kind": "Pod", "spec": pod},
    ]
    items = [one | {"metadata": beside} for one in objects]
    jobs.kubectl(
        "apply",
        "--filename",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
    )
    jobs.wait_pod_ready("hub")
    yield f"http://hub.{jobs.namespace}.svc:8000"
    jobs.kubectl("delete", "configmap/hub", "service/hub", "pod/hub", "--ignore-not-found", "--now")


def test_a_cache_that_was_filled_before_needs_no_hub(
    jobs: Jobs, trainer_image: Image, job_file: Path
) -> None:
    arguments = ["prefetch", "-f", str(job_file), "--trainer-image", trainer_image.name]
    assert main(arguments) == 0
    assert main(arguments) == 0, "nothing is left to fetch"
    jobs.kubectl("delete", "pod/hub", "--now")
    jobs.create(
        "cached", {"maxSteps": STEPS}, **CACHED, env=[{"name": "HF_HUB_OFFLINE", "value": "1"}]
    )
    done = jobs.wait_succeeded("cached")
    assert done["status"]["revisions"].keys() >= {"model", "dataset"}
