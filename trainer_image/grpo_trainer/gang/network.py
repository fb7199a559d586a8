"""Tries every pair of pods by TCP before the process group does, and names the first pair that fails.

NCCL and gloo report only that something timed out, after half an hour and without a name. Each pod listens on a port
that the kernel chooses, as those of the libraries are, and publishes it in rank 0's store. Each pod connects to all
others and exchanges 64 KiB: a path that loses large packets (its MTU is smaller than the interface's) lets a handshake
through. A pod that finds a failure reports it to rank 0, which gives all pods the same verdict.
"""

import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # no stubs

from ..errors import RendezvousTimeout
from .placement import Placement

PAYLOAD = 64 * 1024
"""Bytes each way: many packets of any MTU."""
PAIR_SECONDS = 10.0
"""Time for one pair; a lost first packet is sent again after 1, 3 and 7 s."""
VERDICT_SECONDS = 45.0
"""Time for all of it, however many pods there are."""
PARALLEL = 32
"""Pods that one pod tries at a time."""
POLL_SECONDS = 0.05
ACKNOWLEDGE_SECONDS = 2.0
_VERDICT, _TOLD = "network/verdict", "network/told"


@dataclass(frozen=True, slots=True)
class Peer:
    """One pod, as the others find it."""

    node: int
    """Its index in the gang."""
    rank: int
    """Its first rank."""
    pod: str
    """Its name."""
    address: str
    """Of the interface that it uses."""
    interface: str
    port: int
    """Where it listens during the check."""

    def __str__(self) -> str:
        through = f" on {self.interface}" if self.interface else ""
        return f"rank {self.rank} (pod {self.pod}, {self.address}{through})"


def check(store: Store, place: Placement, address: str, interface: str) -> None:
    """Try all pairs of the gang's pods; returns when every one of them has worked. A collective.

    Raises:
        RendezvousTimeout: a pair failed; the same sentence on all ranks.
    """
    deadline = time.monotonic() + VERDICT_SECONDS
    if place.local_rank == 0:
        with _listening(address) as port:
            name = os.environ.get("POD_NAME") or socket.gethostname()
            me = Peer(place.node, place.rank, name, address, interface, port)
            store.set(_key("peer", place.node), json.dumps(asdict(me)))
            store.set(_key("failure", place.node), json.dumps(_first_failure(store, me, place.nodes, deadline)))
            if place.is_main:
                store.set(_VERDICT, _judge(store, place.nodes, deadline))
            verdict = _awaited(store, _VERDICT, deadline + PAIR_SECONDS)
    else:
        verdict = _awaited(store, _VERDICT, deadline + PAIR_SECONDS)
    _acknowledge(store, place)
    if verdict is None:
        raise RendezvousTimeout(f"rank 0 gave no verdict on the network between the pods in {VERDICT_SECONDS:.0f} s")
    if verdict:
        raise RendezvousTimeout(verdict)


def _first_failure(store: Store, me: Peer, nodes: int, deadline: float) -> str:
    """What is wrong between this pod and the first other that it can't talk to; empty where all is well."""
    # each begins with its next, so that no pod is asked by all at once
    others = [(me.node + step) % nodes for step in range(1, nodes)]
    with ThreadPoolExecutor(PARALLEL, "pairs") as pool:
        tries = [pool.submit(_try, store, me, node, deadline) for node in others]
        for done in as_completed(tries):
            if problem := done.result():
                pool.shutdown(wait=False, cancel_futures=True)
                return problem
    return ""


def _try(store: Store, me: Peer, node: int, deadline: float) -> str:
    """What is wrong between this pod and another; empty where nothing is."""
    text = _awaited(store, _key("peer", node), deadline)
    if text is None:
        return ""  # rank 0 names who has not come so far
    peer = Peer(**json.loads(text))
    try:
        _exchange(me, peer)
    except OSError as error:
        return f"{me} can't talk to {peer}: {error or type(error).__name__}"
    return ""


def _exchange(me: Peer, peer: Peer) -> None:
    """Connect, from the interface that will be used, and have PAYLOAD come back.

    Raises:
        OSError: says in which of the two it failed.
    """
    until = time.monotonic() + PAIR_SECONDS
    try:
        connection = socket.create_connection((peer.address, peer.port), PAIR_SECONDS, (me.address, 0))
    except OSError as error:
        raise OSError(
            f"no connection to port {peer.port} in {PAIR_SECONDS:.0f} s ({error}). Does a NetworkPolicy allow all "
            f"ports between the job's pods, and is there a route?"
        ) from error
    with connection:
        received = 0
        try:
            connection.sendall(bytes(PAYLOAD))
            while received < PAYLOAD:
                connection.settimeout(max(0.1, until - time.monotonic()))
                if not (part := connection.recv(PAYLOAD)):
                    raise ConnectionError("it was closed")
                received += len(part)
        except OSError as error:
            raise OSError(
                f"a connection came about, but only {received} of {PAYLOAD} bytes came back in {PAIR_SECONDS:.0f} s "
                f"({error}), as when a path loses large packets: is the MTU of {me.interface or 'the interface'} "
                f"larger than the network's?"
            ) from error


def _judge(store: Store, nodes: int, deadline: float) -> str:
    """Rank 0's verdict from what all pods found: empty, or the first failure and how many pods found one."""
    answers = {node: _awaited(store, _key("failure", node), deadline) for node in range(nodes)}
    found = [json.loads(answer) for answer in answers.values() if answer]
    problems = [problem for problem in found if problem]
    if problems:
        more = f" ({len(problems)} of {nodes} pods found such a failure)" if len(problems) > 1 else ""
        return f"the network between the pods fails: {problems[0]}{more}"
    if silent := [node for node, answer in answers.items() if answer is None]:
        return (
            f"the pods with index {', '.join(map(str, silent[:8]))} did not try the network in {VERDICT_SECONDS:.0f} s"
        )
    return ""


def _acknowledge(store: Store, place: Placement) -> None:
    """Rank 0, which holds the store and ends with a bad verdict, stays until all others have read it."""
    told = store.add(_TOLD, 1)
    until = time.monotonic() + ACKNOWLEDGE_SECONDS
    while place.is_main and told < place.world_size and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        told = store.add(_TOLD, 0)


def _awaited(store: Store, key: str, deadline: float) -> str | None:
    """The value of a key once it is there; None if it isn't in time."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)
    return str(store.get(key).decode())


def _key(what: str, node: int) -> str:
    return f"network/{what}/{node}"


@contextmanager
def _listening(address: str) -> Iterator[int]:
    """Answer the others' tries on this address; the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = type("Server", (socketserver.ThreadingTCPServer,), {"address_family": family, "request_queue_size": 512})
    with kind((address, 0), _Answer) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="network", daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


class _Answer(socketserver.BaseRequestHandler):
    """Sends back what came, which is never more than PAYLOAD."""

    def handle(self) -> None:
        """One connection."""
        connection: Any = self.request
        connection.settimeout(PAIR_SECONDS)
        received = 0
        try:
            while received < PAYLOAD and (part := connection.recv(PAYLOAD)):
                received += len(part)
            connection.sendall(bytes(received))
        except OSError:
            return  # the other side sees the same, and tells
