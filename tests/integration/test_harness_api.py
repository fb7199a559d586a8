"""The API level of the cluster harness keeps its promises; every other integration test stands on
it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.access import CommandError, ExternalCluster
from harness.cluster import Cluster, clusters_folder
from harness.controlplane import ControlPlaneSettings
from harness.fixtures import api_level
from harness.programs.build import component
from harness.programs.cache import locked
from harness.programs.processes import ClusterError, Processes, until
from harness.settings import ClusterSettings, GpuSettings
from tests.generated import gated

REPOSITORY = Path(__file__).parents[2]
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "ends"},
    "spec": {
        "backoffLimit": 0,
        "template": {
            "metadata": {"annotations": {"kwok.test/after": "0s", "kwok.test/exit-code": "7"}},
            "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]},
        },
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of this file's own, so that it can be harmed; each test leaves it whole."""
    with Cluster.create(
        f"harness-own-{os.getpid()}", ClusterSettings(gpus=GpuSettings(per_node=4))
    ) as own:
        yield own


def test_threads_take_turns_on_a_clients_connection(grpo_cluster: Cluster) -> None:
    client = grpo_cluster.control_plane.client()
    with ThreadPoolExecutor(8) as threads:
        versions = list(threads.map(client.get, ["/version"] * 64))
    assert {one["major"] for one in versions} == {"1"}


def test_an_api_server_crash_keeps_data_and_address(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "kept", "--from-literal=key=value")
    cluster.stop_apiserver()
    with pytest.raises(CommandError, match="refused"):
        cluster.kubectl("get", "configmap", "kept")
    cluster.start_apiserver()
    assert cluster.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.key}") == "value"


def test_two_clusters_at_once_are_strangers(cluster: Cluster, grpo_cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "only-there")
    assert cluster.url != grpo_cluster.url
    assert "only-there" not in grpo_cluster.kubectl("get", "namespaces", "-o", "name")


def test_a_name_that_is_up_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="is up already"):
        Cluster.create(cluster.directory.name, ClusterSettings())
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"


def test_kwok_nodes_offer_gpus_and_end_pods_as_annotated(cluster: Cluster) -> None:
    cluster.add_kwok_nodes(0, 3)
    gpus = cluster.kubectl(
        "get", "nodes", "-o", "jsonpath={.items[*].status.allocatable.nvidia\\.com/gpu}"
    )
    assert gpus == "4 4 4"
    cluster.kubectl("create", "-f", "-", input=json.dumps(JOB))
    cluster.kubectl("wait", "--for=condition=Failed", "job/ends", "--timeout=60s")
    state = "jsonpath={.items[0].status.containerStatuses[0].state.terminated.exitCode}"
    assert cluster.kubectl("get", "pods", "-l", "job-name=ends", "-o", state) == "7"


@pytest.mark.slow
def test_envtest_assets_run_instead_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("etcd", "kube-apiserver"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec {component(name)[0]} {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    said: list[str] = []
    with Cluster.create(f"assets-{os.getpid()}", ClusterSettings(), said.append) as lent:
        lent.stop_apiserver()
        lent.start_apiserver()
        assert "default" in lent.kubectl("get", "namespaces", "-o", "name")
        roles = {
            role
            for role in ("etcd", "apiserver", "controller-manager", "scheduler")
            if lent.processes.find(role)
        }
    assert roles == {"etcd", "apiserver"}
    assert "no kube-controller-manager and no kube-scheduler" in said[1]


def test_a_lent_cluster_is_used_and_not_harmed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_TEST_KUBECONFIG", str(cluster.kubeconfig))
    with api_level() as lent:
        assert isinstance(lent, ExternalCluster)
        assert lent.url == cluster.url
        with pytest.raises(ClusterError, match="not ours to stop"):
            lent.stop_apiserver()
        with pytest.raises(ClusterError, match="reach, or unset GRPO_TEST_KUBECONFIG"):
            lent.load(Path("image.tar"))
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"


@pytest.mark.slow
def test_the_audit_log_has_every_request() -> None:
    settings = ClusterSettings(control_plane=ControlPlaneSettings(audit=True))
    with Cluster.create(f"audit-{os.getpid()}", settings) as own:
        own.kubectl("create", "configmap", "counted")
        lines = (own.directory / "audit.log").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    creates = [
        request
        for request in requests
        if request["verb"] == "create" and request.get("objectRef", {}).get("name") == "counted"
    ]
    assert {request["user"]["username"] for request in creates} == {"admin"}


@pytest.mark.slow  # as the nodes' own one in `make test`
def test_down_leaves_no_process_and_no_file_and_can_be_repeated() -> None:
    cluster = Cluster.create(f"harness-{os.getpid()}", ClusterSettings())
    assert (
        len(cluster.processes.find()) >= 5
    )  # etcd, API server, controller manager, scheduler, guard
    cluster.down()
    assert cluster.processes.find() == []
    assert not cluster.directory.exists()
    cluster.down()


@pytest.mark.parametrize("number", gated([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
def test_a_cluster_dies_with_the_process_that_made_it(number: signal.Signals) -> None:
    name = f"harness-{os.getpid()}-{number.name}"
    # a test run that was started in the background has SIGINT ignored, and its children inherit
    # that
    code = f"""
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from harness.cluster import Cluster
from harness.settings import ClusterSettings
cluster = Cluster.create({name!r}, ClusterSettings())
print("up", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        owner.send_signal(number)
    processes = Processes(clusters_folder() / name)
    until(
        "the guard to remove the cluster",
        lambda: not processes.find() and not processes.directory.exists(),
    )


@contextmanager
def starting(name: str, programs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose cluster never comes up: its etcd and its API server never serve."""
    # Its own folder: a killed program's file is busy until the kernel has let it go.
    programs = programs / name
    programs.mkdir()
    for program in ("etcd", "kube-apiserver"):
        (programs / program).write_text("#!/bin/sh\nexec sleep 3600\n")
        (programs / program).chmod(0o755)
    command = [sys.executable, "-m", "harness", "--name", name, "up", "--api-only"]
    variables = {**os.environ, "KUBEBUILDER_ASSETS": str(programs)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY, env=variables
    ) as owner:
        processes = Processes(clusters_folder() / name)
        try:
            until("the first process", lambda: processes.find("etcd"))
            yield owner
        finally:
            owner.kill()
    until(
        "the guard to remove the cluster",
        lambda: not processes.find() and not processes.directory.exists(),
    )


def test_what_a_crash_of_everything_left_is_swept_by_the_next_start(tmp_path: Path) -> None:
    with starting(f"lost-{os.getpid()}", tmp_path) as owner:
        lost = Processes(clusters_folder() / f"lost-{os.getpid()}")
        with locked(clusters_folder() / ".lock"):  # so that no other start sweeps it before we look
            owner.kill()
            lost.kill()  # the guard too, as when the machine goes down
            assert lost.directory.exists()
        with starting(f"harness-{os.getpid()}", tmp_path):
            assert not lost.directory.exists()


@pytest.mark.slow  # as the nodes' own one in `make test`
def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    with starting(f"harness-{os.getpid()}", tmp_path):
        pass
