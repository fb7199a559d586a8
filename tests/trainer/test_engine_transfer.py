"""Weights on their way from rank 0 to an engine's workers: they arrive, and every failure names both sides in time.

Over gloo, between threads of this process that meet as pods do. NCCL needs several GPUs and is not seen here.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_trainer.generation.transfer import Meeting, TransferFailed, WeightGroup, invite, join, open_store
from harness.ranks.pods import free_port

TENSORS = [torch.arange(5.0), torch.ones(3, 4, dtype=torch.bfloat16), torch.zeros(())]


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    port = free_port()
    store = open_store("127.0.0.1", port)
    yield Meeting("127.0.0.1", port, "first", "engine 0 at host-0", workers=1, seconds=20.0, gpu=False)
    del store


def met(meeting: Meeting) -> list[WeightGroup]:
    """All sides of a meeting, rank 0 first."""
    with ThreadPoolExecutor(meeting.workers + 1) as pool:
        workers = [pool.submit(join, meeting, rank) for rank in range(1, meeting.workers + 1)]
        main = pool.submit(invite, meeting)
        return [one.result() for one in (main, *workers)]


def test_every_worker_receives_every_tensor(meeting: Meeting) -> None:
    groups = met(replace(meeting, name="both", workers=2))
    for tensor in TENSORS:
        received = [tensor.clone(), torch.full_like(tensor, 9), torch.full_like(tensor, 9)]
        with ThreadPoolExecutor(3) as pool:
            done = [
                pool.submit(group.broadcast, buffer, "weight") for group, buffer in zip(groups, received, strict=True)
            ]
            for one in done:
                one.result()
        assert all(torch.equal(buffer, tensor) for buffer in received)
    for group in groups:
        group.leave()


def test_a_worker_that_takes_nothing_is_named_with_the_tensor_and_the_time(meeting: Meeting) -> None:
    main, worker = met(replace(meeting, name="silent"))
    large = torch.zeros(20_000_000)  # more than the sockets' buffers take
    with pytest.raises(TransferFailed) as failed:
        main.broadcast(large, "lm_head.weight of version 3", 0.2)
    assert str(failed.value).startswith(
        "lm_head.weight of version 3 did not get from rank 0 at 127.0.0.1 to engine 0 at host-0: gave up after"
    )
    worker.leave()


def test_a_side_that_leaves_ends_the_others_wait(meeting: Meeting) -> None:
    main, worker = met(replace(meeting, name="left"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.broadcast, torch.zeros(4), "norm.weight")
        main.leave()
        with pytest.raises(TransferFailed, match=r"norm.weight did not get .* to engine 0 at host-0"):
            waiting.result()


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
    ("abandoned", "words"),
    [(lambda: True, "did not come to the transfer"), (lambda: False, "did not meet for a transfer of weights within")],
)
def test_an_engine_that_does_not_come_is_not_waited_for_longer(meeting: Meeting, abandoned: Any, words: str) -> None:
    with pytest.raises(TransferFailed, match=words):
        invite(replace(meeting, name="nobody", seconds=0.2), abandoned)


def test_an_engine_that_can_not_reach_rank_0_says_where_it_looked() -> None:
    nowhere = Meeting("127.0.0.1", free_port(), "x", "engine 1 at host-1", workers=1, seconds=0.2, gpu=False)
    with pytest.raises(
        TransferFailed, match=rf"rank 0 at 127.0.0.1:{nowhere.port} and engine 1 at host-1 did not meet"
    ):
        join(nowhere, 1)
