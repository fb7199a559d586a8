"""The node level of the cluster harness keeps its promises; every other end-to-end test stands on
it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.access import CommandError
from harness.cluster import Cluster, clusters_folder
from harness.controlplane import ControlPlaneSettings
from harness.fixtures import training_settings
from harness.images.recipes import (
    CONTAINER_SITE_PACKAGES,
    Image,
    engine_trainer_image,
    light_trainer_image,
    python_image,
    slim_trainer_image,
)
from harness.nodes import cgroups
from harness.nodes.network import Addresses
from harness.programs.processes import Processes, until
from harness.settings import ClusterSettings, GpuSettings, load_settings
from tests.generated import gated

SO_NETNS_COOKIE = 71  # Linux' asm-generic/socket.h; Python's socket module has no name for it
PRINT_COOKIE = f"""
import socket
cookie = socket.socket().getsockopt(socket.SOL_SOCKET, {SO_NETNS_COOKIE}, 8)
print(int.from_bytes(cookie, "little"))
"""
GANG = """
apiVersion: v1
kind: Namespace
metadata:
  name: gang
  labels: {pod-security.kubernetes.io/enforce: restricted}
---
apiVersion: v1
kind: Service
metadata: {name: peers, namespace: gang}
spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {app: gang}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: pair, namespace: gang}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  backoffLimit: 0
  template:
    metadata: {labels: {app: gang}}
    spec:
      subdomain: peers
      restartPolicy: Never
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: DoNotSchedule
        labelSelector: {matchLabels: {app: gang}}
      containers:
      - name: main
        image: IMAGE
        imagePullPolicy: Never
        securityContext:
          allowPrivilegeEscalation: false
          capabilities: {drop: [ALL]}
          readOnlyRootFilesystem: true
        resources: {limits: {nvidia.com/gpu: 4}}
        env:
        - name: NODE
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        command: [python3, -c]
        args:
        - |
          import os, socket, time
          if os.environ["JOB_COMPLETION_INDEX"] == "0":
              server = socket.create_server(("", 29500))
              peer, address = server.accept()
              print("from", os.environ["NODE"], "heard", peer.makefile().readline().strip(), address[0])
          else:
              end = time.monotonic() + 60
              while True:
                  try:
                      rank0 = socket.create_connection(("pair-0.peers", 29500), timeout=5)
                      break
                  except OSError:
                      if time.monotonic() > end:
                          raise
                      time.sleep(0.2)
              rank0.sendall(os.environ["NODE"].encode() + b"\\n")
              print("sent from", rank0.getsockname()[0])
"""  # noqa: E501
PAUSED = """
apiVersion: v1
kind: Pod
metadata: {name: stays}
spec:
  nodeName: node-1
  terminationGracePeriodSeconds: 0
  containers:
  - {name: main, image: IMAGE, imagePullPolicy: Never, command: [sleep, infinity]}
"""

TRAINER = """
apiVersion: v1
kind: Pod
metadata: {name: trainer}
spec:
  restartPolicy: Never
  volumes: [{name: scratch, emptyDir: {}}]
  containers:
  - name: main
    image: IMAGE
    imagePullPolicy: Never
    securityContext: {readOnlyRootFilesystem: true, runAsNonRoot: true}
    volumeMounts: [{name: scratch, mountPath: /tmp}]
    command: [python3, -c]
    args:
    - |
      import importlib.util, json, os, torch, trl, grpo_trainer
      weight = torch.tensor([2.0], requires_grad=True)
      (weight * weight).backward()
      seen = {"cuda": torch.cuda.is_available(), "gradient": weight.grad.tolist()}
      engine = importlib.util.find_spec("vllm") is not None
      print(json.dumps({**seen, "trl": trl.__file__, "user": os.getuid(), "engine": engine}))
"""


@pytest.fixture(scope="module")
def image() -> Image:
    """A small image with Python and a shell."""
    return python_image()


@pytest.fixture(scope="module")
def cluster(image: Image) -> Iterator[Cluster]:
    """A cluster of this module's own, whose nodes may be harmed and are quickly taken for lost."""
    settings = ClusterSettings(
        2, gpus=GpuSettings(8), control_plane=ControlPlaneSettings(node_grace_seconds=10)
    )
    with Cluster.create(f"nodes-{os.getpid()}", settings) as own:
        own.load(image.archive)
        yield own


def test_nodes_offer_gpus_with_the_labels_of_feature_discovery(cluster: Cluster) -> None:
    ready = '{.items[*].status.conditions[?(@.type=="Ready")].status}'
    assert cluster.kubectl("get", "nodes", "-o", f"jsonpath={ready}") == "True True"
    gpus = "jsonpath={.items[*].status.allocatable.nvidia\\.com/gpu}"
    assert cluster.kubectl("get", "nodes", "-l", "nvidia.com/gpu.product", "-o", gpus) == "8 8"
    product = "jsonpath={.items[0].metadata.labels.nvidia\\.com/gpu\\.product}"
    assert cluster.kubectl("get", "nodes", "-o", product) == GpuSettings().product


def test_an_indexed_job_finds_its_peer_on_the_other_node(cluster: Cluster, image: Image) -> None:
    cluster.kubectl("apply", "-f", "-", input=GANG.replace("IMAGE", image.name))
    _wait_for(cluster, "Complete", "job/pair", "-n", "gang")
    pods = "jsonpath={range .items[*]}{.spec.nodeName} {.status.podIP}{'\\n'}{end}"
    places = dict(
        line.split()
        for line in cluster.kubectl("get", "pods", "-n", "gang", "-o", pods).splitlines()
    )
    assert sorted(places) == ["node-0", "node-1"]
    heard = _logs(cluster, 0).split()
    assert heard[0] == "from"
    assert heard[3] == ({"node-0", "node-1"} - {heard[1]}).pop()
    assert heard[4] == places[heard[3]]  # the peer's own address, not a translated one
    assert _logs(cluster, 1) == f"sent from {heard[4]}\n"


def _logs(cluster: Cluster, index: int) -> str:
    return cluster.kubectl(
        "logs", "-n", "gang", "-l", f"batch.kubernetes.io/job-completion-index={index}"
    )


def test_a_lost_node_is_noticed_and_comes_back(cluster: Cluster, image: Image) -> None:
    cluster.kubectl("apply", "-f", "-", input=PAUSED.replace("IMAGE", image.name))
    _wait_for(cluster, "Ready", "pod/stays")
    assert cluster.kubectl("exec", "stays", "--", "hostname") == "stays\n"
    cluster.kubelet("node-1", "stop")
    ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    cluster.wait("node-1", "get", "node", "node-1", "-o", ready, expect="Unknown")
    cluster.kubelet("node-1", "start")
    cluster.wait("node-1", "get", "node", "node-1", "-o", ready, expect="True")
    assert (
        cluster.kubectl(
            "get", "node", "node-1", "-o", "jsonpath={.status.allocatable.nvidia\\.com/gpu}"
        )
        == "8"
    )
    cluster.kubectl("delete", "pod", "stays", "--ignore-not-found", "--timeout=60s")


def test_the_api_server_may_be_away_without_harm_to_pods(cluster: Cluster, image: Image) -> None:
    cluster.kubectl(
        "run",
        "survivor",
        f"--image={image.name}",
        "--image-pull-policy=Never",
        "--",
        "sleep",
        "86399",
    )
    _wait_for(cluster, "Ready", "pod/survivor")
    cluster.stop_apiserver()
    with pytest.raises(CommandError, match="refused"):
        cluster.kubectl("get", "pods")
    cluster.start_apiserver()
    restarts = "jsonpath={.status.containerStatuses[0].restartCount}"
    assert cluster.kubectl("get", "pod", "survivor", "-o", restarts) == "0"
    until("the kubelet to answer", lambda: _answers(cluster, "survivor"))


def _wait_for(cluster: Cluster, condition: str, *named: str) -> None:
    """Wait for an object's condition; `kubectl wait` would count a busy machine's seconds, too."""
    status = f'jsonpath={{.status.conditions[?(@.type=="{condition}")].status}}'
    cluster.wait(f"{named[0]}: {condition}", "get", *named, "-o", status, expect="True")


def _answers(cluster: Cluster, pod: str) -> bool:
    """Whether its kubelet runs a command in a pod."""
    try:
        return cluster.kubectl("exec", pod, "--", "echo", "here") == "here\n"
    except CommandError:
        return False


def test_down_leaves_no_trace_beside_another_cluster(image: Image) -> None:
    before = _host()
    with Cluster.create(f"traces-{os.getpid()}", ClusterSettings(1)) as own:
        own.load(image.archive)
        own.kubectl(
            "run",
            "busy",
            f"--image={image.name}",
            "--image-pull-policy=Never",
            "--",
            "sleep",
            "86399",
        )
        _wait_for(own, "Ready", "pod/busy")
        used = _namespaces(own.directory)
        during = _traces(own.directory, own.settings.slot, used)
    assert {kind for kind, traces in during.items() if traces} == set(during)
    assert len(used) == 3  # the switch's, the node's and the pod's
    assert own.processes.find() == []
    assert not own.directory.exists()
    assert not any(_traces(own.directory, own.settings.slot, used).values())
    assert _host() == before


@pytest.mark.parametrize(
    "role", gated(["nodes/node-0/kubelet", "nodes/node-0/containerd", "node-0", "switch"])
)
def test_a_start_that_is_killed_halfway_leaves_no_trace(role: str) -> None:
    before = _host()
    name = f"halfway-{os.getpid()}-{role.rpartition('/')[2]}"
    processes = Processes(clusters_folder() / name)
    command = [sys.executable, "-m", "harness", "--name", name, "up", "--nodes", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    ) as owner:
        until(f"the process {role}", lambda: processes.find(role))
        owner.send_signal(signal.SIGSTOP)  # or it is through before it is killed
        slot = load_settings(processes.directory).slot
        used = _namespaces(processes.directory)
        owner.kill()
    until(
        "the guard to remove the cluster",
        lambda: not processes.find() and not processes.directory.exists(),
    )
    assert not any(_traces(processes.directory, slot, used).values())
    assert _host() == before


def _host() -> dict[str, str]:
    """Return what a cluster could change on the host and no other cluster may change meanwhile."""
    commands = {
        "mounts": "grep --invert-match /pytest-of- /proc/mounts",  # disks of other tests
        "firewall": "nft --stateless list ruleset",
        "iptables": "iptables-save | grep '^-A' || true",
        "kernel settings": (
            "sysctl vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops"
        ),
        "forwarding": "sysctl net.ipv4.ip_forward",
        "folders": "ls -d /run/* /opt/* /etc/* /var/lib/* /var/log/* /usr/libexec/*",
    }
    return {kind: _output(command) for kind, command in commands.items()}


def _traces(directory: Path, slot: int, namespaces: set[int]) -> dict[str, list[str]]:
    """Return what is on the host of the cluster with this state folder and slot, by kind."""
    link = Addresses(slot).link
    alive = _cookies(Path("/proc").glob("[0-9]*"))
    return {
        "cgroups": [
            str(path) for root in cgroups.roots() for path in root.glob(cgroups.group(directory))
        ],
        "links": [line for line in _output("ip -oneline link").splitlines() if f" {link}@" in line],
        "routes": [
            line
            for line in _output("ip route show table all").splitlines()
            if f"dev {link}" in line
        ],
        "namespaces": [str(cookie) for cookie in alive & namespaces],
    }


def _namespaces(directory: Path) -> set[int]:
    """Return the network namespaces of the cluster's processes and of its pods."""
    group, ours = cgroups.group(directory), set(Processes(directory).find())
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if int(process.name) in ours or group in (process / "cgroup").read_text():
                members.append(process)
    return _cookies(members) - _cookies([Path("/proc/self")])


def _cookies(processes: Iterable[Path]) -> set[int]:
    """Return the cookies of the processes' network namespaces.

    The kernel gives a namespace's number (/proc/PID/ns/net) to the next one as soon as the first is
    gone: a pod of a cluster beside this one may get it. It never gives a cookie twice.
    """
    by_number = {}
    for process in processes:
        with suppress(OSError):  # it ended meanwhile
            by_number[(process / "ns" / "net").readlink()] = process
    cookies = set()
    for process in by_number.values():
        command = ["nsenter", f"--net={process}/ns/net", sys.executable, "-c", PRINT_COOKIE]
        answer = subprocess.run(command, check=False, capture_output=True, text=True)
        if answer.returncode == 0:  # else it ended meanwhile
            cookies.add(int(answer.stdout))
    return cookies


def _output(command: str) -> str:
    return subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout


# In `make test` the end-to-end tests train in the light one.
@pytest.mark.slow
@pytest.mark.parametrize("build", [light_trainer_image, engine_trainer_image, slim_trainer_image])
def test_the_trainer_image_of_the_shipped_dockerfile_trains_without_cuda(
    build: Callable[[], Image],
) -> None:
    image = build()
    light = build is not slim_trainer_image
    shown = training_settings().shown if light else {}
    with Cluster.create(f"trainer-{os.getpid()}", ClusterSettings(1, shown=shown)) as own:
        own.load(image.archive)
        own.kubectl("apply", "-f", "-", input=TRAINER.replace("IMAGE", image.name))
        own.wait(
            "the pod",
            "get",
            "pod",
            "trainer",
            "-o",
            "jsonpath={.status.phase}",
            expect="Succeeded",
            seconds=300,
        )
        seen = json.loads(own.kubectl("logs", "trainer"))
    assert seen["cuda"] is False
    assert seen["gradient"] == [4.0]
    assert seen["trl"].startswith(CONTAINER_SITE_PACKAGES) is light
    assert seen["user"] == 65532
    assert seen["engine"] is (build is engine_trainer_image)
