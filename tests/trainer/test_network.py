"""The network between the pods, on hosts of their own: what works is measured, and what doesn't is
named in seconds.

Each host is a network namespace with two interfaces, of which the first by name leads nowhere.
"""

import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stubs

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.gang import rendezvous
from grpo_trainer.gang.interfaces import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    choose_interface,
    interfaces,
    interfaces_message,
    is_in_interface_list,
)
from grpo_trainer.gang.nccl_transport import RDMACheck
from grpo_trainer.gang.placement import Placement
from grpo_trainer.gang.rendezvous import bus_bandwidth
from grpo_trainer.runtime.errors import RendezvousTimeout, Transient
from tests.generated import cases
from tests.support.ranks import runs
from tests.support.ranks.meeting import meet
from tests.support.ranks.wires import STRAY, Wires

pytestmark = pytest.mark.realtime

HOSTS = 4
PLAN = runs.plan(Path("/models/demo"), execution={"nodes": HOSTS, "processesPerNode": 1})


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    """Four hosts."""
    with Wires(HOSTS) as network:
        yield network


@pytest.fixture
def sound(wires: Wires) -> Iterator[Wires]:
    """The same, mended afterwards."""
    yield wires
    wires.mend()


def plan(port: int = 29500) -> TrainingPlan:
    """Of four ranks that meet on the first host."""
    meeting_place = PLAN.rendezvous.model_copy(update={"address": Wires.address(0), "port": port})
    return PLAN.model_copy(update={"rendezvous": meeting_place})


def said_by_all(ranks: list[dict[str, Any]]) -> str:
    """The one sentence that all ranks end with, as RendezvousTimeout."""
    assert {rank.get("result") for rank in ranks} == {"RendezvousTimeout"}, ranks
    assert len({rank["message"] for rank in ranks}) == 1, ranks
    return str(ranks[0]["message"])


def test_ranks_talk_through_the_interface_that_leads_to_rank_0_and_measure_it(
    sound: Wires, tmp_path: Path
) -> None:
    ranks = meet(sound, HOSTS, plan(), tmp_path / "ranks")
    assert [rank.get("interface") for rank in ranks] == ["eth0"] * HOSTS
    assert all(rank["bandwidth"] > 1e5 for rank in ranks)


def test_the_pair_that_can_not_talk_is_named(sound: Wires, tmp_path: Path) -> None:
    sound.lose(1, sender=3)
    sound.lose(3, sender=1)
    message = said_by_all(meet(sound, HOSTS, plan(), tmp_path / "ranks"))
    one, other = (
        "rank 1 (pod demo-1-1, 10.77.0.11 on eth0)",
        "rank 3 (pod demo-1-3, 10.77.0.13 on eth0)",
    )
    assert one in message
    assert other in message
    assert "rank 0" not in message
    assert "rank 2" not in message
    assert "NetworkPolicy" in message


@pytest.mark.slow
def test_a_path_that_loses_large_packets_is_named(sound: Wires, tmp_path: Path) -> None:
    sound.lose(2, sender=1, larger_than=1000)
    message = said_by_all(meet(sound, HOSTS, plan(), tmp_path / "ranks"))
    assert "rank 1 (pod demo-1-1" in message
    assert "rank 2 (pod demo-1-2" in message
    assert "a connection came about" in message
    assert "MTU of eth0" in message


@pytest.mark.slow
def test_an_interface_that_leads_nowhere_is_named(sound: Wires, tmp_path: Path) -> None:
    wrong = {GLOO_INTERFACE: STRAY}
    message = said_by_all(meet(sound, HOSTS, plan(), tmp_path / "ranks", environment=wrong))
    assert f"on {STRAY}) can't talk to" in message
    assert "no connection to port" in message


@pytest.mark.slow
def test_an_all_reduce_that_is_stuck_ends_by_its_deadline_with_what_it_was_told(
    sound: Wires, tmp_path: Path
) -> None:
    for sender in (0, 1, 3):
        sound.lose(2, sender, larger_than=1000)
    ranks = meet(sound, HOSTS, plan(), tmp_path / "ranks", unchecked=True)
    stuck = [rank["message"] for rank in ranks if rank.get("result") == "RendezvousTimeout"]
    assert stuck
    assert all(f"{GLOO_INTERFACE}=eth0" in message for message in stuck)


@pytest.mark.slow
def test_without_the_check_s_interface_the_group_would_not_come_about(
    sound: Wires, tmp_path: Path
) -> None:
    given = {GLOO_INTERFACE: STRAY}
    ranks = meet(sound, HOSTS, plan(), tmp_path / "ranks", unchecked=True, environment=given)
    assert {rank.get("result") for rank in ranks} == {"RendezvousTimeout"}, ranks
    assert all(f"{GLOO_INTERFACE}={STRAY}" in rank["message"] for rank in ranks)


def test_the_user_s_choice_stands_and_one_that_is_not_there_is_named() -> None:
    loopback = interfaces(socket.AF_INET)["lo"]
    environment = {GLOO_INTERFACE: "lo"}
    assert choose_interface("10.1.2.3", environment, gpu=False) == (loopback, "lo")
    assert environment == {GLOO_INTERFACE: "lo", NCCL_INTERFACE: "=lo"}
    with pytest.raises(
        RendezvousTimeout, match=r"NCCL_SOCKET_IFNAME is 'ib0', but this pod's interfaces are .*lo"
    ):
        choose_interface(loopback, {NCCL_INTERFACE: "ib0"}, gpu=True)
    unknown: dict[str, str] = {}
    assert choose_interface("192.0.2.1", unknown, gpu=True) == ("192.0.2.1", "")
    assert (unknown, interfaces_message(unknown)) == ({}, "one pod")


@pytest.mark.parametrize(
    ("wish", "name", "taken"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0,ib0", "ib0", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "lo", False),
        ("^=lo", "lo0", True),
    ],
)
def test_interfaces_are_named_as_nccl_names_them(wish: str, name: str, taken: bool) -> None:
    assert is_in_interface_list(wish, name) is taken


@settings(max_examples=cases(60))
@given(st.text(max_size=40), st.text(max_size=40), st.booleans())
def test_any_wish_and_any_address_give_an_interface_or_a_sentence(
    wish: str, routed: str, gpu: bool
) -> None:
    variable = NCCL_INTERFACE if gpu else GLOO_INTERFACE
    environment = {variable: wish} if wish else {}
    known = [
        name
        for family in (socket.AF_INET, socket.AF_INET6)
        for name in interfaces(family)
        if is_in_interface_list(wish, name)
    ]
    if wish and not known:
        with pytest.raises(RendezvousTimeout, match="this pod's interfaces are"):
            choose_interface(routed, environment, gpu=gpu)
    elif not wish:
        address, name = choose_interface(routed, environment, gpu=gpu)
        assert name or address == routed


def test_wrong_sums_are_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.mul_(2.0))
    assert bus_bandwidth(torch.device("cpu")) > 0

    def damaged(values: torch.Tensor) -> None:
        values.mul_(2.0)[7] = 3.0

    monkeypatch.setattr(dist, "all_reduce", damaged)
    with pytest.raises(
        Transient, match=r"1 of \d+ sums of an all-reduce over 2 ranks are wrong on rank 1"
    ):
        bus_bandwidth(torch.device("cpu"))


@pytest.mark.parametrize(
    ("network", "problem"), [("Socket", "rank 0: NCCL sends by TCP"), ("IB", "")]
)
def test_a_gang_on_gpus_that_asks_for_rdma_finds_out_what_nccl_took(
    network: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is here: NCCL's part, a log that it writes while it connects, is played."""
    (tmp_path / "tmp").mkdir()

    def connect(device: torch.device) -> float:
        assert device == torch.device("cuda", 0)
        log_file = Path(os.environ["NCCL_DEBUG_FILE"])
        log_file.write_text(f"run-1-0:1:2 [0] NCCL INFO Using network {network}\n")
        return 2e9

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(rendezvous, "bus_bandwidth", connect)
    monkeypatch.setattr(rendezvous, "RDMACheck", partial(RDMACheck, root=tmp_path))
    execution = PLAN.execution.model_copy(update={"accelerator": "GPU", "gpus": HOSTS})
    first = Placement(0, 0, 1, HOSTS)
    with mock.patch.dict(os.environ):
        trial = rendezvous._form_group(execution, first, HashStore(), ["rdma/hca"])
    assert trial is not None
    assert trial.bytes_per_second == 2e9
    assert trial.rdma_problem.startswith(problem)
    assert bool(trial.rdma_problem) is bool(problem)
