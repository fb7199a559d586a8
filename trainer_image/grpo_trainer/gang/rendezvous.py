"""Brings the ranks together: a TCP store on rank 0, a test of the network, a process group, a first
all-reduce.

torch's own rendezvous says only that a time is up. Here the message names the ranks that did not
come, and the first pair of pods that can't talk to each other.

NCCL and gloo report only that something timed out, after half an hour and without a name. Each pod
listens on a port that the kernel chooses, as those of the libraries are, and publishes it in rank
0's store. Each pod connects to all others and exchanges 64 KiB. A path that loses large packets
(its MTU is smaller than the interface's) lets a handshake through. A pod that finds a failure
reports it to rank 0, which gives all pods the same verdict.

The all-reduce shows what TCP can't: cards, drivers and topology that NCCL finds for itself. It also
shows whether NCCL sends by RDMA where the job asks for that (nccl_transport.py). The watchdog has
the clock, since a stuck collective can't be given up from inside.
"""

import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # no stubs
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)

from grpo_api.plan.plan import ExecutionPlan, Rendezvous
from grpo_api.report.report import Result
from grpo_api.spec.run_policy import GuardSpec

from ..runtime.errors import RendezvousTimeout, Transient, classify_error
from . import ranks
from .interfaces import choose_interface, interfaces_message, own_address
from .nccl_transport import RDMACheck, is_memlock_failure, memlock_message, shared_problem
from .placement import Placement

log = logging.getLogger(__name__)

PAYLOAD = 64 * 1024
"""Bytes each way: many packets of any MTU."""
PAIR_SECONDS = 10.0
"""Time for one pair; a lost first packet is sent again after 1, 3 and 7 s."""
VERDICT_SECONDS = 45.0
"""Time for all of it, however many pods there are."""
PARALLEL = 32
"""Pods that one pod tries at a time."""
NETWORK_POLL_SECONDS = 0.05
ACKNOWLEDGE_SECONDS = 2.0
_VERDICT, _READERS = "network/verdict", "network/readers"


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


def check_network(store: Store, place: Placement, address: str, interface: str) -> None:
    """Try all pairs of the gang's pods; returns when every one of them has worked. A collective.

    Raises:
        RendezvousTimeout: a pair failed; the same sentence on all ranks.
    """
    deadline = time.monotonic() + VERDICT_SECONDS
    with ExitStack() as stack:
        if place.local_rank == 0:
            port = stack.enter_context(_answer_network_tries(address))
            name = os.environ.get("POD_NAME") or socket.gethostname()
            me = Peer(place.node, place.rank, name, address, interface, port)
            store.set(_network_key("peer", place.node), json.dumps(asdict(me)))
            failure = _first_failure(store, me, place.nodes, deadline)
            store.set(_network_key("failure", place.node), json.dumps(failure))
        if place.is_main:
            store.set(_VERDICT, _judge(store, place.nodes, deadline))
        verdict = _await_value(store, _VERDICT, deadline + PAIR_SECONDS)
    _acknowledge(store, place)
    if verdict is None:
        raise RendezvousTimeout(
            f"rank 0 gave no verdict on the network between the pods in {VERDICT_SECONDS:.0f} s"
        )
    if verdict:
        raise RendezvousTimeout(verdict)


def _first_failure(store: Store, me: Peer, nodes: int, deadline: float) -> str:
    """What is wrong between this pod and the first other that it can't talk to; empty where all is
    well."""
    # each begins with its next, so that no pod is asked by all at once
    others = [(me.node + step) % nodes for step in range(1, nodes)]
    with ThreadPoolExecutor(PARALLEL, "pairs") as pool:
        tries = [pool.submit(_try_pair, store, me, node, deadline) for node in others]
        for future in as_completed(tries):
            if problem := future.result():
                pool.shutdown(wait=False, cancel_futures=True)
                return problem
    return ""


def _try_pair(store: Store, me: Peer, node: int, deadline: float) -> str:
    """What is wrong between this pod and another; empty where nothing is."""
    text = _await_value(store, _network_key("peer", node), deadline)
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
    there, here = (peer.address, peer.port), (me.address, 0)
    try:
        connection = socket.create_connection(there, PAIR_SECONDS, here)
    except OSError as error:
        raise OSError(
            f"no connection to port {peer.port} in {PAIR_SECONDS:.0f} s ({error}). Does a "
            "NetworkPolicy allow all ports between the job's pods, and is there a route?"
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
                f"a connection came about, but only {received} of {PAYLOAD} bytes came back in "
                f"{PAIR_SECONDS:.0f} s ({error}), as when a path loses large packets: is the MTU "
                f"of {me.interface or 'the interface'} larger than the network's?"
            ) from error


def _judge(store: Store, nodes: int, deadline: float) -> str:
    """Rank 0's verdict from what all pods found: empty, or the first failure and how many pods
    found one."""
    keys = [_network_key("failure", node) for node in range(nodes)]
    answers = [_await_value(store, key, deadline) for key in keys]
    parsed = [json.loads(answer) for answer in answers if answer]
    problems = [problem for problem in parsed if problem]
    if problems:
        count = len(problems)
        more = f" ({count} of {nodes} pods found such a failure)" if count > 1 else ""
        return f"the network between the pods fails: {problems[0]}{more}"
    if silent := [node for node, answer in enumerate(answers) if answer is None]:
        return (
            f"the pods with index {', '.join(map(str, silent[:8]))} did not try the network in "
            f"{VERDICT_SECONDS:.0f} s"
        )
    return ""


def _acknowledge(store: Store, place: Placement) -> None:
    """Rank 0, which holds the store and ends with a bad verdict, stays until all others have read
    it."""
    readers = store.add(_READERS, 1)
    until = time.monotonic() + ACKNOWLEDGE_SECONDS
    while place.is_main and readers < place.world_size and time.monotonic() < until:
        time.sleep(NETWORK_POLL_SECONDS)
        readers = store.add(_READERS, 0)


def _await_value(store: Store, key: str, deadline: float) -> str | None:
    """The value of a key once it is there; None if it isn't in time."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(NETWORK_POLL_SECONDS)
    return str(store.get(key).decode())


def _network_key(what: str, node: int) -> str:
    return f"network/{what}/{node}"


@contextmanager
def _answer_network_tries(address: str) -> Iterator[int]:
    """Answer the others' tries on this address; the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    settings = {"address_family": family, "request_queue_size": 512}
    kind = type("Server", (socketserver.ThreadingTCPServer,), settings)
    with kind((address, 0), _Answer) as server:
        server.daemon_threads, server.block_on_close = True, False
        serve = partial(server.serve_forever, NETWORK_POLL_SECONDS)
        threading.Thread(target=serve, name="network", daemon=True).start()
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


GPU_BYTES = 64 * 1024 * 1024
"""Large enough for a bandwidth and not for a latency (nccl-tests show the plateau from about here
on)."""
CPU_BYTES = 1024 * 1024
ROUNDS = 3
"""Timed rounds after the first, which makes the connections."""
LEAST_SENT_BYTES = (1 + ROUNDS) * GPU_BYTES // 2
"""Less than the ports of any of several nodes send in all rounds. A ring and a tree send the values
once at least, and half of that leaves room for what was sent before a counter was read."""


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    """What the first all-reduce showed."""

    bytes_per_second: float
    """See bus_bandwidth."""
    rdma_problem: str = ""
    """Why the data does not go by RDMA although the job asks for it, the same on all ranks; empty
    where nothing shows that."""


def bus_bandwidth(device: torch.device) -> float:
    """Bytes per second that each rank moves in an all-reduce of all ranks, by the fastest of some
    rounds. A collective.

    As nccl-tests count it (PERFORMANCE.md): size / time * 2 (n - 1) / n, which compares gangs of
    any size with the bandwidth of their links.

    Raises:
        Transient: the sum is wrong, as when GPUs can't read each other's memory (PCIe ACS, IOMMU).
    """
    world = dist.get_world_size()
    values = torch.empty((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4, device=device)
    seconds = min([_round(values, world) for _ in range(1 + ROUNDS)][1:])
    return 2 * (world - 1) / world * values.nbytes / seconds


def _round(values: torch.Tensor, world: int) -> float:
    values.fill_(1.0)
    _synchronise(values.device)
    begin = time.perf_counter()
    dist.all_reduce(values)
    _synchronise(values.device)
    seconds = time.perf_counter() - begin
    wrong = int((values != world).sum())
    if wrong:
        raise Transient(
            f"{wrong} of {len(values)} sums of an all-reduce over {world} ranks are wrong on rank "
            f"{dist.get_rank()}: NCCL_P2P_DISABLE=1 tells whether GPUs can't read each other's "
            "memory (PCIe ACS or an IOMMU)"
        )
    return seconds


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


POLL_SECONDS = 0.2
COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Longer than any rank may wait for a peer that makes progress: it is the watchdog that finds and
names a hang."""
STORE_TIMEOUT = timedelta(minutes=5)
"""For what NCCL reads there, later than its peers write it; the time left of the rendezvous may be
none."""
CLIENT_SECONDS = 30.0
"""Patience of a further connection to the store."""


def join_gang(
    rendezvous: Rendezvous,
    guard: GuardSpec,
    execution: ExecutionPlan,
    place: Placement,
    on_connecting: Callable[[], None] = lambda: None,
    *,
    rdma_devices: Sequence[str] = (),
) -> NetworkTrial | None:
    """Form the default process group (gloo on CPU, NCCL on GPU) of all ranks, and try it. Return
    what an all-reduce showed; None for a single rank.

    `on_connecting` is called once all ranks are there, and again when all pods reach each other:
    what follows takes seconds, or the network is to blame. `rdma_devices` are the extended
    resources of the pods that are taken as network cards; empty where the job asks for no RDMA.

    Raises:
        RendezvousTimeout: rank 0 can't be reached, or ranks are missing, after
            guard.rendezvousTimeoutSeconds; two pods can't talk to each other.
        Transient: an all-reduce gives wrong sums.
    """
    deadline = time.monotonic() + guard.rendezvous_timeout_seconds
    if not place.is_main:
        _await_main(rendezvous, guard, deadline)
    store = _store(rendezvous, deadline, serves=place.is_main)
    store.set(_rank_key(place.rank), "here")
    _await_all(store, place, deadline)
    on_connecting()
    store.set_timeout(STORE_TIMEOUT)
    gpu, engine = execution.accelerator == "GPU", execution.engine
    if place.nodes > 1:
        address, interface = _choose_routed_interface(rendezvous, place, gpu=gpu)
        check_network(store, place, address, interface)
        on_connecting()
    elif gpu and engine is not None and engine.kind == "Servers":
        # NCCL chooses once, and its choice holds for the way to engines in other pods, too.
        _choose_routed_interface(rendezvous, place, gpu=gpu)
    return _form_group(execution, place, store, rdma_devices)


def _form_group(
    execution: ExecutionPlan, place: Placement, store: Store, rdma_devices: Sequence[str]
) -> NetworkTrial | None:
    gpu = execution.accelerator == "GPU"
    rdma_check: RDMACheck | None = None
    if gpu:
        torch.cuda.set_device(place.local_rank)
    if gpu and place.nodes > 1 and rdma_devices:
        rdma_check = RDMACheck(rdma_devices, place.rank, os.environ)
    with _as_timeout(f"the process group does not come about ({interfaces_message(os.environ)})"):
        # DeepSpeed and vLLM make groups of their own, without a time.
        distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
        distributed_c10d.default_pg_nccl_timeout = COLLECTIVE_TIMEOUT  # type: ignore[attr-defined]
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if gpu else "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        if place.world_size == 1:
            return None
        if rdma_check:
            rdma_check.begin()
        device = torch.device("cuda", place.local_rank) if gpu else torch.device("cpu")
        bandwidth = bus_bandwidth(device)
    if rdma_check is None:
        return NetworkTrial(bandwidth)
    has_assumption = execution.link_bytes_per_second is not None
    own_problem = rdma_check.find_problem(
        LEAST_SENT_BYTES,
        is_as_fast_as_planned=has_assumption and not execution.has_slow_links(bandwidth),
    )
    return NetworkTrial(bandwidth, shared_problem(ranks.gather(own_problem)))


@contextmanager
def _as_timeout(problem: str) -> Iterator[None]:
    """What gloo, NCCL and the store raise is a RendezvousTimeout, with their words after ours."""
    try:
        yield
    except RuntimeError as error:  # gloo's, and torch's DistError; memory is another matter
        if is_memlock_failure(str(error)):
            raise RendezvousTimeout(f"{problem}: {error}. {memlock_message()}") from error
        if classify_error(error)[0] is Result.OUT_OF_MEMORY:
            raise
        raise RendezvousTimeout(f"{problem}: {error}") from error


def _choose_routed_interface(
    rendezvous: Rendezvous, place: Placement, *, gpu: bool
) -> tuple[str, str]:
    """Address and name of the interface that leads to rank 0; see choose_interface."""
    peer = f"{rendezvous.address}:{rendezvous.port}"
    try:
        routed = own_address(rendezvous.address, rendezvous.port, CLIENT_SECONDS)
    except OSError as error:
        raise RendezvousTimeout(
            f"rank {place.rank} reached rank 0 at {peer}, but not a second time: {error}"
        ) from error
    address, interface = choose_interface(routed, os.environ, gpu=gpu)
    log.info(f"rank {place.rank} talks through {address} ({interface or 'an unknown interface'})")
    return address, interface


def store_client(rendezvous: Rendezvous) -> Store:
    """A separate connection to rank 0's store: on a shared one a thread that waits blocks all
    others."""
    return _store(rendezvous, time.monotonic() + CLIENT_SECONDS, serves=False)


def _await_main(rendezvous: Rendezvous, guard: GuardSpec, deadline: float) -> None:
    """Wait until rank 0 listens: its pod may start later, and its DNS name appears only with it."""
    peer = (rendezvous.address, rendezvous.port)
    while True:
        seconds_left = max(POLL_SECONDS, deadline - time.monotonic())
        try:
            socket.create_connection(peer, timeout=seconds_left).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousTimeout(
                    f"rank 0 at {peer[0]}:{peer[1]} did not answer within "
                    f"guard.rendezvousTimeoutSeconds = {guard.rendezvous_timeout_seconds}: "
                    f"{error}. Is its pod running, and does a NetworkPolicy allow the port between "
                    "the job's pods?"
                ) from error
            time.sleep(POLL_SECONDS)
        else:
            return


def _store(rendezvous: Rendezvous, deadline: float, *, serves: bool) -> Store:
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    address, port = rendezvous.address, rendezvous.port
    with _as_timeout(f"the store at {address}:{port} can't be opened"):
        return TCPStore(address, port, None, serves, timeout=timeout, wait_for_workers=False)


def _await_all(store: Store, place: Placement, deadline: float) -> None:
    missing = list(range(place.world_size))
    while True:
        missing = [rank for rank in missing if not store.check([_rank_key(rank)])]
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise RendezvousTimeout(
                f"{place.world_size - len(missing)} of {place.world_size} ranks came in time; "
                f"missing: {', '.join(map(str, missing))}. Raise guard.rendezvousTimeoutSeconds if "
                "their pods start that slowly"
            )
        time.sleep(POLL_SECONDS)


def _rank_key(rank: int) -> str:
    return f"rank/{rank}"


def prepare_deepspeed(execution: ExecutionPlan) -> None:
    """Make DeepSpeed use the process group that exists; call before GRPOConfig is built.

    transformers initialises only torch.distributed with use_cpu, and zero.Init would then take the
    world for one rank. The shared-memory op is switched off on CPUs: it is compiled at first use (a
    minute, and a compiler in the image), and serves one host only.
    """
    import deepspeed
    import deepspeed.ops

    if execution.accelerator == "CPU":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if execution.accelerator == "CPU" else "nccl")


def leave_gang() -> None:
    """A last barrier: rank 0 holds the store and must not go first."""
    if dist.is_initialized():
        dist.barrier()
