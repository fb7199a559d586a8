"""Weights on their way from rank 0 to an engine's workers: they arrive, and every failure names
both sides in time.

Over gloo, between threads of this process that meet as pods do. NCCL needs several GPUs and is not
seen here.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from grpo_trainer.engine_pod import transfer
from grpo_trainer.engine_pod.transfer import (
    POLL_SECONDS,
    Meeting,
    TransferFailed,
    WeightGroup,
    form_group,
    join_group,
    open_store,
)
from grpo_trainer.gang.interfaces import GLOO_INTERFACE, NCCL_INTERFACE
from harness.controlplane import free_port
from tests.stepped_clock import SteppedClock

pytestmark = pytest.mark.realtime

TENSORS = [torch.arange(5.0), torch.ones(3, 4, dtype=torch.bfloat16), torch.zeros(())]


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    port = free_port()
    store = open_store("127.0.0.1", port)
    yield Meeting(
        "127.0.0.1", port, "first", "engine 0 at host-0", workers=1, seconds=60.0, gpu=False
    )
    del store


def met(meeting: Meeting) -> list[WeightGroup]:
    """All sides of a meeting, rank 0 first."""
    with ThreadPoolExecutor(meeting.workers + 1) as pool:
        workers = [pool.submit(join_group, meeting, rank) for rank in range(1, meeting.workers + 1)]
        main = pool.submit(form_group, meeting)
        return [one.result() for one in (main, *workers)]


def test_every_worker_receives_every_tensor(meeting: Meeting) -> None:
    groups = met(replace(meeting, name="both", workers=2))
    for tensor in TENSORS:
        received = [tensor.clone(), torch.full_like(tensor, 9), torch.full_like(tensor, 9)]
        with ThreadPoolExecutor(3) as pool:
            done = [
                pool.submit(group.broadcast, buffer, "weight")
                for group, buffer in zip(groups, received, strict=True)
            ]
            for one in done:
                one.result()
        assert all(torch.equal(buffer, tensor) for buffer in received)
    for group in groups:
        group.leave()


class Waiting:
    """A broadcast that nobody takes: gloo raises once its time is up, NCCL only says that it goes
    on."""

    def wait(self) -> None:
        """As gloo ends."""
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        """As NCCL says."""
        return False


class DeafGroup:
    """A process group whose other side takes nothing."""

    def broadcast(self, _: list[torch.Tensor], options: Any) -> Waiting:
        """Keeps what it was given."""
        self.seconds = options.timeout.total_seconds()
        return Waiting()

    def abort(self) -> None:
        """Nothing goes on."""


@pytest.mark.parametrize("gpu", [False, True])
def test_a_worker_that_takes_nothing_is_named_with_the_tensor_and_the_time(gpu: bool) -> None:
    clock, deaf = SteppedClock(), DeafGroup()
    meeting = Meeting(
        "trainer-0", 29600, "silent", "engine 0 at host-0", workers=1, seconds=600.0, gpu=gpu
    )
    with pytest.raises(TransferFailed) as failed:
        WeightGroup(meeting, 0, deaf, clock).broadcast(
            torch.zeros(4), "lm_head.weight of version 3", 90.0
        )
    assert str(failed.value).startswith(
        "lm_head.weight of version 3 did not get from rank 0 at trainer-0 to engine 0 at host-0: "
        "gave up after "
        f"{clock.now():.1f} s of at most 90.0 s: "
    )
    assert deaf.seconds == 90.0
    assert clock.now() == pytest.approx(90.0 if gpu else 0.0, abs=0.01), (
        "NCCL is asked until the time is up"
    )


def test_a_group_that_was_left_sends_nothing() -> None:
    group = WeightGroup(
        Meeting("trainer-0", 1, "left", "engine 0", workers=1, seconds=9.0, gpu=False),
        0,
        DeafGroup(),
    )
    group.leave()
    group.leave()
    with pytest.raises(TransferFailed, match="this side has left the group"):
        group.broadcast(torch.zeros(4), "norm.weight")


def test_a_group_whose_end_fails_is_left_all_the_same() -> None:
    """NCCL's abort raises what is wrong with the GPU, or that its time is up."""

    class Stuck(DeafGroup):
        def abort(self) -> None:
            raise RuntimeError("Future for ProcessGroup abort timed out after 600000 ms")

    meeting = Meeting("trainer-0", 1, "stuck", "engine 0", workers=1, seconds=9.0, gpu=True)
    group = WeightGroup(meeting, 0, Stuck())
    group.leave()
    with pytest.raises(TransferFailed, match="this side has left the group"):
        group.broadcast(torch.zeros(4), "norm.weight")


class NcclGroup:
    """What becomes of NCCL's group, which reads the variable while it is made."""

    Options = SimpleNamespace
    blocking: ClassVar[list[str | None]] = []
    together = threading.Barrier(2)
    first_is_made = threading.Event()

    def __init__(self, *_: Any) -> None:
        """Wait a moment for another one that is made meanwhile, and for the end of that."""
        is_first = not self.blocking
        self.blocking.append(os.environ.get(transfer.BLOCKING_WAIT_ENV))
        with suppress(threading.BrokenBarrierError):
            self.together.wait(0.05)
            assert is_first or self.first_is_made.wait(60.0)


def test_groups_of_several_engines_leave_the_variable_as_it_was_and_take_the_route_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, meeting: Meeting
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup)
    store: Any = None
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(transfer._nccl, store, 0, 2, timedelta(1), meeting) for _ in range(2)]
        wait(made, return_when=FIRST_COMPLETED)
        NcclGroup.first_is_made.set()
        for one in made:
            one.result()
    assert NcclGroup.blocking == ["1", "1"]
    assert os.environ == {NCCL_INTERFACE: "=lo", GLOO_INTERFACE: "lo"}


@pytest.mark.slow  # gloo's own clock
def test_gloo_gives_up_a_worker_that_takes_nothing(meeting: Meeting) -> None:
    main, worker = met(replace(meeting, name="silent"))
    large = torch.zeros(20_000_000)  # more than the sockets' buffers take
    with pytest.raises(TransferFailed, match=r"lm_head.weight did not get .* s of at most 10.0 s"):
        main.broadcast(large, "lm_head.weight", 10.0)
    worker.leave()


def test_a_side_that_leaves_ends_the_others_wait(meeting: Meeting) -> None:
    main, worker = met(replace(meeting, name="left", seconds=600.0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.broadcast, torch.zeros(4), "norm.weight")
        main.leave()
        with pytest.raises(
            TransferFailed, match=r"norm.weight did not get .* to engine 0 at host-0"
        ):
            waiting.result(60.0)  # of the 600 s that gloo would wait


def test_a_group_that_broke_leaves_another_engines_alone(meeting: Meeting) -> None:
    broken, sound = met(replace(meeting, name="broken")), met(replace(meeting, name="sound"))
    for group in broken:
        group.leave()
    received = torch.zeros(5)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sound[0].broadcast, torch.arange(5.0), "weight")
        sound[1].broadcast(received, "weight")
        sending.result()
    assert torch.equal(received, torch.arange(5.0))


@pytest.mark.parametrize(
    ("abandoned", "words", "seconds"),
    [
        (lambda: True, "did not come to the transfer", 0.0),
        (
            lambda: False,
            "did not meet for a transfer of weights within 60 s: not all of its workers came",
            60.0,
        ),
    ],
)
def test_an_engine_that_does_not_come_is_not_waited_for_longer(
    meeting: Meeting, abandoned: Any, words: str, seconds: float
) -> None:
    clock = SteppedClock()
    with pytest.raises(TransferFailed, match=words):
        form_group(replace(meeting, name="nobody", seconds=60.0), abandoned, clock)
    assert clock.now() == pytest.approx(seconds, abs=2 * POLL_SECONDS)


def unreachable(*_: Any, timeout: timedelta, **__: Any) -> None:
    """What torch raises where nobody listens."""
    raise RuntimeError(f"timed out after {timeout.total_seconds():.0f} s")


def test_an_engine_that_can_not_reach_rank_0_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "TCPStore", unreachable)
    nowhere = Meeting(
        "trainer-0", 29600, "x", "engine 1 at host-1", workers=1, seconds=600.0, gpu=False
    )
    with pytest.raises(
        TransferFailed,
        match=(
            r"rank 0 at trainer-0:29600 and engine 1 at host-1 did not meet .* timed out after "
            r"30 s"
        ),
    ):
        join_group(nowhere, 1)


@pytest.mark.slow  # the store's own clock
def test_nobody_who_listens_is_looked_for_as_long_as_the_meeting_says() -> None:
    nowhere = Meeting(
        "127.0.0.1", free_port(), "x", "engine 1 at host-1", workers=1, seconds=10.0, gpu=False
    )
    with pytest.raises(
        TransferFailed,
        match=rf"rank 0 at 127.0.0.1:{nowhere.port} and engine 1 at host-1 did not meet",
    ):
        join_group(nowhere, 1)
