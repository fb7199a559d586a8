"""Brings the ranks together: one TCP store on rank 0, and one process group.

torch's own rendezvous says only that a time is up; here the message names the ranks that did not come.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # no stubs

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result

from ..errors import RendezvousTimeout, classify
from . import network
from .allreduce import bus_bandwidth
from .interfaces import choose, chosen, own_address
from .placement import Placement

POLL_SECONDS = 0.2
COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Longer than any rank may wait for a peer that makes progress: it is the watchdog that finds and names a hang."""
STORE_TIMEOUT = timedelta(minutes=5)
"""For what NCCL reads there, later than its peers write it; the time left of the rendezvous may be none."""
CLIENT_SECONDS = 30.0
"""Patience of a further connection to the store."""


def join(plan: TrainingPlan, place: Placement, connecting: Callable[[], None] = lambda: None) -> float | None:
    """Form the default process group (gloo on CPU, NCCL on GPU) of all ranks, and try it.

    Args:
        plan: of the gang.
        place: of this process in it.
        connecting: called once all ranks are there, and all pods reach each other: from there on it takes seconds, or
            the network is to blame.

    Returns:
        Bytes per second of an all-reduce (allreduce.py); None for a single rank.

    Raises:
        RendezvousTimeout: rank 0 can't be reached, or ranks are missing, after guard.rendezvousTimeoutSeconds; two pods
            can't talk to each other.
        Transient: an all-reduce gives wrong sums.
    """
    deadline = time.monotonic() + plan.guard.rendezvous_timeout_seconds
    if not place.is_main:
        _await_main(plan, deadline)
    store = _store(plan, deadline, serves=place.is_main)
    store.set(_key(place.rank), "here")
    _await_all(store, place, deadline)
    connecting()
    store.set_timeout(STORE_TIMEOUT)
    gpu = plan.execution.accelerator == "GPU"
    if place.nodes > 1:
        _try_network(plan, place, store, gpu)
        connecting()
    return _form_group(place, store, gpu)


def _form_group(place: Placement, store: Store, gpu: bool) -> float | None:
    if gpu:
        torch.cuda.set_device(place.local_rank)
    with _as_timeout(f"the process group does not come about ({chosen(os.environ)})"):
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if gpu else "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        if place.world_size == 1:
            return None
        return bus_bandwidth(torch.device("cuda", place.local_rank) if gpu else torch.device("cpu"))


@contextmanager
def _as_timeout(problem: str) -> Iterator[None]:
    """What gloo, NCCL and the store raise is a RendezvousTimeout, with their words after ours."""
    try:
        yield
    except RuntimeError as error:  # gloo's, and torch's DistError; memory is another matter
        if classify(error)[0] is Result.OUT_OF_MEMORY:
            raise
        raise RendezvousTimeout(f"{problem}: {error}") from error


def _try_network(plan: TrainingPlan, place: Placement, store: Store, gpu: bool) -> None:
    routed = own_address(plan.rendezvous.address, plan.rendezvous.port, CLIENT_SECONDS)
    address, interface = choose(routed, os.environ, gpu=gpu)
    print(f"rank {place.rank} talks through {address} ({interface or 'an unknown interface'})", flush=True)
    network.check(store, place, address, interface)


def store_client(plan: TrainingPlan) -> Store:
    """A separate connection to rank 0's store: on a shared one a thread that waits blocks all others."""
    return _store(plan, time.monotonic() + CLIENT_SECONDS, serves=False)


def _await_main(plan: TrainingPlan, deadline: float) -> None:
    """Wait until rank 0 listens: its pod may start later, and its DNS name appears only with it."""
    peer = (plan.rendezvous.address, plan.rendezvous.port)
    while True:
        try:
            socket.create_connection(peer, timeout=max(POLL_SECONDS, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousTimeout(
                    f"rank 0 at {peer[0]}:{peer[1]} did not answer within guard.rendezvousTimeoutSeconds = "
                    f"{plan.guard.rendezvous_timeout_seconds}: {error}. Is its pod running, and does a NetworkPolicy "
                    f"allow the port between the job's pods?"
                ) from error
            time.sleep(POLL_SECONDS)
        else:
            return


def _store(plan: TrainingPlan, deadline: float, *, serves: bool) -> Store:
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    address, port = plan.rendezvous.address, plan.rendezvous.port
    with _as_timeout(f"the store at {address}:{port} can't be opened"):
        return TCPStore(address, port, None, serves, timeout=left, wait_for_workers=False)


def _await_all(store: Store, place: Placement, deadline: float) -> None:
    missing = list(range(place.world_size))
    while True:
        missing = [rank for rank in missing if not store.check([_key(rank)])]
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise RendezvousTimeout(
                f"{place.world_size - len(missing)} of {place.world_size} ranks came in time; missing: "
                f"{', '.join(map(str, missing))}. Raise guard.rendezvousTimeoutSeconds if their pods start that slowly"
            )
        time.sleep(POLL_SECONDS)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def prepare_deepspeed(plan: TrainingPlan) -> None:
    """Make DeepSpeed use the process group that exists; call before GRPOConfig is built.

    transformers initialises only torch.distributed with use_cpu, and zero.Init would then take the world for one rank.
    The shared-memory op is switched off on CPUs: it is compiled at first use (a minute, and a compiler in the image),
    and serves one host only.
    """
    import deepspeed
    import deepspeed.ops

    if plan.execution.accelerator == "CPU":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if plan.execution.accelerator == "CPU" else "nccl")


def leave_together() -> None:
    """A last barrier: rank 0 holds the store and must not go first."""
    if dist.is_initialized():
        dist.barrier()
