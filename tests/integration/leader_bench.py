"""Operators as processes that stand for one Lease, each by the identity of a pod, behind the
chart's fence.

They can be killed, stopped and told to end, as a kubelet or a bad node does it.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from grpo_api.text.contract import API_VERSION, GROUP, LEADER_KIND, LEADER_PLURAL
from grpo_operator.records.names import FENCE, LABEL_MANAGED_BY, MANAGER
from harness.access import Access, CommandError
from harness.cluster import Cluster
from harness.controlplane import free_port
from harness.definitions import is_discovered
from harness.programs.patience import wait_for_exit
from harness.programs.processes import until
from tests.integration.operator_bench import Bench

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/grpo-operator"
LEADER_DEFINITION = ROOT / "crds/operatorleader.yaml"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
SECONDS = 60.0


def named(namespace: str) -> str:
    """The account and the Lease of a release that has the namespace's name: no two tests share a
    policy."""
    return f"{namespace}-grpo-operator"


@contextmanager
def fenced(cluster: Cluster, namespace: str, *, policies: bool = True) -> Iterator[None]:
    """The chart's policies for a release in that namespace, and its account with every right, while
    the block runs.

    Without `policies` there is all that they need, and nobody is refused.
    """
    arguments = (
        "--namespace",
        namespace,
        "--show-only",
        "templates/fence.yaml",
        "--kube-version",
        "1.36.0",
        "--set",
        "imageRegistry=registry.example",
    )
    rendered = cluster.helm("template", namespace, str(CHART), *arguments)
    account = f"{namespace}:{named(namespace)}"
    cluster.kubectl("create", "serviceaccount", named(namespace), "--namespace", namespace)
    cluster.kubectl(
        "create",
        "clusterrolebinding",
        namespace,
        "--clusterrole=cluster-admin",
        f"--serviceaccount={account}",
    )
    nobody = {
        "metadata": {"name": named(namespace), "namespace": namespace},
        "spec": {"holderIdentity": "nobody"},
    }
    definition = ("--server-side", "--force-conflicts", "-f", str(LEADER_DEFINITION))
    cluster.kubectl("apply", *definition)
    kind = f"{LEADER_PLURAL}.{GROUP}"
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{kind}")
    until(f"{kind} to be discovered", lambda: is_discovered(cluster, kind), SECONDS)
    cluster.kubectl(
        "create",
        "-f",
        "-",
        input=json.dumps({"apiVersion": API_VERSION, "kind": LEADER_KIND, **nobody}),
    )
    if policies:
        cluster.kubectl("apply", "-f", "-", input=rendered)
    try:
        if policies:
            until("the fence to refuse strangers", lambda: refuses(cluster, namespace), SECONDS)
        yield
    finally:
        if policies:
            cluster.kubectl("delete", "-f", "-", input=rendered)
        cluster.kubectl("delete", "clusterrolebinding", namespace)


def refuses(cluster: Cluster, namespace: str) -> bool:
    """Whether the API server has the policies by now: the account itself, in no pod, leads
    never."""
    labels = (
        "--dry-run=server",
        "--as",
        f"system:serviceaccount:{namespace}:{named(namespace)}",
        "-f",
        "-",
    )
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}}
    metadata = {"name": "stranger", "namespace": namespace, "labels": {LABEL_MANAGED_BY: MANAGER}}
    try:
        cluster.kubectl("create", *labels, input=json.dumps({**service, "metadata": metadata}))
    except CommandError as error:
        return FENCE in error.stderr
    return False


def pod_token(cluster: Access, namespace: str, pod: str, hours: int = 1) -> str:
    """Makes a pod of the release in that namespace, which no node takes; its token, by which the
    fence knows it."""
    containers = [{"name": "c", "image": "x"}]
    spec = {
        "serviceAccountName": named(namespace),
        "nodeSelector": {"no": "node"},
        "containers": containers,
    }
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod, "namespace": namespace},
        "spec": spec,
    }
    cluster.kubectl("create", "-f", "-", input=json.dumps(body))
    token = ("create", "token", named(namespace), "--namespace", namespace, f"--duration={hours}h")
    return cluster.kubectl(*token, "--bound-object-kind", "Pod", "--bound-object-name", pod).strip()


def operator_page(port: int, name: str, seconds: float) -> tuple[int, str]:
    """Status and text of /healthz, /readyz or /metrics; status 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


class Seat:
    """A pod's name and token, and the process that stands in its place: one after the other, as a
    kubelet starts it."""

    def __init__(self, bench: Bench, name: str, folder: Path) -> None:
        """Makes the pod, which no node takes."""
        self.name = name
        self._bench = bench
        self._name = named(bench.namespace)
        self._port = 0
        self.log = folder / f"{name}.log"
        self._kubeconfig = folder / f"{name}.kubeconfig"
        self.process: subprocess.Popen[bytes] | None = None
        config = yaml.safe_load(bench.cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": pod_token(bench.cluster, bench.namespace, name)}
        self._kubeconfig.write_text(json.dumps(config))

    def start(self, module: str = "grpo_operator") -> None:
        """Starts an operator, or another program with its flags."""
        account = f"{self._bench.namespace}/{self._name}"
        flags = [f"--namespace={self._bench.namespace}", f"--leader-elect={account}"]
        flags += ["--fence", "--trainer-image=example/trainer:1", "--log-format=text"]
        self.run(module, (ROOT / "operator", ROOT), *flags)

    def run(self, module: str, code: tuple[Path, ...], *flags: str) -> None:
        """Starts what is there, folders or archives, with these flags and those that let it run
        here."""
        self._port = free_port()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("COV")
        }
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, code)), "POD_NAME": self.name}
        here = [
            f"--kubeconfig={self._kubeconfig}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self._port}",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *flags, *here],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        assert self.process
        self.process.send_signal(number)

    def wait(self) -> int:
        """Waits until the process has ended; its exit code."""
        assert self.process
        return wait_for_exit(self.process, SECONDS)

    def end(self) -> None:
        """Ends what still runs."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of /healthz, /readyz or /metrics; status 0 while nothing listens."""
        return operator_page(self._port, name, SECONDS)

    def scraped(self) -> http.client.HTTPConnection:
        """A connection that has been answered and stays open, as Prometheus keeps one."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        return connection

    def metric(self, name: str) -> float | None:
        """The value of a metric without labels."""
        lines = (line.split() for line in self.page("metrics")[1].splitlines())
        return next((float(line[1]) for line in lines if line[:1] == [name]), None)

    @property
    def works(self) -> bool:
        """Whether it says that it leads."""
        return self.metric("grpo_operator_leader") == 1.0

    def wait_ready(self) -> None:
        """Waits until it leads, or could take over."""
        until(f"{self.name} to be ready", lambda: self.page("readyz")[0] == 200, SECONDS)

    def wait_works(self) -> None:
        """Waits until it leads."""
        until(f"{self.name} to lead", lambda: self.works, SECONDS)


def holder(bench: Bench) -> str:
    """Whom the Lease names."""
    return str(bench.get(LEASES, named(bench.namespace))["spec"].get("holderIdentity", ""))


@contextmanager
def seats(bench: Bench, folder: Path) -> Iterator[tuple[Seat, Seat]]:
    """Two of them behind the fence; none has a process yet."""
    with fenced(bench.cluster, bench.namespace):  # type: ignore[arg-type]
        both = Seat(bench, "operator-0", folder), Seat(bench, "operator-1", folder)
        try:
            yield both
        finally:
            for seat in both:
                seat.end()
