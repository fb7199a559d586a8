"""What several ranks add: collectives over the GPUs' links, timed."""

import os
import time

import torch
import torch.distributed as dist

from ..gang import rendezvous
from ..gang.placement import Placement, launch_environment
from .findings import Context, Finding, judged
from .plans import make_plan

BYTES = 256 << 20
"""Of the tensor that is summed: large enough that its time is bandwidth, not latency."""
ROUNDS = 5


def all_reduce(context: Context) -> list[Finding]:
    """Sum a tensor over all ranks; right to the last element, and how fast."""
    plan = make_plan(context)
    place = Placement(0, context.rank, context.world, 1)
    os.environ.update(launch_environment(plan, place))
    rendezvous.join(plan, place)
    size = BYTES if context.gpu else BYTES >> 6
    tensor = torch.ones(size // 4, device=f"cuda:{context.rank}" if context.gpu else "cpu")
    seconds = min(_timed(tensor, context) for _ in range(ROUNDS))
    expected = float(context.world**ROUNDS)
    problems = [] if bool((tensor == expected).all()) else [f"the sums are not {expected:g}"]
    speed = bus_bandwidth(size, context.world, seconds)
    seen = f"{context.world} ranks, {size >> 20} MiB: {speed / 1e9:.2f} GB/s on the bus"
    return [judged("all-reduce", problems, seen, {"bytes_per_second": speed, "seconds": seconds})]


def bus_bandwidth(size: int, world: int, seconds: float) -> float:
    """Bytes per second that each rank's links carry: an all-reduce sends 2(n-1)/n of the tensor over each (the
    definition of NVIDIA's nccl-tests, PERFORMANCE.md)."""
    return 2 * (world - 1) / world * size / seconds


def _timed(tensor: torch.Tensor, context: Context) -> float:
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    if context.gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
