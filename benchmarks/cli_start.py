"""Measures how long a command of `grpo` takes from a cold start of Python to its end.

    python -m benchmarks cli_start [--runs 15]

Goal (design): at most 0.6 s of CPU for a plan and 0.3 s for `grpo gpus`, on a machine with nothing
else to do. Prints the best and the median of several runs, each a process of its own, and the least
CPU time, which a busy machine changes least; never part of the tests.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python alone": "-c pass",
    "grpo --help": "-m grpo_cli --help",
    "grpo plan --help": "-m grpo_cli plan --help",
    "grpo gpus": "-m grpo_cli gpus",
    "grpo plan MODEL": "-m grpo_cli plan Qwen/Qwen2.5-7B-Instruct --gpus 8xH100",
    "grpo plan -f": ("-m grpo_cli plan -f examples/03-lora-7b.yaml --gpus 8xNVIDIA-H100-80GB-HBM3"),
}
"""Python's arguments by the name in the table."""


def timed(arguments: str) -> tuple[float, float]:
    """Wall and CPU seconds of one process; it must not fail."""
    began, used = time.perf_counter(), _cpu()
    subprocess.run([sys.executable, *arguments.split()], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began, _cpu() - used


def _cpu() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="of each command (default 15)")
    runs = parser.parse_args().runs
    print(f"{'command':18} {'best s':>8} {'median s':>9} {'CPU s':>8}")
    for name, arguments in COMMANDS.items():
        wall, cpu = zip(*(timed(arguments) for _ in range(runs)), strict=True)
        print(
            f"{name:18} {min(wall):8.3f} {statistics.median(wall):9.3f} {min(cpu):8.3f}", flush=True
        )
