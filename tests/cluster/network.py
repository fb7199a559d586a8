"""The network of the node level: one bridge on the host, one veth pair per node, plain routes to the pods.

No address is masqueraded: host, nodes and pods reach each other under their own addresses, so tests can dial pods and
pods see who calls. A slot number keeps several clusters on one machine apart.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .processes import run

SLOTS = 8
BRIDGE_NETFILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


@dataclass(frozen=True)
class Addresses:
    """Names and addresses of the cluster in a slot (0 to 7)."""

    slot: int

    @property
    def bridge(self) -> str:
        """The bridge's name."""
        return f"grpo{self.slot}"

    @property
    def host(self) -> str:
        """The host's address on the bridge: API server and DNS."""
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

    def veth(self, index: int) -> str:
        """The host's end of a node's cable."""
        return f"{self.bridge}-{index}"


def create(slot: int) -> None:
    """Make the bridge with the host's address on it."""
    addresses = Addresses(slot)
    run("ip", "link", "add", addresses.bridge, "type", "bridge")
    run("ip", "addr", "add", f"{addresses.host}/24", "dev", addresses.bridge)
    run("ip", "link", "set", addresses.bridge, "up")
    if BRIDGE_NETFILTER.exists() and BRIDGE_NETFILTER.read_text().strip() == "1":
        # the host filters bridged packets too, and Docker's default for forwarded ones is to drop them
        run("iptables", "--wait", "--insert", *_forward_rule(addresses))


def attach(slot: int, index: int, pid: int) -> None:
    """Plug a node in: `eth0` in the network namespace of the process, and the route to the node's pods."""
    addresses = Addresses(slot)
    run("ip", "link", "add", addresses.veth(index), "type", "veth", "peer", "name", "eth0", "netns", pid)
    run("ip", "link", "set", addresses.veth(index), "master", addresses.bridge, "up")
    run("ip", "route", "add", addresses.pod_subnet(index), "via", addresses.node(index))


def remove(slot: int) -> None:
    """Remove bridge, cables (the routes go with them) and the firewall rule; safe to repeat."""
    addresses = Addresses(slot)
    for link in (*_ports(addresses.bridge), addresses.bridge):
        _try("ip", "link", "delete", link)
    while BRIDGE_NETFILTER.exists() and _try("iptables", "--wait", "--delete", *_forward_rule(addresses)):
        continue


def _forward_rule(addresses: Addresses) -> list[str]:
    return ["FORWARD", "--in-interface", addresses.bridge, "--out-interface", addresses.bridge, "--jump", "ACCEPT"]


def _ports(bridge: str) -> list[str]:
    done = subprocess.run(["ip", "-j", "link", "show", "master", bridge], capture_output=True, text=True, check=False)
    return [link["ifname"] for link in json.loads(done.stdout or "[]")]


def _try(*command: str) -> bool:
    """Run a command that fails when there is nothing left to remove; whether it removed something."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
