"""The first process of a node: set up the node's namespaces, then run its daemons and restart what
dies.

Started by nodes.py as `unshare … python -m harness.nodes.node STATE INDEX`, so it is pid 1 in
there: it must also collect every orphan, and its end is the node's end.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..programs.build import NODE_PROGRAMS, Toolchain, toolchain
from ..programs.processes import Processes, flags, run, until
from ..settings import ClusterSettings, load_settings
from . import cgroups
from .network import Addresses

# what a kubelet sets on its machine; in a node it finds these values already, in files of the
# node's own
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
SUPERVISE_SECONDS = 0.1


class Node:
    """A node of the cluster whose state lies in `directory`, inside the node's namespaces."""

    def __init__(self, directory: Path, index: int) -> None:
        self.home = directory / "nodes" / f"node-{index}"
        self._directory = directory
        self._index = index
        self._settings: ClusterSettings = load_settings(directory)
        self._tools: Toolchain = toolchain(NODE_PROGRAMS)
        self._processes = Processes(directory)
        self._processes.path = self._tools.path

    def run(self) -> None:
        """Set up and supervise, for ever."""
        socket.sethostname(self.home.name)
        self._mount()
        cgroups.make(f"{cgroups.group(self._directory)}/{self.home.name}")
        self._connect()
        self._supervise()

    def _mount(self) -> None:
        run(
            "mount", "--no-mtab", "-t", "tmpfs", "tmpfs", "/run"
        )  # an mtab would go to the host's /run
        # mount points that the host may lack are made in overlays, so that the host's folders stay
        # as they are
        for folder in (Path("/var/lib"), Path("/var/log")):
            self._overlay(folder)
        self._bind(self.home / "kubelet", Path("/var/lib/kubelet"))
        self._bind(self.home / "logs", Path("/var/log/pods"))
        for number, (name, value) in enumerate(KERNEL_SETTINGS.items()):
            private = self.home / f"kernel-setting-{number}"
            private.write_text(f"{value}\n")
            run("mount", "--bind", private, Path("/proc/sys") / name)
        run("mount", "--make-rshared", "/")

    def _overlay(self, folder: Path) -> None:
        upper, work = (
            self.home / f"overlay{str(folder).replace('/', '-')}" / part
            for part in ("upper", "work")
        )
        for part in (upper, work):
            part.mkdir(parents=True)
        run(
            "mount",
            "-t",
            "overlay",
            "overlay",
            "-o",
            f"lowerdir={folder},upperdir={upper},workdir={work}",
            folder,
        )

    def _bind(self, source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", source, target)

    def _connect(self) -> None:
        """Wait for the cable that the host plugs in, then set addresses and routes."""
        addresses = Addresses(self._settings.slot)
        until("eth0", lambda: "eth0" in [name for _, name in socket.if_nameindex()])
        run("ip", "link", "set", "lo", "up")
        run("ip", "addr", "add", f"{addresses.node(self._index)}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        run("ip", "route", "add", "default", "via", addresses.host)
        for other in set(range(self._settings.nodes)) - {self._index}:
            run("ip", "route", "add", addresses.pod_subnet(other), "via", addresses.node(other))
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _commands(self) -> dict[str, list[object]]:
        kube, name = self._tools.program("kube"), self.home.name
        kubelet = {
            "--config": self.home / "kubelet.json",
            "--hostname-override": name,
            "--kubeconfig": self.home / "kubeconfig",
            "--node-ip": Addresses(self._settings.slot).node(self._index),
        }
        if labels := self._settings.gpus.labels:
            kubelet["--node-labels"] = ",".join(f"{key}={value}" for key, value in labels.items())
        return {
            "containerd": [self._tools.program("containerd"), "-c", self.home / "containerd.toml"],
            "kubelet": [kube, "kubelet", *flags(kubelet)],
            "kube-proxy": [kube, "kube-proxy", "--config", self.home / "proxy.json"],
        }

    def _supervise(self) -> None:
        """Restart what died, as a service manager would, unless a file `<daemon>.stopped` forbids
        it."""
        running: dict[str, subprocess.Popen[bytes]] = {}
        while True:
            for daemon, command in self._commands().items():
                if daemon not in running and not (self.home / f"{daemon}.stopped").exists():
                    running[daemon] = self._processes.start(
                        f"nodes/{self.home.name}/{daemon}", command
                    )
                    until("containerd", (self.home / "containerd.sock").exists)
            dead = set(_collect())
            running = {
                daemon: process for daemon, process in running.items() if process.pid not in dead
            }
            time.sleep(SUPERVISE_SECONDS)


def _collect() -> list[int]:
    """Reap every child that has ended, orphans of containers included, and return their pids."""
    dead = []
    with suppress(ChildProcessError):  # no child at all
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            dead.append(pid)
    return dead


if __name__ == "__main__":
    Node(Path(sys.argv[1]), int(sys.argv[2])).run()
