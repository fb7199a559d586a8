"""The network of the node level: a switch in a namespace of its own, one cable per node, one to the
host.

The switch (a bridge) is not in the host's namespace, so the host's firewall never sees what the
nodes say to each other, and the end of the process that holds the namespace removes switch and
cables. No address is masqueraded: host, nodes and pods reach each other under their own addresses.
A slot number keeps several clusters on one machine apart.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..programs.processes import Processes, run, until

SLOTS = 8
SWITCH = (
    "switch"  # the role of the process that holds the namespace, and the bridge's name in there
)


@dataclass(frozen=True)
class Addresses:
    """Names and addresses of the cluster in a slot (0 to 7)."""

    slot: int

    @property
    def link(self) -> str:
        """The host's network device."""
        return f"grpo{self.slot}"

    @property
    def host(self) -> str:
        """The host's address: API server and DNS."""
        return f"10.99.{self.slot}.1"

    @property
    def pods(self) -> str:
        """The network of all pods."""
        return f"10.{244 - self.slot}.0.0/16"

    def node(self, index: int) -> str:
        """The address of a node."""
        return f"10.99.{self.slot}.{10 + index}"

    def pod_subnet(self, index: int) -> str:
        """The network of a node's pods."""
        return f"10.{244 - self.slot}.{index}.0/24"


def create(slot: int, processes: Processes) -> None:
    """Start the switch and plug the host in."""
    addresses = Addresses(slot)
    pid = start_in_namespaces(processes, SWITCH, ["--net"], ["sleep", "infinity"]).pid
    _in_switch(pid, "link", "add", SWITCH, "type", "bridge")
    _in_switch(pid, "link", "set", SWITCH, "up")
    _in_switch(
        pid,
        "link",
        "add",
        "host",
        "type",
        "veth",
        "peer",
        "name",
        addresses.link,
        "netns",
        os.getpid(),
    )
    _in_switch(pid, "link", "set", "host", "master", SWITCH, "up")
    run("ip", "addr", "add", f"{addresses.host}/24", "dev", addresses.link)
    run("ip", "link", "set", addresses.link, "up")


def start_in_namespaces(
    processes: Processes,
    role: str,
    namespaces: list[str],
    command: list[object],
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in new namespaces (options of unshare) and return when it has them."""
    process = processes.start(role, ["unshare", *namespaces, *command], cwd)
    own = Path("/proc/self/ns/net").readlink()
    until(
        f"the namespaces of {role}", lambda: Path(f"/proc/{process.pid}/ns/net").readlink() != own
    )
    return process


def attach(slot: int, processes: Processes, index: int, pid: int) -> None:
    """Plug a node in: `eth0` in the network namespace of the process, and the host's route to the
    node's pods."""
    addresses = Addresses(slot)
    switch = processes.find(SWITCH)[0]
    port = f"node-{index}"
    _in_switch(switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
    _in_switch(switch, "link", "set", port, "master", SWITCH, "up")
    run("ip", "route", "add", addresses.pod_subnet(index), "via", addresses.node(index))


def remove(slot: int) -> None:
    """Remove the host's cable, and with it its routes; the kernel may be slow to do so after the
    switch's end."""
    subprocess.run(["ip", "link", "delete", Addresses(slot).link], capture_output=True, check=False)


def _in_switch(pid: int, *arguments: object) -> None:
    run("nsenter", "--target", pid, "--net", "ip", *arguments)
