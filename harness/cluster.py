"""The whole cluster: one object with the verbs that tests, the demo and the command line use.

Two levels, one code path: without nodes only the control plane runs, on loopback and without root;
with nodes the same control plane listens on a bridge and real kubelets join it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from .access import Access
from .controlplane import ControlPlane, free_port
from .nodes import cgroups, kwok, network, nodes
from .nodes.files import write_plain_registry
from .programs import prerequisites
from .programs.build import NODE_PROGRAMS, Toolchain, toolchain
from .programs.cache import REPOSITORY, cache_root, locked
from .programs.processes import ClusterError, Processes, marked
from .settings import FILE, ClusterSettings, load_settings

Say = Callable[[str], None]
MAIN = "main"
"""The name of the cluster of `make cluster`, which `make demo` takes if it is up."""


KEEP = b"keep"


def quiet(_: str) -> None:
    """Report nothing."""


def clusters_folder() -> Path:
    """The folder that has one state folder per cluster."""
    return cache_root() / "clusters"


class Guard:
    """Removes a cluster when the process that asked for it dies, however it dies.

    pytest may be killed with a signal that runs no cleanup. So `python -m harness guard FOLDER` is
    a process of its own with the read end of a pipe: end of file without the word to keep the
    cluster means that the owner is gone. This is the owner's end; keep it referenced for as long as
    the cluster should live.
    """

    def __init__(self, processes: Processes) -> None:
        with processes.log("guard").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness", "guard", processes.directory],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env=processes.environment("guard"),
                start_new_session=True,
            )

    def release(self) -> None:
        """Let the cluster outlive this process."""
        self._process.communicate(KEEP)

    def reap(self) -> None:
        """Collect the guard after `down` killed it."""
        self._process.kill()
        self._process.communicate()


def is_kept() -> bool:
    """Wait for the owner's word or end; return True if the cluster shall outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return sys.stdin.buffer.read() == KEEP


class Cluster(Access):
    """A cluster by the settings, with its state in `directory`. Use it as a context manager, or
    `up` and `down`.

    `.kubeconfig` is an administrator's; `.url` the API server's.
    """

    def __init__(self, directory: Path, settings: ClusterSettings) -> None:
        super().__init__(directory / "admin.kubeconfig")
        self.directory = directory
        self.settings = settings
        self.processes = Processes(directory)
        self._guard: Guard | None = None

    @classmethod
    def open(cls, directory: Path) -> "Cluster":
        """Return the cluster whose state lies in the folder."""
        return cls(directory, load_settings(directory))

    @classmethod
    def create(cls, name: str, settings: ClusterSettings, say: Say = quiet) -> "Cluster":
        """Start a cluster and return it; it ends with this process unless `keep` is called.

        Raises ClusterError when one of that name is up. What dead ones left is removed first.
        """
        prerequisites.require(settings.nodes > 0)
        if settings.nodes:
            cgroups.require()
        cluster = _claim(clusters_folder() / name, settings)
        try:
            cluster._up(say)
        except BaseException:
            cluster.down()
            raise
        return cluster

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @cached_property
    def tools(self) -> Toolchain:
        """The programs of the nodes, built if need be."""
        return toolchain(NODE_PROGRAMS)

    @cached_property
    def control_plane(self) -> ControlPlane:
        """The cluster's control plane."""
        return ControlPlane(self.processes, self.settings.control_plane)

    @property
    def url(self) -> str:
        """The API server's URL."""
        return self.control_plane.url

    def watch(self) -> None:
        """Bind the cluster's life to this process."""
        self._guard = Guard(self.processes)

    def _up(self, say: Say) -> None:
        if self.settings.nodes:
            network.create(self.settings.slot, self.processes)
        self.control_plane.start()
        say(f"API server ready at {self.url}")
        if missing := self.control_plane.missing:
            say(
                f"KUBEBUILDER_ASSETS has no {' and no '.join(missing)}: Jobs create no pods, pods "
                "get no node"
            )
        if self.settings.nodes:
            nodes.start(
                self.directory, self.settings, self.processes, self.tools, self.control_plane
            )
            say(f"{self.settings.nodes} nodes ready")
        self.control_plane.wait_for_service_account()
        if self.settings.kwok_nodes:
            self.add_kwok_nodes(0, self.settings.kwok_nodes)
            say(f"{self.settings.kwok_nodes} kwok nodes ready")

    def keep(self) -> None:
        """Let the cluster outlive this process."""
        if self._guard:
            self._guard.release()
            self._guard = None

    def down(self) -> None:
        """Remove the cluster: processes, mounts, cgroups, links, files. Safe to repeat, and after
        any crash."""
        self.processes.kill()
        if self._guard:
            self._guard.reap()
            self._guard = None
        with locked(_lock()):
            self.clean()

    def clean(self) -> None:
        """Remove what the processes leave when they are gone; the caller holds the lock, as two may
        want to.

        Without the folder the slot may be another cluster's already.
        """
        if not self.directory.exists():
            return
        if self.settings.nodes:
            network.remove(self.settings.slot)
            cgroups.remove(self.directory)
        shutil.rmtree(self.directory)

    def stop_apiserver(self) -> None:
        """Kill the API server as a crash would; its data stays."""
        self.control_plane.stop_apiserver()

    def start_apiserver(self) -> None:
        """Start the API server again on the same data and port, and wait until it is ready."""
        self.control_plane.start_apiserver()

    def add_kwok_nodes(self, first: int, count: int) -> None:
        """Add nodes `kwok-<first>` and following, with this cluster's GPUs, and wait until all are
        Ready."""
        if not self.processes.find("kwok"):
            kwok.start(
                self.processes, toolchain(("kwok",)), self.kubeconfig, self.settings.control_plane
            )
        kwok.add_nodes(self.control_plane.client(), range(first, first + count), self.settings.gpus)

    def load(self, *images: Path) -> None:
        """Import image archives (docker or OCI) on every node; pods use them with imagePullPolicy
        Never."""
        nodes.load(self.directory, self.tools, *images)

    def load_missing(self, name: str, archive: Path) -> None:
        """Import an image on the nodes that have none of its name, which changes with its
        content."""
        nodes.load_missing(self.directory, self.tools, name, archive)

    @property
    def host(self) -> str:
        """This machine's address in the nodes' network."""
        return network.Addresses(self.settings.slot).host

    def pull_plainly_from(self, registry: str) -> None:
        """Let all nodes pull images from the registry at host:port by plain HTTP."""
        for index in range(self.settings.nodes):
            write_plain_registry(nodes.node_folder(self.directory, index), registry)

    def kubelet(self, node: str, action: str) -> None:
        """`stop`: kill a node's kubelet, its containers run on; `start`: start it again."""
        nodes.kubelet(self.directory, self.processes, node, action)


def _lock() -> Path:
    return clusters_folder() / ".lock"


def _claim(directory: Path, settings: ClusterSettings) -> Cluster:
    """Make the state folder with the settings completed by the addresses; nobody else gets the
    same.

    The guard starts under the same lock: so a folder whose cluster has no process is one that a
    crash left.
    """
    with locked(_lock()):
        _sweep()
        if directory.exists():
            raise ClusterError(
                f"a cluster {directory.name!r} is up already: `python -m harness --name "
                f"{directory.name} down` "
                "removes it"
            )
        directory.mkdir(mode=0o700)
        slot = _free_slot() if settings.nodes else 0
        address, port = (
            (network.Addresses(slot).host, 6443) if settings.nodes else ("127.0.0.1", free_port())
        )
        assets = "" if settings.nodes else os.environ.get("KUBEBUILDER_ASSETS", "")
        plane = replace(settings.control_plane, address=address, port=port, assets=assets)
        cluster = Cluster(directory, replace(settings, slot=slot, control_plane=plane))
        cluster.settings.save(directory)
        cluster.watch()
    return cluster


def _sweep() -> None:
    """Remove what is left of clusters that died with their guards, as when the machine went
    down."""
    alive = set(marked().values())
    for file in clusters_folder().glob(f"*/{FILE}"):
        if str(file.parent) not in alive:
            Cluster.open(file.parent).clean()


def _free_slot() -> int:
    taken = set()
    for file in clusters_folder().glob(f"*/{FILE}"):
        other = load_settings(file.parent)
        if other.nodes:
            taken.add(other.slot)
    free = sorted(set(range(network.SLOTS)) - taken)
    if not free:
        raise ClusterError(
            f"{network.SLOTS} clusters are up: remove one with `python -m harness down --name …`"
        )
    return free[0]
