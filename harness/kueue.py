"""Kueue beside a cluster: its kinds as a release serves them, and its real manager as a process.

Both come from one pinned module. The manager's webhooks are reached on loopback, by a certificate
that is there before it starts: no kubelet mounts its Secret, and no proxy answers for its Service.
"""

import base64
import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from .cluster import Cluster
from .controlplane import free_port
from .programs.build import module_folder, toolchain
from .programs.processes import flags, until

NAME = "kueue"
API = "/apis/kueue.x-k8s.io/v1beta2"
NAMESPACE = "kueue-system"
WEBHOOKS = "kueue-webhook-service"
KEPT = (
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
    "ValidatingWebhookConfiguration",
    "Secret",
)
READY_SECONDS = 120


def serve_kueue_kinds(cluster: Cluster) -> None:
    """Makes the API server know Kueue's kinds, and returns when it serves them; nobody admits
    anything."""
    folder = module_folder(NAME) / "config" / "components" / "crd" / "bases"
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(folder))
    client = cluster.control_plane.client()
    for kind in ("workloads", "resourceflavors", "workloadpriorityclasses"):
        # their storage may be a moment behind: 429 until then
        until(f"{kind} to be listed", partial(client.get, f"{API}/{kind}"), READY_SECONDS)


@contextmanager
def kueue_managing(cluster: Cluster, **settings: Any) -> Iterator[None]:
    """Kueue's manager as its chart installs it, ready, while the block runs; keywords are fields of
    its configuration.

    For a cluster of its own: its webhooks stand before all Jobs and pods, and nothing passes them
    once it has ended.
    """
    certificates = _certify(cluster)
    port, health = free_port(), free_port()
    rendered = list(_chart(cluster))
    objects = [
        _with_certificate(_on_loopback(one, port), certificates)
        for one in rendered
        if one["kind"] in KEPT
    ]
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(_list(objects)))
    configuration = cluster.directory / "kueue.json"
    configuration.write_text(
        json.dumps(_configuration(rendered, port, health, certificates) | settings)
    )
    options = {
        "--config": configuration,
        "--kubeconfig": cluster.kubeconfig,
        "--feature-gates": "VisibilityOnDemand=false",
    }
    cluster.processes.start(NAME, [toolchain((NAME,)).program(NAME), *flags(options)])
    try:
        until("Kueue's manager", lambda: _ready(cluster, health), READY_SECONDS)
        yield
    finally:
        cluster.processes.kill(NAME)


def _certify(cluster: Cluster) -> Path:
    """A folder with a certificate that the manager takes for its own, valid on loopback too."""
    authority = cluster.control_plane.authority
    names = ("DNS:kueue-ca", f"DNS:{WEBHOOKS}.{NAMESPACE}.svc", "IP:127.0.0.1")
    authority.make_alone(NAME, "/CN=kueue-ca", ",".join(names))
    folder = cluster.directory / "kueue-certificates"
    folder.mkdir()
    for kind in ("ca", "tls"):
        shutil.copy(authority.crt(NAME), folder / f"{kind}.crt")
        shutil.copy(authority.key(NAME), folder / f"{kind}.key")
    return folder


def _chart(cluster: Cluster) -> Iterator[dict[str, Any]]:
    chart = module_folder(NAME) / "charts" / "kueue"
    rendered = cluster.helm("template", NAME, str(chart), "--namespace", NAMESPACE)
    return (one for one in yaml.load_all(rendered, yaml.CSafeLoader) if one)


def _on_loopback(found: Any, port: int) -> Any:
    """The object with each reference to the webhooks' Service replaced by the port here."""
    if isinstance(found, list):
        return [_on_loopback(one, port) for one in found]
    if not isinstance(found, dict):
        return found
    service = found.get("service")
    if isinstance(service, dict) and service.get("name") == WEBHOOKS:
        return {"url": f"https://127.0.0.1:{port}{service['path']}"}
    return {key: _on_loopback(value, port) for key, value in found.items()}


def _with_certificate(found: dict[str, Any], certificates: Path) -> dict[str, Any]:
    if found["kind"] != "Secret":
        return found
    data = {
        file.name: base64.b64encode(file.read_bytes()).decode() for file in certificates.iterdir()
    }
    return {**found, "data": data}


def _list(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _configuration(
    rendered: list[dict[str, Any]], port: int, health: int, certificates: Path
) -> dict[str, Any]:
    """The chart's configuration, on ports of our own, without an election."""
    (written,) = [one["data"] for one in rendered if one["kind"] == "ConfigMap"]
    found: dict[str, Any] = yaml.safe_load(written["controller_manager_config.yaml"])
    return found | {
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
    }


def _ready(cluster: Cluster, health: int) -> bool:
    cluster.processes.check(NAME)
    with urllib.request.urlopen(f"http://127.0.0.1:{health}/readyz", timeout=5) as answer:
        return bool(answer.status == 200)
