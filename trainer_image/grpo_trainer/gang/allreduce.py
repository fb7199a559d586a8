"""The first all-reduce of the gang: whether it comes about, adds up, and how fast it is.

What TCP can't show is shown here: cards, drivers and topology that NCCL finds for itself. The watchdog has the clock,
since a collective that is stuck can't be given up from inside.
"""

import time

import torch
import torch.distributed as dist

from ..errors import Transient

GPU_BYTES = 64 * 1024 * 1024
"""Large enough for a bandwidth and not for a latency (nccl-tests show the plateau from about here on)."""
CPU_BYTES = 1024 * 1024
ROUNDS = 3
"""Timed rounds after the first, which makes the connections."""


def bus_bandwidth(device: torch.device) -> float:
    """Bytes per second that each rank moves in an all-reduce of all ranks, by the fastest of some rounds. A collective.

    As nccl-tests count it (PERFORMANCE.md): size / time * 2 (n - 1) / n, which compares gangs of any size with the
    bandwidth of their links.

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
            f"{wrong} of {len(values)} sums of an all-reduce over {world} ranks are wrong on rank {dist.get_rank()}: "
            f"NCCL_P2P_DISABLE=1 tells whether GPUs can't read each other's memory (PCIe ACS or an IOMMU)"
        )
    return seconds


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
