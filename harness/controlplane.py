"""etcd, API server, controller manager and scheduler as plain processes: the API level, and the top
of the node level.

etcd listens on unix sockets in the state folder, so the only TCP port is the API server's. The API
server can be killed and started again on the same data and port, which is how tests take it away.
"""

import json
import os
import random
import socket
from collections import deque
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from .client import ApiClient
from .pki import Authority
from .programs.build import component
from .programs.processes import ClusterError, Processes, flags, until

SERVICES = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
# a file called `etcd:1` in the working folder: etcd insists on host:port even for sockets
ETCD = "unix://etcd:1"
ETCD_PEER = "unix://etcd:2"
PORTS = (
    20000,
    30000,
)  # below the kernel's range for outgoing connections, so nobody takes it while we are down
MOST_TRIES = 100
MOST_RESERVED = 64
_reservations: deque[int] = deque()
"""File descriptors that reserve the ports which this process was given last."""
AUDIT_POLICY = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}
DNS_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True)
class ControlPlaneSettings:
    """How the control plane runs; kept in the state folder so that another process can restart the
    API server.

    address, port: where the API server listens. node_grace_seconds: how long a kubelet may be
    silent. client_qps: requests/s that the controller manager and the scheduler allow themselves
    (stock: 20 and 50). assets: a folder with etcd and kube-apiserver to use instead of ours, as
    KUBEBUILDER_ASSETS names it. audit: log one line per request to `audit.log` in the state folder,
    for tests that count requests.
    """

    address: str = "127.0.0.1"
    port: int = 0
    _: KW_ONLY
    node_grace_seconds: int = 40
    client_qps: int = 300
    assets: str = ""
    audit: bool = False


class ControlPlane:
    """The control plane of the cluster whose state lies in `processes.directory`."""

    def __init__(self, processes: Processes, settings: ControlPlaneSettings) -> None:
        self.settings = settings
        self.url = f"https://{settings.address}:{settings.port}"
        self._processes = processes
        self._dir = processes.directory

    @property
    def admin(self) -> Path:
        """The kubeconfig of a cluster administrator."""
        return self._dir / "admin.kubeconfig"

    @property
    def missing(self) -> list[str]:
        """Components that the folder of assets lacks: without them Jobs create no pods and pods get
        no node."""
        assets = self.settings.assets
        parts = ("kube-controller-manager", "kube-scheduler")
        return [part for part in parts if assets and not (Path(assets) / part).exists()]

    def _component(self, name: str) -> list[object]:
        return component(name, self.settings.assets)

    def client(self) -> ApiClient:
        """Return an administrator's client."""
        return ApiClient(self.settings.address, self.settings.port, self.authority)

    @property
    def authority(self) -> Authority:
        """The cluster's certificate authority."""
        return Authority(self._dir / "pki")

    def start(self) -> None:
        """Start everything and wait until the API server and the default service account are
        there."""
        self._identities()
        self._start_etcd()
        self.start_apiserver()
        if "kube-controller-manager" not in self.missing:
            self._start_controller_manager()
        if "kube-scheduler" not in self.missing:
            self._start_scheduler()

    def wait_for_service_account(self) -> None:
        """Wait for the default service account: until the controller manager made it no pod can be
        created."""
        if "kube-controller-manager" in self.missing:
            return
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        self._until(
            "the default service account", "controller-manager", lambda: self.client().get(path)
        )

    def stop_apiserver(self) -> None:
        """Kill the API server as a crash would."""
        self._processes.kill("apiserver")

    def start_apiserver(self) -> None:
        """Start the API server on the data and the port it had, and wait until it is ready."""
        self._processes.start("apiserver", self._apiserver())
        self._until("the API server", "apiserver", lambda: self.client().get("/readyz") == "ok")

    def stop_etcd(self) -> None:
        """Kill etcd as a crash would."""
        self._processes.kill("etcd")

    def start_etcd(self) -> None:
        """Start etcd on the data it had, and wait until the API server can read it."""
        self._start_etcd()
        self._until("etcd", "etcd", lambda: self.client().get("/readyz") == "ok")

    def restart_controllers(self) -> None:
        """Kill the controller manager and start it again; it finds the kinds that are defined by
        now at once."""
        self._processes.kill("controller-manager")
        self._start_controller_manager()

    def _until(self, what: str, role: str, probe: Any) -> None:
        def checked() -> Any:
            self._processes.check(role)
            return probe()

        until(what, checked)

    def _identities(self) -> None:
        names = [f"IP:{ip}" for ip in ("127.0.0.1", self.settings.address, FIRST_SERVICE)]
        names += [f"DNS:{name}" for name in (*DNS_NAMES, "kubernetes.default.svc.cluster.local")]
        self.authority.issue("apiserver", "/CN=kube-apiserver", ",".join(names))
        self.authority.issue("sa", "/CN=service-accounts")
        self.authority.kubeconfig(self.admin, self.url, "admin", "/O=system:masters/CN=admin")
        for name in ("kube-controller-manager", "kube-scheduler"):
            self.component_kubeconfig(name)

    def component_kubeconfig(self, name: str) -> Path:
        """Write the kubeconfig of a component that RBAC's default roles know by its user name."""
        path = self._dir / f"{name}.kubeconfig"
        return self.authority.kubeconfig(path, self.url, name, f"/CN=system:{name}")

    def _start_etcd(self) -> None:
        options = {
            "--data-dir": self._dir / "etcd",
            "--log-level": "error",
            "--listen-client-urls": ETCD,
            "--advertise-client-urls": ETCD,
            "--listen-peer-urls": ETCD_PEER,
            "--initial-advertise-peer-urls": ETCD_PEER,
            "--initial-cluster": f"default={ETCD_PEER}",
            "--quota-backend-bytes": 4 << 30,
        }
        command = [*self._component("etcd"), *flags(options), "--unsafe-no-fsync"]
        self._processes.start("etcd", command)

    def _apiserver(self) -> list[object]:
        pki, settings = self.authority, self.settings
        options = {
            "--etcd-servers": ETCD,
            "--service-cluster-ip-range": SERVICES,
            "--bind-address": settings.address,
            "--advertise-address": settings.address,
            "--secure-port": settings.port,
            "--client-ca-file": pki.crt("ca"),
            "--tls-cert-file": pki.crt("apiserver"),
            "--tls-private-key-file": pki.key("apiserver"),
            "--service-account-issuer": "https://kubernetes.default.svc",
            "--service-account-key-file": pki.crt("sa"),
            "--service-account-signing-key-file": pki.key("sa"),
            "--authorization-mode": "Node,RBAC",
            "--enable-admission-plugins": "NodeRestriction",
            "--kubelet-certificate-authority": pki.crt("ca"),
            "--kubelet-preferred-address-types": "InternalIP",
            "--kubelet-client-certificate": pki.crt("admin"),
            "--kubelet-client-key": pki.key("admin"),
            # a pod leaves a lost node soon, so that tests of node loss are quick
            "--default-not-ready-toleration-seconds": 5,
            "--default-unreachable-toleration-seconds": 5,
            **self._audit(),
        }
        # the host has no kube-proxy: webhooks given as Services must be dialled at their pods'
        # addresses
        routing = "--enable-aggregator-routing"
        return [*self._component("kube-apiserver"), *flags(options), routing]

    def _audit(self) -> dict[str, object]:
        if not self.settings.audit:
            return {}
        policy = self._dir / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        return {"--audit-policy-file": policy, "--audit-log-path": self._dir / "audit.log"}

    def _start_controller_manager(self) -> None:
        pki = self.authority
        options = {
            "--service-account-private-key-file": pki.key("sa"),
            "--root-ca-file": pki.crt("ca"),
            "--cluster-signing-cert-file": pki.crt("ca"),
            "--cluster-signing-key-file": pki.key("ca"),
            "--node-monitor-period": "1s",
            "--node-monitor-grace-period": f"{self.settings.node_grace_seconds}s",
        }
        command = [*self._client_component("kube-controller-manager"), *flags(options)]
        self._processes.start("controller-manager", [*command, "--use-service-account-credentials"])

    def _start_scheduler(self) -> None:
        self._processes.start("scheduler", self._client_component("kube-scheduler"))

    def _client_component(self, name: str) -> list[object]:
        """Return the command of a component that asks the API server, and serves nobody."""
        options = {
            "--kubeconfig": self._dir / f"{name}.kubeconfig",
            "--kube-api-qps": self.settings.client_qps,
            "--kube-api-burst": 2 * self.settings.client_qps,
            "--secure-port": 0,
        }
        return [*self._component(name), *flags(options), "--leader-elect=false"]


def free_port() -> int:
    """Return a TCP port of the loopback address that nobody listens on, and that no other process
    was given lately.

    Two processes that probe at the same time both find a port free, and the one that binds it
    second would talk to the server of the first. So the name of an abstract Unix socket reserves
    the port.
    """
    # Not the generator of the module `random`: set_seed of transformers gives every worker the same
    # sequence.
    ports = range(*PORTS)
    for port in random.SystemRandom().sample(ports, min(MOST_TRIES, len(ports))):
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0grpo-port-{port}")
        except OSError:
            reservation.close()
            continue
        with socket.socket() as probe:
            is_free = probe.connect_ex(("127.0.0.1", port)) != 0
        if not is_free:
            reservation.close()
            continue
        _reservations.append(reservation.detach())
        if len(_reservations) > MOST_RESERVED:
            os.close(_reservations.popleft())
        return port
    raise ClusterError(
        f"no free TCP port among {MOST_TRIES} tried between {PORTS[0]} and {PORTS[1]}"
    )
