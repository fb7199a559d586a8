"""What only the operator can know to be wrong gets Admitted=False, a reason and a sentence, and
nothing is created.

What test_bad_specs.py can't show: a schema knows neither Python's regular expressions, nor models,
nor how big a plan is, nor how many nodes share a volume.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_operator.pods.pod_spec import PodDefaults
from harness.cluster import Cluster
from tests.integration.operator_bench import JOBS, PODS, Bench, Object
from tests.integration.operator_thread import OperatorThread

CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"
CPU = {"accelerator": "CPU", "nodes": 2}
WIDE = {"format": {"pattern": "數" * 4000}}


@pytest.fixture(scope="module")
def bench(grpo_cluster: Cluster) -> Bench:
    return Bench(grpo_cluster, grpo_cluster.control_plane.client())


@pytest.fixture(scope="module", autouse=True)
def operator(grpo_cluster: Cluster, bench: Bench) -> Iterator[OperatorThread]:
    with bench.operating() as one:
        yield one


def rejected(bench: Bench, name: str, **spec: Any) -> tuple[str, str]:
    """Submits the job and returns the reason and the sentence of its rejection, once there is
    one."""
    bench.submit(name, **spec)
    bench.wait("a verdict", lambda: bench.condition("Admitted", name)[0])
    status, reason, message = bench.condition("Admitted", name)
    assert status == "False"
    assert bench.status(name).get("attempt", 0) == 0
    return reason, message


def created(bench: Bench) -> list[Object]:
    return [item for path in (JOBS, PODS, CLAIMS) for item in bench.get(path)["items"]]


@pytest.mark.parametrize(
    ("name", "spec", "reason", "says"),
    [
        (
            "pattern",
            {"rewards": [{"format": {"pattern": "<answer>("}}]},
            "InvalidSpec",
            "spec.rewards[0].format.pattern: not a regular expression",
        ),
        ("model", {"model": {"name": "nobody/knows-this"}}, "UnknownModel", "parameters"),
        (
            "batch",
            {"training": {"promptsPerStep": 1, "numGenerations": 3}},
            "InvalidBatchSplit",
            "3",
        ),
        ("size", {"rewards": [WIDE] * 32}, "NotSupported", "bytes of settings"),
    ],
)
def test_a_job_that_only_the_operator_can_reject(
    bench: Bench, name: str, spec: dict[str, Any], reason: str, says: str
) -> None:
    told, message = rejected(bench, name, **spec)
    assert (told, says in message) == (reason, True), message
    assert created(bench) == []


def test_a_rejected_job_starts_once_it_is_mended(bench: Bench) -> None:
    rejected(bench, "mended", rewards=[{"format": {"pattern": "("}}])
    bench.patch(
        "/apis/grpo.dev/v1alpha1/namespaces/{}/grpojobs",
        "mended",
        {"spec": {"rewards": [{"accuracy": {}}]}},
    )
    bench.wait_running("mended")
    assert bench.condition("Admitted", "mended")[0] == "True"


def test_without_an_image_anywhere_nothing_starts(grpo_cluster: Cluster) -> None:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    with bench.operating(pods=PodDefaults()):
        reason, message = rejected(bench, "bare", placement=CPU)
    assert reason == "NoImage"
    assert message.startswith("spec.image: unset")
    assert created(bench) == []


MADE_BY = "ebs.csi.aws.com"


@contextmanager
def class_of_disks(bench: Bench) -> Iterator[None]:
    """A StorageClass `disks`, whose volumes one node mounts at a time."""
    classes = "/apis/storage.k8s.io/v1/storageclasses"
    bench.post(classes, {"metadata": {"name": "disks"}, "provisioner": MADE_BY})
    try:
        yield
    finally:
        bench.client.request("DELETE", f"{classes}/disks")


def test_a_claim_that_no_node_could_mount_is_refused(grpo_cluster: Cluster) -> None:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    template = {"size": "10Gi", "storageClassName": "disks"}
    with class_of_disks(bench), bench.operating():
        reason, message = rejected(bench, "disk", checkpoint={"volumeClaimTemplate": template})
    assert (reason, MADE_BY in message) == ("StorageNotShared", True), message
    assert created(bench) == []


def test_a_claim_of_one_s_own_that_no_node_could_mount_is_named_before_there_is_a_pod(
    grpo_cluster: Cluster,
) -> None:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "disks",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    with class_of_disks(bench), bench.operating():
        bench.post(CLAIMS, {"metadata": {"name": "data"}, "spec": spec})
        checkpoint = {"volume": {"claimName": "data"}}
        bench.submit("own", placement=CPU, checkpoint=checkpoint)
        bench.wait(
            "the claim's name",
            lambda: bench.condition("Scheduled", "own")[1] == "StorageNotShared",
            hurry=True,
        )
        message = bench.condition("Scheduled", "own")[2]
        assert message.startswith("PersistentVolumeClaim data is ReadWriteMany")
    assert bench.children("own") == []
