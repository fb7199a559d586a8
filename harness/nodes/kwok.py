"""Hundreds of nodes that only pretend, beside the real control plane: kwok moves their pods through
their phases.

kwok.yaml says how; a pod ends when its annotations say so. Used for burst benchmarks and for tests
of big inventories.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..client import ApiClient
from ..controlplane import ControlPlaneSettings
from ..programs.build import Toolchain
from ..programs.processes import Processes, flags, until
from ..settings import GpuSettings
from .files import lease_seconds

STAGES = Path(__file__).parent / "kwok.yaml"
SELECTOR = "kwok.x-k8s.io/node=fake"
READY_SECONDS = 120


def start(
    processes: Processes, tools: Toolchain, kubeconfig: Path, plane: ControlPlaneSettings
) -> None:
    """Start kwok for the nodes that carry the annotation of SELECTOR."""
    options = {
        "--kubeconfig": kubeconfig,
        # any Stage in --config switches all built-in ones off
        "--config": STAGES,
        "--manage-nodes-with-annotation-selector": SELECTOR,
        # the lease must outlive the node monitor's grace
        "--node-lease-duration-seconds": lease_seconds(plane.node_grace_seconds),
    }
    processes.start("kwok", [tools.program("kwok"), *flags(options)])


def add_nodes(client: ApiClient, numbers: Iterable[int], gpus: GpuSettings) -> None:
    """Create the nodes and wait until all are Ready."""
    names = [f"kwok-{number}" for number in numbers]
    for name in names:
        client.request("POST", "/api/v1/nodes", _node(name, gpus))
    until(
        f"{len(names)} kwok nodes to be Ready", lambda: set(names) <= _ready(client), READY_SECONDS
    )


def _ready(client: ApiClient) -> set[str]:
    nodes = client.get("/api/v1/nodes")["items"]
    return {
        node["metadata"]["name"]
        for node in nodes
        for condition in node["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }


def _node(name: str, gpus: GpuSettings) -> dict[str, Any]:
    key, _, value = SELECTOR.partition("=")
    capacity = {
        "cpu": "64",
        "memory": "1Ti",
        "pods": "256",
        "ephemeral-storage": "1Ti",
        **gpus.capacity,
    }
    return {
        "metadata": {
            "name": name,
            "annotations": {key: value},
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                **gpus.labels,
            },
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    }
