"""Real nodes, seen from the host: write their configuration, start their first process, feed them
images.

A node is a set of Linux namespaces (pid, mount, network, uts, ipc) with its own containerd, kubelet
and kube-proxy. So every kubelet keeps its default paths and ports, and killing the node's first
process ends all of it.
"""

import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..client import STRATEGIC_MERGE, ApiClient
from ..controlplane import ControlPlane
from ..images.archives import write_pause_image
from ..programs.build import Toolchain
from ..programs.cache import REPOSITORY
from ..programs.prerequisites import NAMESPACES
from ..programs.processes import ClusterError, Processes, run, until
from ..settings import ClusterSettings
from . import network, policy_enforcer, storage
from .files import PAUSE, write_node_files


@dataclass(frozen=True)
class _Starter:
    """What every step of starting the nodes needs."""

    directory: Path
    settings: ClusterSettings
    processes: Processes
    tools: Toolchain
    _: KW_ONLY
    plane: ControlPlane


def node_folder(directory: Path, index: int) -> Path:
    """The state folder of a node."""
    return directory / "nodes" / f"node-{index}"


def start(
    directory: Path,
    settings: ClusterSettings,
    processes: Processes,
    tools: Toolchain,
    plane: ControlPlane,
) -> None:
    """Start DNS, the nodes and, if asked for, the default storage class; wait until the nodes are
    Ready with GPUs."""
    starter = _Starter(directory, settings, processes, tools, plane=plane)
    (directory / "resolv.conf").write_text("")  # pods see only the cluster's DNS
    plane.component_kubeconfig("kube-proxy")
    _start_dns(starter)
    for index in range(settings.nodes):
        _start_node(starter, index)
    archive = directory / "pause.tar"
    write_pause_image([tools.program("pause"), tools.program(storage.HELPER)], PAUSE, archive)
    load(directory, tools, archive)
    with ThreadPoolExecutor(settings.nodes) as pool:
        list(pool.map(lambda index: _wait_ready(starter, index), range(settings.nodes)))
    if settings.storage_class:
        storage.start(processes, plane)
    policy_enforcer.start(processes, REPOSITORY)


def _start_dns(starter: _Starter) -> None:
    corefile = starter.directory / "Corefile"
    host = network.Addresses(starter.settings.slot).host
    corefile.write_text(
        f".:53 {{\n bind {host}\n errors\n kubernetes cluster.local in-addr.arpa {{\n"
        f"  kubeconfig {starter.plane.admin} grpo-test\n  pods insecure\n  ttl 0\n }}\n}}\n"
    )
    starter.processes.start("coredns", [starter.tools.program("coredns"), "-conf", corefile])


def _start_node(starter: _Starter, index: int) -> None:
    home = node_folder(starter.directory, index)
    write_node_files(home, index, starter.settings, starter.tools, starter.plane)
    options = [*NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    command: list[object] = [sys.executable, "-m", "harness.nodes.node", starter.directory, index]
    # the working folder is the repository's root, where the module is found
    process = network.start_in_namespaces(
        starter.processes, home.name, options, command, cwd=REPOSITORY
    )
    network.attach(starter.settings.slot, starter.processes, index, process.pid)


def _wait_ready(starter: _Starter, index: int) -> None:
    path = f"/api/v1/nodes/node-{index}"
    client = starter.plane.client()

    def ready() -> bool:
        starter.processes.check(f"node-{index}")
        return _is_ready(client.get(path))

    until(f"node-{index} to be Ready", ready, 120)
    if capacity := starter.settings.gpus.capacity:
        _offer(client, path, capacity)


def _is_ready(node: Any) -> bool:
    conditions = node["status"].get("conditions", [])
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _offer(client: ApiClient, path: str, capacity: dict[str, str]) -> None:
    """Add extended resources to a node's status; the kubelet keeps what it does not manage."""
    status = {"status": {"capacity": capacity, "allocatable": capacity}}
    client.request("PATCH", f"{path}/status", status, STRATEGIC_MERGE)


def load(directory: Path, tools: Toolchain, *images: Path) -> None:
    """Import image archives on all nodes at once."""
    _on_all_nodes(directory, [partial(_import, tools, image) for image in images])


def load_missing(directory: Path, tools: Toolchain, name: str, archive: Path) -> None:
    """Import an image on the nodes that have none of its name, which changes with its content."""
    _on_all_nodes(directory, [partial(_import_missing, tools, name, archive)])


def _on_all_nodes(directory: Path, actions: Sequence[Callable[[Path], None]]) -> None:
    """Do all the actions at once, each with the socket of each node's containerd."""
    sockets = [
        folder / "containerd.sock" for folder in sorted((directory / "nodes").glob("node-*"))
    ]
    if not sockets:
        raise ClusterError(
            f"{directory.name} has no nodes to load images on: start it with --nodes"
        )
    with ThreadPoolExecutor(len(sockets) * len(actions)) as pool:
        started = [pool.submit(action, address) for address in sockets for action in actions]
        for action in started:
            action.result()


def _import_missing(tools: Toolchain, name: str, archive: Path, address: Path) -> None:
    names = run(*_ctr(tools, address), "images", "ls", "--quiet").split()
    if name not in names:
        _import(tools, archive, address)


def _import(tools: Toolchain, archive: Path, address: Path) -> None:
    run(*_ctr(tools, address), "images", "import", archive)


def _ctr(tools: Toolchain, address: Path) -> tuple[str | Path, ...]:
    """Return containerd's client for a node, once that takes connections."""
    until(f"containerd at {address}", lambda: _listens(address))
    ctr = tools.program("ctr")
    return (ctr, "--connect-timeout", "30s", "--address", address, "--namespace", "k8s.io")


def _listens(address: Path) -> bool:
    """Whether the socket takes connections; its file is there a moment before it does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(address))
    return True


def kubelet(directory: Path, processes: Processes, node: str, action: str) -> None:
    """Stop (kill) or start the kubelet of a node; its first process heeds the file that says so."""
    folder = directory / "nodes" / node
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in (directory / "nodes").glob("node-*")))
        raise ClusterError(f"no node {node!r}: have {known or 'none'}")
    stopped = folder / "kubelet.stopped"
    if action == "start":
        stopped.unlink(missing_ok=True)
    else:
        stopped.touch()
        processes.kill(f"nodes/{node}/kubelet")
