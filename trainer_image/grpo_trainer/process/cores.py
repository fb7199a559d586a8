"""How many cores this pod may use, so that its processes share them out instead of each taking all.

torch starts as many threads as the node has cores, in every process: eight processes on sixty-four cores would run 512.
"""

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""cgroup v2: the container's CPU time as `quota period` in microseconds, or `max period` (cgroup-v2.rst)."""


def threads_per_process(processes: int, cpu_max: Path = CPU_MAX) -> int:
    """Threads for each of `processes` processes: an equal share of the pod's cores, by CPU affinity and limit."""
    return max(1, int(_cores(cpu_max) / processes))


def _cores(cpu_max: Path) -> float:
    cores = float(len(os.sched_getaffinity(0)))
    if not cpu_max.is_file():
        return cores
    quota, period = cpu_max.read_text(encoding="utf-8").split()
    return cores if quota == "max" else min(cores, int(quota) / int(period))
