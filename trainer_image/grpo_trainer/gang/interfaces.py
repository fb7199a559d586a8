"""The addresses of this process: the network interface of the ranks, and the listening socket of
rank 0's pages.

The ranks use the interface that the user names, else the one that routes to rank 0. NCCL and gloo
choose by interface name and by what the host's name resolves to, which is wrong on some nodes with
several cards. The interface on the kernel's route to rank 0 is set for both libraries instead.

The socket is for IPv4, IPv6 or both. A pod has one or two addresses, and a client uses the one that
it can reach. Python's HTTP server binds one family.
"""

import socket
from collections.abc import Mapping, MutableMapping

import psutil

from ..runtime.errors import RendezvousTimeout

NCCL_INTERFACE, GLOO_INTERFACE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def own_address(host: str, port: int, timeout: float) -> str:
    """The address from which this pod reaches a listening socket: that of the interface that the
    route takes.

    Raises:
        OSError: it can't be reached.
    """
    with socket.create_connection((host, port), timeout) as connection:
        return str(connection.getsockname()[0])


def choose_interface(
    routed_address: str, environment: MutableMapping[str, str], *, gpu: bool
) -> tuple[str, str]:
    """Address and name of the interface to use. Sets NCCL's and gloo's variables to it unless the
    user set them. `routed_address` is this pod's towards rank 0; `gpu`: NCCL talks for the
    training, else gloo.

    Raises:
        RendezvousTimeout: the user names an interface that this pod has not, or that has no
            address.
    """
    addresses = interfaces(socket.AF_INET6 if ":" in routed_address else socket.AF_INET)
    variable = NCCL_INTERFACE if gpu else GLOO_INTERFACE
    wish = environment.get(variable, "")
    if wish:
        name = next((name for name in addresses if is_in_interface_list(wish, name)), "")
        if not name:
            names = ", ".join(sorted(addresses))
            raise RendezvousTimeout(
                f"{variable} is {wish!r}, but this pod's interfaces are {names}"
            )
    else:
        name = next((name for name, address in addresses.items() if address == routed_address), "")
    if name:
        # The sign stands for "exactly", not "beginning with".
        environment.setdefault(NCCL_INTERFACE, f"={name}")
        environment.setdefault(GLOO_INTERFACE, name)
    return addresses.get(name, routed_address), name


def interfaces_message(environment: Mapping[str, str]) -> str:
    """The interface settings of NCCL and gloo, for messages about a process group that failed to
    form."""
    settings = [
        f"{name}={environment[name]}"
        for name in (NCCL_INTERFACE, GLOO_INTERFACE)
        if name in environment
    ]
    return ", ".join(settings) or "one pod"


def interfaces(family: socket.AddressFamily) -> dict[str, str]:
    """The first address of each interface that has one, by name."""
    address_by_name: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        of_family = [address.address for address in addresses if address.family == family]
        if of_family:
            # A link-local IPv6 address ends with its zone, as in fe80::1%eth0, which is no part of
            # the address.
            address_by_name[name] = of_family[0].partition("%")[0]
    return address_by_name


def is_in_interface_list(wish: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME's list takes an interface: beginnings, `=` for whole names, `^`
    for all others."""
    excluded, exact = wish.startswith("^"), wish.lstrip("^").startswith("=")
    listed = [entry for entry in wish.lstrip("^").lstrip("=").split(",") if entry]
    is_listed = name in listed if exact else name.startswith(tuple(listed))
    return excluded != is_listed


def open_listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on this address, without one on every address of the machine.

    One IPv6 socket also answers IPv4 then, where the kernel knows IPv6 at all.

    Raises:
        OSError: the port is taken, or the machine doesn't have the address.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[::1]:port` or `:port`.

    Raises:
        ValueError: the port is no number.
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
