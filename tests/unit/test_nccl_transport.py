"""Whether a gang's data goes by RDMA: from logs in the form of NCCL 2.29.7, whose lines its source
prints, and from counters in the form of sysfs. No network card is here.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import MAX_PROBLEM
from grpo_trainer.gang.nccl_transport import (
    Evidence,
    RDMACheck,
    TransportLog,
    is_memlock_failure,
    parse_nccl_log,
    rdma_problem,
    shared_problem,
)
from tests.generated import cases

MIB = 2**20
BEGIN = """\
ENV/Plugin: Could not find: libnccl-env.so
Bootstrap: Using eth0:10.42.3.17<0>
cudaDriverVersion 13000
NCCL version 2.29.7+cuda13.2
"""
NO_PLUGIN = "NET/Plugin: Could not find: libnccl-net.so\n"
SOCKET = """\
Failed to initialize NET plugin IB
NET/Socket : Using [0]eth0:10.42.3.17<0>
Initialized NET plugin Socket
Assigned NET plugin Socket to comm
Using network Socket
Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0
"""
VERBS = """\
NET/IB : Using [0]mlx5_0:1/{link} [1]mlx5_3:1/{link} [RO]; OOB eth0:10.42.3.17<0>
Initialized NET plugin IB
Assigned NET plugin IB to comm
Using network IB
DMA-BUF is available on GPU device 0
Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""
EFA = """\
NET/Plugin: Loaded net plugin Libfabric (v11)
Successfully loaded external network plugin libnccl-net.so
NET/OFI Initializing aws-ofi-nccl 1.16.3
NET/OFI Selected provider is {provider}, fabric is efa (found 16 nics)
NET/OFI Creating one domain per process
Using network Libfabric
"""
GIB = """\
NET/Plugin: Loaded net plugin gIB (v10)
NET/gIB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.8.2.9<0>
Initialized NET plugin gIB
Using network gIB
"""
NO_LIBRARY = "Failed to open libibverbs.so[.1]\n"
LATER_NO_LIBRARY = "Count not open libibverbs.so\nCount not open libibverbs.so.1\n"
NO_DEVICE = "NET/IB : No device found.\n"


def log(*parts: str) -> str:
    """A log with these lines: who writes stands before each, as NCCL puts it there."""
    lines = "".join(parts).splitlines()
    return "".join(f"run-1-0:311:402 [0] NCCL INFO {line}\n" for line in lines)


CLOSED_DEVICE = (
    "\n[2026-11-21 12:00:00] run-1-0:311:402 [0] transport/net_ib/init.cc:331 (ncclIbInitDevices) "
    "NCCL WARN NET/IB : Unable to open device mlx5_0\n"
)
LOGS = {
    "InfiniBand": (log(BEGIN, NO_PLUGIN, VERBS.format(link="IB")), TransportLog(network="IB")),
    "RoCE": (log(BEGIN, NO_PLUGIN, VERBS.format(link="RoCE")), TransportLog(network="IB")),
    "an image without libibverbs": (
        log(BEGIN, NO_PLUGIN, NO_LIBRARY, SOCKET),
        TransportLog(network="Socket", lacks_library=True),
    ),
    "the same with a later NCCL": (
        log(BEGIN, NO_PLUGIN, LATER_NO_LIBRARY, SOCKET),
        TransportLog(network="Socket", lacks_library=True),
    ),
    "a pod without a device": (
        log(BEGIN, NO_PLUGIN, NO_DEVICE, SOCKET),
        TransportLog(network="Socket"),
    ),
    "a device that can't be opened": (
        log(BEGIN, NO_PLUGIN) + CLOSED_DEVICE + log(NO_DEVICE, SOCKET),
        TransportLog(network="Socket", closed_device="mlx5_0"),
    ),
    "EFA": (
        log(BEGIN, EFA.format(provider="efa")),
        TransportLog(network="Libfabric", provider="efa"),
    ),
    "libfabric over TCP": (
        log(BEGIN, EFA.format(provider="tcp;ofi_rxm")),
        TransportLog(network="Libfabric", provider="tcp"),
    ),
    "Google's gIB": (log(BEGIN, GIB), TransportLog(network="gIB")),
    "an earlier name of EFA's plugin": (
        log(BEGIN, "NET/OFI Selected Provider is efa (found 4 nics)\nUsing network AWS Libfabric"),
        TransportLog(network="AWS Libfabric", provider="efa"),
    ),
    "a log that breaks off": (log(BEGIN, NO_PLUGIN), TransportLog()),
    "a level without such lines": ("NCCL version 2.29.7+cuda13.2\n", TransportLog()),
    "nothing": ("", TransportLog()),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_nccl_says_which_network_it_took(name: str) -> None:
    text, read = LOGS[name]
    assert parse_nccl_log(text) == read


def test_the_first_communicator_counts() -> None:
    later = log(BEGIN, VERBS.format(link="IB")) + log("Using network Socket")
    assert parse_nccl_log(later).network == "IB"


def test_only_an_error_of_verbs_is_a_lack_of_locked_memory() -> None:
    assert is_memlock_failure("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory")
    assert not is_memlock_failure("std::bad_alloc: Cannot allocate memory")
    assert not is_memlock_failure("Call to ibv_open_device failed")


@settings(max_examples=cases(300, gate=50))
@given(
    st.lists(
        st.text(max_size=80) | st.sampled_from([text for text, _ in LOGS.values()]), max_size=6
    ),
    st.lists(st.text(max_size=317), max_size=32),
    st.none() | st.integers(0, 2**63),
    st.booleans(),
)
def test_any_log_gives_a_short_answer_of_one_line(
    parts: list[str], requested: list[str], sent: int | None, fast: bool
) -> None:
    read = parse_nccl_log("".join(parts))
    assert len(read.network) <= 48
    assert read.network.isprintable()
    evidence = Evidence(
        log=read, sent_bytes=sent, least_bytes=128 * MIB, is_as_fast_as_planned=fast
    )
    problem = rdma_problem(requested, evidence)
    assert bool(problem) or not read.is_tcp
    assert len(shared_problem(["", problem])) <= MAX_PROBLEM


def found(name: str, **more: Any) -> Evidence:
    """What a rank finds beside one of the logs; its node's ports sent what they must."""
    return replace(
        Evidence(log=LOGS[name][1], sent_bytes=300 * MIB, least_bytes=128 * MIB),
        **more,
    )


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (found("an image without libibverbs"), "libibverbs1, ibverbs-providers"),
        (found("an image without libibverbs", is_disabled=True), "NCCL_IB_DISABLE is set"),
        (found("a pod without a device", has_devices=False), "no /dev/infiniband/uverbs"),
        (found("a device that can't be opened"), "can't open mlx5_0"),
        (found("a pod without a device", wanted_cards="mlx5_9"), "'mlx5_9', must name one"),
        (found("libfabric over TCP"), "set FI_PROVIDER to efa"),
        (
            found("InfiniBand", sent_bytes=3 * MIB),
            "grew by 3 MB during an all-reduce that sends 134",
        ),
        (found("nothing", sent_bytes=0), "NCCL's log is not known"),
    ],
)
def test_a_way_that_is_no_rdma_is_told_with_its_cause(evidence: Evidence, cause: str) -> None:
    assert cause in rdma_problem(["rdma/hca"], evidence)


def test_efa_without_its_plugin_is_told_as_such() -> None:
    problem = rdma_problem(["vpc.amazonaws.com/efa"], found("a pod without a device"))
    assert "requests vpc.amazonaws.com/efa: EFA needs the plugin aws-ofi-nccl" in problem


@pytest.mark.parametrize(
    "evidence",
    [
        found("InfiniBand"),
        found("RoCE"),
        found("InfiniBand", sent_bytes=None),
        found("InfiniBand", sent_bytes=0, is_as_fast_as_planned=True),
        found("EFA", sent_bytes=0),
        found("Google's gIB", sent_bytes=0),
        found("a log that breaks off", sent_bytes=None),
    ],
)
def test_rdma_and_what_nobody_can_tell_are_no_problem(evidence: Evidence) -> None:
    assert rdma_problem(["rdma/hca"], evidence) == ""


def test_the_first_rank_with_a_problem_speaks_for_all() -> None:
    assert shared_problem(["", ""]) == ""
    assert shared_problem(["", "no card", ""]) == "rank 1: no card"
    assert shared_problem(["", "no card", "", "no library"]) == "rank 1 and 1 more: no card"


class Node:
    """A node's files in a folder."""

    def __init__(self, root: Path, ports: dict[str, str]) -> None:
        self.root = root
        (root / "tmp").mkdir()
        (root / "dev" / "infiniband").mkdir(parents=True)
        (root / "dev" / "infiniband" / "uverbs0").touch()
        for device in ports:
            (root / f"sys/class/infiniband/{device}/ports/1/counters").mkdir(parents=True)
        self.count(ports)

    def count(self, ports: dict[str, str]) -> None:
        """Set port_xmit_data of these devices."""
        for device, text in ports.items():
            counters = self.root / f"sys/class/infiniband/{device}/ports/1/counters"
            (counters / "port_xmit_data").write_text(text)

    def check(self, environment: dict[str, str]) -> RDMACheck:
        """What watches rank 3 there."""
        return RDMACheck(["rdma/hca"], 3, environment, self.root)


def test_a_check_has_nccl_write_a_log_and_reads_it_with_the_counters(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mlx5_0": "1000\n", "mlx5_1": "unreadable\n"})
    environment: dict[str, str] = {}
    check = node.check(environment)
    assert environment == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(tmp_path / "tmp" / "nccl-rank-3.log"),
    }
    check.begin()
    Path(environment["NCCL_DEBUG_FILE"]).write_text(LOGS["RoCE"][0])
    node.count({"mlx5_0": str(1000 + 32 * MIB)})
    assert check.find_problem(128 * MIB, is_as_fast_as_planned=False) == "", "words of four bytes"
    assert "port_xmit_data" in check.find_problem(128 * MIB + 1, is_as_fast_as_planned=False)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"])
def test_what_a_job_sets_of_nccl_s_log_stays(name: str, tmp_path: Path) -> None:
    environment = {name: "WARN"}
    check = Node(tmp_path, {"mlx5_0": "1"}).check(environment)
    assert environment == {name: "WARN"}
    (tmp_path / "tmp" / "nccl-rank-3.log").write_text(LOGS["a pod without a device"][0])
    check.begin()
    assert "log is not known" in check.find_problem(1, is_as_fast_as_planned=False), "not ours"


@pytest.mark.parametrize("text", ["", "-5", "1e9", "½", "9" * 40, "10"])
def test_a_counter_that_is_no_count_or_goes_back_tells_nothing(text: str, tmp_path: Path) -> None:
    node = Node(tmp_path, {"mlx5_0": "11"})
    check = node.check({})
    check.begin()
    node.count({"mlx5_0": text})
    assert check.find_problem(128 * MIB, is_as_fast_as_planned=False) == ""


def test_a_pod_without_cards_is_told_by_its_environment_too(tmp_path: Path) -> None:
    environment = {"NCCL_IB_HCA": "mlx5"}
    check = RDMACheck(["rdma/hca"], 0, environment, tmp_path)
    (tmp_path / "tmp").mkdir()
    check.begin()
    log_file = Path(environment["NCCL_DEBUG_FILE"])
    assert check.find_problem(1, is_as_fast_as_planned=False) == "", "no log, no counter"
    log_file.write_bytes(b"\xff\x00" + LOGS["a pod without a device"][0].encode() + b"\xfe")
    problem = check.find_problem(1, is_as_fast_as_planned=False)
    assert "no /dev/infiniband/uverbs" in problem
    assert problem.endswith(f" (NCCL's log: {log_file})")
    (tmp_path / "dev" / "infiniband").mkdir(parents=True)
    (tmp_path / "dev" / "infiniband" / "uverbs0").touch()
    assert "'mlx5', must name one" in check.find_problem(1, is_as_fast_as_planned=False)
    environment["NCCL_IB_DISABLE"] = "1"
    assert "NCCL_IB_DISABLE is set" in check.find_problem(1, is_as_fast_as_planned=False)
