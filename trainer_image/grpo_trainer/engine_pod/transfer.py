"""Carries weights from rank 0 to the workers of one engine: gloo on CPUs, NCCL on GPUs, behind one
interface.

Rank 0 of a group is the trainer's rank 0, ranks 1 to N are the workers of one engine. Every engine
has a group of its own, so that one that dies breaks no other's. A group that lost a rank is of no
use. So every incarnation of an engine, and every try after a failure, has a new one. All meet at
one store of rank 0. torch's default process group has no part in it.

No machine with several GPUs has run the NCCL half yet. Its calls are built as torch documents them.
What two CPUs show of gloo (time-outs, lost peers) is not shown of NCCL.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # no stubs

from grpo_api.text.clock import Clock

from ..gang.interfaces import choose_interface, own_address
from ..runtime.clock import SYSTEM_CLOCK

log = logging.getLogger(__name__)

POLL_SECONDS = 0.01
NCCL_POLL_SECONDS = 0.0005
CONNECT_SECONDS = 30.0
"""Patience of a connection to the store, which listens before anybody hears of it."""
BLOCKING_WAIT_ENV = "TORCH_NCCL_BLOCKING_WAIT"
"""With it a group of NCCL has no watchdog thread, which would end the whole process over one lost
engine."""


class TransferFailed(Exception):
    """A weight group didn't come about, or a tensor didn't arrive; the message names both sides."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place and the terms under which an engine's workers meet rank 0."""

    address: str
    """Rank 0's name or address."""
    port: int
    """Of its store."""
    name: str
    """Of this group, used once: it contains the engine's incarnation."""
    engine: str
    """The engine, for messages."""
    workers: int
    """Processes of the engine."""
    seconds: float
    """Longest time that either side waits for the other, at the meeting and for each tensor."""
    gpu: bool
    """Whether NCCL carries the tensors, else gloo."""


class WeightGroup:
    """One side of a weight group whose ranks have all joined."""

    def __init__(
        self, meeting: Meeting, rank: int, group: Any, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.meeting = meeting
        self.rank = rank
        self._group = group
        self._clock = clock

    def broadcast(self, tensor: torch.Tensor, what: str, seconds: float | None = None) -> None:
        """Rank 0's tensor for all ranks; the others' is written. Contiguous, on this rank's device,
        of the same shape and dtype on all. `seconds`: longest time; the meeting's by default.

        Raises:
            TransferFailed: it was not taken in that time, or a rank is gone. The group is of no use
                any more.
        """
        limit = self.meeting.seconds if seconds is None else seconds
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(limit, 0.001))
        group, begun = self._group, self._clock.now()
        if group is None:
            raise TransferFailed(
                f"{what} was not sent to {self.meeting.engine}: this side has left the group"
            )
        try:
            work = group.broadcast([tensor], options)
            if self.meeting.gpu:
                _await_nccl(work, begun + limit, self._clock)
            else:
                work.wait()
        except RuntimeError as error:
            raise TransferFailed(
                f"{what} did not get from rank 0 at {self.meeting.address} to "
                f"{self.meeting.engine}: gave up after "
                f"{self._clock.now() - begun:.1f} s of at most {limit:.1f} s: {error}"
            ) from error

    def leave(self) -> None:
        """Close the connections, so that the other side, should it wait, waits no longer."""
        group, self._group = self._group, None
        if group is not None:
            # NCCL ends what waits on this device. Gloo's abort closes nothing (torch 2.13): its
            # connections close when the last reference to the group is gone, which was the other
            # side's whole time-out later.
            try:
                group.abort()
            except RuntimeError as error:
                log.warning(f"{self.meeting.engine}: its weight group was left, not ended: {error}")


def _await_nccl(work: Any, deadline: float, clock: Clock) -> None:
    """Block until the device has it; NCCL's own wait would only put the wait into the stream."""
    while not work.is_completed():
        if clock.now() > deadline:
            raise RuntimeError("the device is still waiting for the other side")
        clock.sleep(NCCL_POLL_SECONDS)
    if error := work.exception():
        raise RuntimeError(str(error))


def open_store(address: str, port: int) -> Store:
    """Rank 0's store, at which all groups meet.

    Raises:
        RuntimeError: the port is taken.
    """
    # Without a number of clients: engines come later, and some never come.
    patience = timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(address, port, None, True, timeout=patience, wait_for_workers=False)


def form_group(
    meeting: Meeting, is_abandoned: Callable[[], bool] = lambda: False, clock: Clock = SYSTEM_CLOCK
) -> WeightGroup:
    """Form the process group of a meeting on rank 0; return it once all of the engine's workers
    have joined. `is_abandoned` is polled meanwhile: True ends the wait, since the engine has
    answered that it won't come.

    Raises:
        TransferFailed: the workers did not come in time, or the wait was abandoned.
    """
    with _transfer_errors(meeting):
        store = _connect_store(meeting)
        _await_workers(store, meeting, is_abandoned, clock)
        return _create_group(store, meeting, 0, clock)


def join_group(meeting: Meeting, rank: int) -> WeightGroup:
    """A worker's side of a meeting, `rank` from 1.

    Raises:
        TransferFailed: rank 0 can't be reached, or the group doesn't come about.
    """
    with _transfer_errors(meeting):
        store = _connect_store(meeting)
        store.set(f"here/{rank}", "1")
        return _create_group(store, meeting, rank, SYSTEM_CLOCK)


@contextmanager
def _transfer_errors(meeting: Meeting) -> Iterator[None]:
    """What torch and the sockets raise, with the names of both sides."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise TransferFailed(
            f"rank 0 at {meeting.address}:{meeting.port} and {meeting.engine} did not meet for a "
            f"transfer of weights within {meeting.seconds:.0f} s: {error}. Does a NetworkPolicy "
            "allow that port between the job's pods?"
        ) from error


def _connect_store(meeting: Meeting) -> Store:
    """A separate connection to the store: on a shared one a thread that waits blocks all others."""
    patience = timedelta(seconds=min(CONNECT_SECONDS, meeting.seconds))
    store = TCPStore(
        meeting.address, meeting.port, None, False, timeout=patience, wait_for_workers=False
    )
    store.set_timeout(timedelta(seconds=meeting.seconds))
    # With a prefix, so that keys of an earlier group are not taken for keys of this one.
    return PrefixStore(meeting.name, store)


def _await_workers(
    store: Store, meeting: Meeting, abandoned: Callable[[], bool], clock: Clock
) -> None:
    deadline = clock.now() + meeting.seconds
    keys = [f"here/{rank}" for rank in range(1, meeting.workers + 1)]
    # Polled, where store.wait() would block: the engine may answer meanwhile that it won't come.
    while not store.check(keys):
        if abandoned():
            raise TransferFailed(f"{meeting.engine} did not come to the transfer of weights")
        if clock.now() > deadline:
            raise RuntimeError("not all of its workers came")
        clock.sleep(POLL_SECONDS)


def _create_group(store: Store, meeting: Meeting, rank: int, clock: Clock) -> WeightGroup:
    size, limit = meeting.workers + 1, timedelta(seconds=meeting.seconds)
    form = _nccl if meeting.gpu else _gloo
    group = form(PrefixStore("group", store), rank, size, limit, meeting)
    return WeightGroup(meeting, rank, group, clock)


def _gloo(store: Store, rank: int, size: int, limit: timedelta, meeting: Meeting) -> Any:
    """On the interface that leads to rank 0; gloo alone would take what the host's name resolves
    to."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = limit
    address = own_address(meeting.address, meeting.port, CONNECT_SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


_ENVIRONMENT = threading.Lock()
"""Rank 0 forms the groups of several engines at a time, each in a thread."""


def _nccl(store: Store, rank: int, size: int, limit: timedelta, meeting: Meeting) -> Any:
    """On the same interface, unless NCCL has chosen another one in this process before."""
    address = own_address(meeting.address, meeting.port, CONNECT_SECONDS)
    # NCCL's group reads BLOCKING_WAIT_ENV when it is made. The training's own groups keep what the
    # user set.
    with _ENVIRONMENT:
        choose_interface(address, os.environ, gpu=True)
        before = os.environ.get(BLOCKING_WAIT_ENV)
        os.environ[BLOCKING_WAIT_ENV] = "1"
        try:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT_ENV]
            else:
                os.environ[BLOCKING_WAIT_ENV] = before
