"""Opens the listening socket of rank 0's pages: for IPv4, IPv6 or both.

A pod has one or two addresses, and a client uses the one that it can reach. Python's HTTP server binds one family.
"""

import socket


def listening(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on this address, without one on every address of the machine.

    One IPv6 socket also answers IPv4 then, where the kernel knows IPv6 at all.

    Raises:
        OSError: the port is taken, or the machine doesn't have the address.
    """
    if host:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[::1]:port` or `:port`.

    Raises:
        ValueError: the port is no number.
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
