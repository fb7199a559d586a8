"""A small network of real hosts for ranks: a namespace with an address each, a switch between them,
and faults.

On one machine every rank reaches every other through the loopback device, where no packet is lost
and no interface is wrong. A namespace ends with the process that holds it, which ends with this
one: it reads from a pipe.
"""

import subprocess
from pathlib import Path

from harness.programs.processes import run, until

SWITCH = "switch"
STRAY = "astray0"
"""An interface of each host that leads nowhere and comes first by name."""


class Wires:
    """Network namespaces that stand for `hosts` hosts, joined by a bridge. A context manager that
    removes them."""

    def __init__(self, hosts: int) -> None:
        self._holders = [
            subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            for _ in range(hosts + 1)
        ]

    def __enter__(self) -> "Wires":
        namespace = Path("/proc/self/ns/net").readlink()
        for holder in self._holders:
            entry = Path(f"/proc/{holder.pid}/ns/net")
            until("a namespace", lambda entry=entry: entry.readlink() != namespace)  # type: ignore[misc]  # no such default
        self._inside(-1, "ip", "link", "add", SWITCH, "type", "bridge")
        self._inside(-1, "ip", "link", "set", SWITCH, "up")
        for host in range(len(self._holders) - 1):
            self._plug(host)
        return self

    def _plug(self, host: int) -> None:
        link = (
            "ip",
            "link",
            "add",
            f"port{host}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.holder(host),
        )
        self._inside(-1, *link)
        self._inside(-1, "ip", "link", "set", f"port{host}", "master", SWITCH, "up")
        for name, address in (("eth0", self.address(host)), (STRAY, f"10.88.{host}.1")):
            if name == STRAY:
                self._inside(host, "ip", "link", "add", STRAY, "type", "bridge")
            self._inside(host, "ip", "addr", "add", f"{address}/24", "dev", name)
            self._inside(host, "ip", "link", "set", name, "up")
        self._inside(host, "ip", "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.communicate()

    def holder(self, host: int) -> int:
        """Process in the host's namespace."""
        return self._holders[host].pid

    @staticmethod
    def address(host: int) -> str:
        """Of the interface that leads to the others."""
        return f"10.77.0.{10 + host}"

    def lose(self, host: int, sender: int, larger_than: int = 0) -> None:
        """From now on a host loses packets of another without a word, or only the large ones."""
        only = ("-m", "length", "--length", f"{larger_than}:65535") if larger_than else ()
        self._inside(
            host, "iptables", "-A", "INPUT", "-s", self.address(sender), *only, "-j", "DROP"
        )

    def mend(self) -> None:
        """Lose nothing any more."""
        for host in range(len(self._holders) - 1):
            self._inside(host, "iptables", "-F", "INPUT")

    def _inside(self, host: int, *command: object) -> None:
        run("nsenter", "--target", self._holders[host].pid, "--net", *command)
