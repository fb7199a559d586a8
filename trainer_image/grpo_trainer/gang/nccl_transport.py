"""Finds out whether NCCL sends a gang's data by RDMA where the job asks for it, and if not, why.

NCCL opens libibverbs and the network cards by itself. Where it can't, it takes TCP sockets without
an error, and the run goes on at a fraction of the speed. There are two witnesses. One is NCCL's own
log, which it is made to write into a file. The other is the counters of the InfiniBand ports, which
RoCE cards have as well, before and after the first all-reduce.

The lines are those of NCCL 2.29.7, which the image has (src/init.cc, src/misc/ibvsymbols.cc,
src/transport/net_ib/init.cc), of later versions, and of AWS's plugin aws-ofi-nccl.
"""

import logging
import re
import resource
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_api.report.report import MAX_PROBLEM

logger = logging.getLogger(__name__)

DEBUG_FILE = "NCCL_DEBUG_FILE"
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
IB_DISABLE, IB_HCA = "NCCL_IB_DISABLE", "NCCL_IB_HCA"
MAX_LOG = 4 * 1024 * 1024
"""Bytes of the log that are read; a communicator of 1,024 ranks writes less."""
WORD_BYTES = 4
"""Unit of port_xmit_data (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
MB = 1e6

_NETWORK = re.compile(r"NCCL INFO Using network ([ -~]{1,48}?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w.-]{1,48})")
_NO_LIBRARY = re.compile(r"\bopen libibverbs\.so")
_CLOSED_DEVICE = re.compile(r"NET/IB : Unable to open device ([\w.-]{1,64})")
_MEMLOCK = re.compile(r"\bibv_\w{1,32} failed with error Cannot allocate memory")
_TCP_PROVIDERS = ("net", "sockets", "tcp", "udp")
"""Providers of libfabric that are no RDMA."""


@dataclass(frozen=True, slots=True)
class TransportLog:
    """What NCCL's log says of the network between nodes."""

    network: str = ""
    """IB (RoCE as well), Socket, or a plugin's name; empty where the log has none."""
    provider: str = ""
    """libfabric's provider, where the plugin is AWS's."""
    lacks_library: bool = False
    """Whether libibverbs could not be opened."""
    closed_device: str = ""
    """The first card that could not be opened."""

    @property
    def is_tcp(self) -> bool:
        """Whether the data goes through the kernel's TCP."""
        return self.network == "Socket" or self.provider in _TCP_PROVIDERS

    @property
    def is_counted_by_ports(self) -> bool:
        """Whether the data must show in the counters of InfiniBand ports. A plugin other than
        NVIDIA's own (IBext) may have another network."""
        return not self.network or self.network.startswith("IB")


def parse_nccl_log(text: str) -> TransportLog:
    """Return what a log of NCCL says of its first communicator; other text says nothing."""
    return TransportLog(
        network=_first_match(_NETWORK, text),
        provider=_first_match(_PROVIDER, text),
        lacks_library=_NO_LIBRARY.search(text) is not None,
        closed_device=_first_match(_CLOSED_DEVICE, text),
    )


def _first_match(pattern: re.Pattern[str], text: str) -> str:
    """The pattern's group where it first matches; empty where it does not."""
    match = pattern.search(text)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank finds around the first all-reduce."""

    log: TransportLog
    has_devices: bool = True
    """Whether the pod has /dev/infiniband/uverbs*."""
    is_disabled: bool = False
    """Whether NCCL_IB_DISABLE is set."""
    wanted_cards: str = ""
    """NCCL_IB_HCA."""
    sent_bytes: int | None = None
    """What all ports of the node sent meanwhile; None where no port has a counter."""
    least_bytes: int = 0
    """What they must have sent at least."""
    is_as_fast_as_planned: bool = False
    """Whether the all-reduce was not slow. GPUs of several nodes may share NVLink, which no port
    counts."""


def rdma_problem(requested: Sequence[str], evidence: Evidence) -> str:
    """Return why a rank's data does not go by RDMA, and what to do; empty where nothing shows that.
    `requested` are the pod's extended resources that are taken as network cards."""
    log = evidence.log
    if log.is_tcp:
        names = ", ".join(requested)[:100]
        return (
            f"NCCL sends by TCP sockets, although spec.resources requests {names}: "
            f"{_cause(requested, evidence)}"
        )
    sent = evidence.sent_bytes
    if sent is None or not log.is_counted_by_ports or evidence.is_as_fast_as_planned:
        return ""
    if sent >= evidence.least_bytes:
        return ""
    chosen = f"NCCL's log says network {log.network}" if log.network else "NCCL's log is not known"
    return (
        f"{chosen}, but port_xmit_data in /sys/class/infiniband grew by {sent / MB:.0f} MB during "
        f"an all-reduce that sends {evidence.least_bytes / MB:.0f} MB at least, so the data took "
        "another way: set NCCL_DEBUG to INFO in spec.env, and read how NCCL connects the nodes"
    )


def _cause(requested: Sequence[str], evidence: Evidence) -> str:
    """Why NCCL took sockets, the surest cause first, and what to do."""
    log = evidence.log
    if log.provider in _TCP_PROVIDERS:
        return f"libfabric took its provider {log.provider}: set FI_PROVIDER to efa in spec.env"
    if evidence.is_disabled:
        return f"{IB_DISABLE} is set: remove it from spec.env and spec.envFrom"
    if any(name.endswith("/efa") for name in requested):
        return "EFA needs the plugin aws-ofi-nccl and libfabric in spec.image"
    if log.lacks_library:
        return (
            "it can't open libibverbs.so.1: spec.image needs libibverbs and its providers "
            "(Debian: libibverbs1, ibverbs-providers)"
        )
    if not evidence.has_devices:
        return (
            "the pod has no /dev/infiniband/uverbs*: the device plugin of this resource must put "
            "them there"
        )
    if log.closed_device:
        return (
            f"it can't open {log.closed_device}: the device plugin must let the pod use the card's "
            "/dev/infiniband/uverbs*"
        )
    cards = f", which is {evidence.wanted_cards[:48]!r}," if evidence.wanted_cards else ""
    return f"it finds no card with an active port: {IB_HCA}{cards} must name one that the pod has"


def is_memlock_failure(text: str) -> bool:
    """Whether an error of NCCL says that no memory could be locked for a network card."""
    return _MEMLOCK.search(text) is not None


def memlock_message() -> str:
    """The sentence on the limit of locked memory, which RDMA needs raised."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    return (
        f"RDMA locks memory, and this process may lock {shown}: set LimitMEMLOCK of the nodes' "
        "container runtime to infinity"
    )


def shared_problem(problems: Sequence[str]) -> str:
    """The problem of the first rank that has one, and how many more have one; empty where the
    `problems` of all ranks are."""
    failed = [rank for rank, problem in enumerate(problems) if problem]
    if not failed:
        return ""
    first = failed[0]
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"rank {first}{more}: {problems[first]}"[:MAX_PROBLEM]


class RDMACheck:
    """The two witnesses of one rank, from before NCCL starts until the first all-reduce is over."""

    def __init__(
        self,
        requested: Sequence[str],
        rank: int,
        environment: MutableMapping[str, str],
        root: Path = Path("/"),
    ) -> None:
        """Make NCCL, which reads the environment when its first communicator is made, write its log
        into a file, unless that says what it logs. `requested`: as for rdma_problem."""
        self._requested = requested
        self._rank = rank
        self._environment: Mapping[str, str] = environment
        self._root = root
        self._log_file: Path | None = None
        self._sent_before: int | None = None
        # A level without a file, or a file with another level, is somebody's wish: that log must
        # stay where they look for it.
        if environment.keys().isdisjoint({DEBUG_FILE, *DEBUG}):
            self._log_file = root / "tmp" / f"nccl-rank-{rank}.log"
            environment.update(DEBUG, **{DEBUG_FILE: str(self._log_file)})

    def begin(self) -> None:
        """Read the ports' counters before the all-reduce."""
        self._sent_before = self._sent_bytes()

    def find_problem(self, least_bytes: int, *, is_as_fast_as_planned: bool) -> str:
        """Return why this rank's data does not go by RDMA; empty where nothing shows that.
        `least_bytes` is what the ports of a node must have sent since `begin`."""
        before, after = self._sent_before, self._sent_bytes()
        sent_bytes: int | None = None
        if before is not None and after is not None and before <= after:
            sent_bytes = after - before
        log = self._read_log()
        evidence = Evidence(
            log=log,
            has_devices=any((self._root / "dev/infiniband").glob("uverbs*")),
            is_disabled=self._environment.get(IB_DISABLE, "0") not in ("", "0"),
            wanted_cards=self._environment.get(IB_HCA, ""),
            sent_bytes=sent_bytes,
            least_bytes=least_bytes,
            is_as_fast_as_planned=is_as_fast_as_planned,
        )
        network = log.network or "unknown"
        log_name = f" (NCCL's log: {self._log_file})" if self._log_file else ""
        logger.info(f"rank {self._rank}: NCCL's network is {network}{log_name}")
        problem = rdma_problem(self._requested, evidence)
        return f"{problem}{log_name}" if problem else ""

    def _read_log(self) -> TransportLog:
        """What NCCL has logged so far; nothing where its log is not ours."""
        if self._log_file is None:
            return TransportLog()
        try:
            with self._log_file.open(encoding="utf-8", errors="replace") as file:
                return parse_nccl_log(file.read(MAX_LOG))
        except OSError:
            return TransportLog()

    def _sent_bytes(self) -> int | None:
        """What all InfiniBand and RoCE ports of the node have sent; None without a counter.

        A container sees the node's ports in sysfs, those of cards that it can't use among them.
        """
        ports = (self._root / "sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data")
        counters = [count for port in ports if (count := _read_count(port)) is not None]
        return sum(counters) * WORD_BYTES if counters else None


def _read_count(file: Path) -> int | None:
    """The number in a file of sysfs; None where it has none, or the driver refuses to read it."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() and len(text) <= 20 else None
