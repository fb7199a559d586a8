"""Prepares a process before it imports torch, and before it trains.

Before the import it sets the number of threads and hides the libraries that the plan does not need.
Before training it sets how glibc keeps memory.

In every process, torch starts as many threads as the node has cores: eight processes on sixty-four
cores would run 512. Wherever it is installed, peft imports bitsandbytes, and accelerate imports
DeepSpeed. That is a third of the time that imports take, and bitsandbytes imports the whole of
torch's compiler.
"""

import ctypes
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.contract import RETURN_FREED_MEMORY

from ..runtime.hidden_library import hide_libraries

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""cgroup v2: the container's CPU time as `quota period` in microseconds, or `max period`
(cgroup-v2.rst)."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Numbers of mallopt's options (glibc's malloc.h)."""
KEEP_FREED_MEMORY = {
    # the largest that glibc takes (mallopt(3))
    M_MMAP_THRESHOLD: 32 * 2**20,
    M_TRIM_THRESHOLD: 2**30,
    M_TOP_PAD: 16 * 2**20,
}
"""Values in bytes while a process trains on CPUs: a step takes again what the last one freed."""


def threads_per_process(processes: int, cpu_max: Path = CPU_MAX) -> int:
    """Threads for each of `processes` processes: an equal share of the pod's cores, by CPU affinity
    and limit."""
    return max(1, int(_cores(cpu_max) / processes))


def _cores(cpu_max: Path) -> float:
    cores = float(len(os.sched_getaffinity(0)))
    if not cpu_max.is_file():
        return cores
    quota, period = cpu_max.read_text(encoding="utf-8").split()
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def set_defaults(environment: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Set those of the variables that are not set: a job may have chosen another value."""
    for name, value in variables.items():
        environment.setdefault(name, value)


def hide_unused_libraries(execution: ExecutionPlan) -> None:
    """Hide the optional libraries that this plan never calls in a training process. TRL imports
    wandb and trackio wherever it finds them; spec.tracking runs them in processes of their own."""
    hide_libraries("trackio", "wandb")
    if execution.optimizer != "AdamW8bit":
        hide_libraries("bitsandbytes")
    if execution.zero_stage == 0:
        hide_libraries("deepspeed")


def keep_freed_memory(environment: Mapping[str, str]) -> None:
    """Let glibc keep freed memory for the next tensors, unless the environment has other settings
    than the pod's RETURN_FREED_MEMORY.

    With those thresholds each tensor above 128 KiB is a mapping of its own. On CPUs a step makes
    thousands, and their page faults took a third of the first job's steps.
    """
    if not RETURN_FREED_MEMORY.items() <= environment.items():
        return
    libc = ctypes.CDLL(None)
    for option, value in KEEP_FREED_MEMORY.items():
        libc.mallopt(option, value)
