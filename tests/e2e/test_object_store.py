"""A cluster without a shared volume for checkpoints: two pods on two nodes, an object store alone,
a pod lost half way.

The store is versitygw in a pod, whose objects are files of this machine. What trains sees it over
the network only.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_api.status.status import GRPOJobStatus
from grpo_trainer.stores.run_store import HEAD, Head
from harness.fixtures import AnyCluster
from harness.images.archives import write_image
from harness.jobs import Jobs, Object, attempt
from harness.programs.build import toolchain
from harness.programs.object_stores import ACCESS, BUCKET, CREDENTIALS, SECRET
from tests.e2e.conftest import CLAIM, grpo

pytestmark = pytest.mark.slow

NAME, IMAGE, PORT = "stored", "localhost/stores/versitygw:1", 7070
STEPS, EVERY = 64, 8
"""A step takes a third of a second on two idle cores: on faster ones, too, the run is still on when
step 9 is seen."""


@pytest.fixture(scope="module")
def objects(
    installed: AnyCluster, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The bucket's folder, of a store that the pods reach as `store`; its keys are in a secret of
    that name."""
    archive, folder = (
        tmp_path_factory.mktemp("image") / "store.tar",
        jobs.checkpoints.parent / "store",
    )
    write_image(
        {"versitygw": Path(toolchain(("versitygw",)).program("versitygw"))}, IMAGE, archive, {}
    )
    installed.load(archive)
    for path in (folder, folder / "data", folder / "data" / BUCKET, folder / "meta"):
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    made = [
        one | {"metadata": {"name": "store", "labels": {"app": "store"}}} for one in manifests()
    ]
    jobs.kubectl(
        "apply",
        "--filename",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": made}),
    )
    jobs.wait_pod_ready("store")
    yield folder / "data" / BUCKET
    jobs.kubectl(
        "delete", "secret/store", "service/store", "pod/store", "--ignore-not-found", "--now"
    )


def manifests() -> list[Object]:
    """The store's pod, service and keys."""
    keys = ["--access", ACCESS, "--secret", SECRET, "--port", f":{PORT}", "--quiet"]
    container = {
        "name": "store",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/versitygw", *keys, "posix", "--sidecar", "/store/meta", "/store/data"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "store", "mountPath": "/store", "subPath": "store"}],
    }
    pod = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "store", "persistentVolumeClaim": {"claimName": CLAIM}}],
    }
    return [
        {"apiVersion": "v1", "kind": "Secret", "stringData": dict(CREDENTIALS)},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "spec": {"selector": {"app": "store"}, "ports": [{"port": PORT}]},
        },
        {"apiVersion": "v1", "kind": "Pod", "spec": pod},
    ]


@pytest.fixture(scope="module")
def done(jobs: Jobs, objects: Path) -> Object:
    """A job that has lost a pod after its first checkpoint, and has gone on to its end."""
    place: Object = {
        "url": f"s3://{BUCKET}/runs",
        "endpoint": f"http://store.{jobs.namespace}.svc:{PORT}",
    }
    place["credentialsSecretRef"] = {"name": "store"}
    jobs.create(
        NAME, {"maxSteps": STEPS}, checkpoint={"store": place, "everySteps": EVERY, "keep": 1}
    )
    running = jobs.wait_step(NAME, EVERY + 1)
    nodes = {pod["spec"]["nodeName"] for pod in jobs.list("pods", NAME)}
    assert len(nodes) == 2
    jobs.kubectl(
        "delete", "pod", running["status"]["pods"][1]["name"], "--grace-period=0", "--force"
    )
    return jobs.wait_succeeded(NAME)


def test_it_goes_on_from_the_store_on_other_pods(jobs: Jobs, done: Object) -> None:
    assert attempt(done) == 2
    log = jobs.kubectl("logs", f"job/{NAME}-2", "--all-pods")
    found = re.search(r'"resumedFromStep": (\d+), "checkpoint": "(\S+)"', log)
    assert found
    run = f"s3://{BUCKET}/runs/{NAME}-{done['metadata']['uid']}"
    assert int(found[1]) >= EVERY
    assert found[2] == f"{run}/attempt-1/checkpoint-{found[1]}"
    status = GRPOJobStatus.model_validate(done["status"])
    assert status.checkpoint
    assert status.checkpoint.where == f"{run}/attempt-2/checkpoint-{STEPS}"
    assert status.export
    assert status.export.path == f"{run}/attempt-2/export"


def test_nothing_is_left_on_the_store_but_what_counts(objects: Path, done: Object) -> None:
    run = objects / "runs" / f"{NAME}-{done['metadata']['uid']}"
    head = Head.model_validate_json((run / HEAD).read_text())
    assert head.outcome is not None
    assert [(one.attempt, one.step) for one in head.checkpoints] == [(2, STEPS)]
    history = {"attempt-2/metrics.jsonl", "attempt-2/samples.jsonl"}
    counted = {f"attempt-2/checkpoint-{STEPS}", "attempt-2/export", HEAD} | history
    left = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {"/".join(name.split("/")[:2]) for name in left} == counted


def test_the_model_comes_home_from_the_store(
    jobs: Jobs, objects: Path, done: Object, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    said = grpo(
        jobs.access, "export", NAME, "--namespace", jobs.namespace, "--to", str(tmp_path / "model")
    )
    assert f"{done['status']['export']['weightsHash']}, as the job reported it" in said.replace(
        "\n", " "
    )
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=tmp_path / "model",
        check=True,
    )
    stored = objects / "runs" / f"{NAME}-{done['metadata']['uid']}" / "attempt-2" / "export"
    here, there = (
        {path.name: path.read_bytes() for path in one.iterdir()}
        for one in (tmp_path / "model", stored)
    )
    assert here == there
    assert NAME in grpo(jobs.access, "verify", str(tmp_path / "model"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 70_000
    left = jobs.kubectl("get", "jobs", "--selector=grpo.dev/component=export", "--output=name")
    assert left == ""
