"""`grpo export` against a real API server that has no kubelet: what it makes is admitted, and goes
whatever happens."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.__main__ import main
from harness.fixtures import AnyCluster
from harness.programs.build import component
from tests.samples import changed, job

NAME = "has-a-model"
SPEC = changed(
    {
        "placement": {"accelerator": "CPU", "nodes": 1},
        "model.parameters": "77K",
        "image": "trainer:1",
    }
)
SPEC |= {"checkpoint": {"volume": {"claimName": "team", "subPath": "kept"}}}
PLAN = {
    "strategy": "Clone",
    "method": "Full",
    "accelerator": "CPU",
    "microBatch": 8,
    "gradientAccumulation": 1,
}
PLAN |= {"stepsPerGeneration": 1, "dtype": "float32", "parameters": "77K", "saveEverySteps": 100}
EXPORT = {"to": "Volume", "path": "pvc://team/kept/x/export", "format": "Model", "bytes": 9}
EXPORT |= {"weightsHash": f"sha256:{'0' * 64}"}
STATUS: dict[str, Any] = {"phase": "Succeeded", "attempt": 1, "plan": PLAN, "export": EXPORT}
NAMESPACE = "restricted-export"
LEFT = ("get", "jobs,pods", "-n", NAMESPACE, "-l", "grpo.dev/component=export", "-o", "name")


@pytest.fixture(scope="module")
def namespace(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """A namespace of the restricted standard with a job that has exported its model."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    made = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": labels},
    }
    crd_cluster.kubectl("create", "-f", "-", input=json.dumps(made))
    accounts = ("get", "serviceaccounts", "--namespace", NAMESPACE, "--output", "name")
    crd_cluster.wait("its account", *accounts, expect="serviceaccount/default")
    crd_cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", input=json.dumps(job(NAME, SPEC)))
    patch = json.dumps({"status": STATUS})
    patched = (
        "patch",
        "grpojob",
        NAME,
        "-n",
        NAMESPACE,
        "--subresource=status",
        "--type=merge",
        "-p",
        patch,
    )
    crd_cluster.kubectl(*patched)
    yield crd_cluster
    crd_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def kubectl(namespace: AnyCluster, monkeypatch: pytest.MonkeyPatch) -> AnyCluster:
    """kubectl for the command."""
    monkeypatch.setenv("KUBECTL", shlex.join(map(str, component("kubectl"))))
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    return namespace


def test_a_pod_that_does_not_come_is_told_and_taken_away(
    kubectl: AnyCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = tmp_path / "model"
    assert main(["export", NAME, "-n", NAMESPACE, "--to", str(to), "--timeout", "0"]) == 4
    assert f"grpo: the pod of {NAME}-export-" in capsys.readouterr().err
    assert not to.exists()
    kubectl.wait("the export's Job and pod", *LEFT, expect="")


def made_by(monkeypatch: pytest.MonkeyPatch, to: Path, *more: str) -> dict[str, Any]:
    """The Job that the command would create."""
    made: list[dict[str, Any]] = []

    def refuse(_: Any, manifest: dict[str, Any]) -> str:
        made.append(manifest)
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_cli.cluster.kubectl.create_object", refuse)
    assert main(["export", NAME, "-n", NAMESPACE, "--to", str(to), *more]) == 130
    return made[0]


def admitted(kubectl: AnyCluster, manifest: dict[str, Any]) -> None:
    """Has the API server judge the Job's pod."""
    template = manifest["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {**template["metadata"], "name": "one"},
    }
    kubectl.kubectl("create", "--dry-run=server", "-n", NAMESPACE, "-f", "-", input=json.dumps(pod))


@pytest.mark.parametrize("more", [[], ["--dtype", "bfloat16"]])
def test_the_pod_passes_the_restricted_standard(
    kubectl: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    admitted(kubectl, made_by(monkeypatch, tmp_path, *more))


def test_the_pod_goes_where_a_pod_has_its_claim(
    kubectl: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"requests": {"storage": "1Gi"}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "team"}}
    claim["spec"] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": size,
        "storageClassName": "none",
    }
    kubectl.kubectl("create", "-n", NAMESPACE, "-f", "-", input=json.dumps(claim))
    assert "affinity" not in made_by(monkeypatch, tmp_path)["spec"]["template"]["spec"]
    holder = made_by(monkeypatch, tmp_path)["spec"]["template"]["spec"] | {"nodeName": "node-7"}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "holder"}, "spec": holder}
    kubectl.kubectl("create", "-n", NAMESPACE, "-f", "-", input=json.dumps(body))
    made = made_by(monkeypatch, tmp_path)
    affinity = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]
    admitted(kubectl, made)


def test_a_folder_of_something_else_is_seen_before_a_pod_is_made(
    kubectl: AnyCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["export", NAME, "-n", NAMESPACE, "--to", str(tmp_path / "file")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert kubectl.kubectl(*LEFT) == ""
