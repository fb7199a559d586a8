"""Measures the time of one plan on big inventories, cold and warm.

    python -m benchmarks.plan_speed

Goal (design): at most 50 ms for any model and 1,000 nodes. Prints the median and the slowest of several runs, wall and
CPU time; never part of the tests.
"""

import random
import statistics
import time
from collections.abc import Callable

from grpo_api.job import parse_spec
from grpo_planner import Inventory, Node, plan_job

RUNS = 11
GIB = 2**30
PRODUCTS = [("NVIDIA-H100-80GB-HBM3", 81559, 8), ("NVIDIA-A100-SXM4-80GB", 81920, 8), ("NVIDIA-L4", 23034, 4),
            ("Tesla-T4", 15360, 4)]  # fmt: skip
MODELS = ["Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B",
          "meta-llama/Llama-3.3-70B", "Qwen/Qwen3-235B-A22B", "meta-llama/Llama-3.1-405B"]  # fmt: skip


def nodes(kinds: int, seed: int = 1) -> Inventory:
    """1,000 nodes of so many products, each with its own free GPUs, memory and CPUs."""
    choose = random.Random(seed)
    found = []
    for index in range(1000):
        product, mib, gpus = PRODUCTS[index % kinds]
        host, cpu = choose.randrange(64, 2048) * GIB, float(choose.randrange(16, 192))
        free = choose.randrange(gpus + 1)
        found.append(
            Node(f"n{index}", product, mib, free, gpus, "nvidia.com/gpu", (9, 0), host, 2048 * GIB, cpu, 192.0,
                 (("nvidia.com/gpu.product", product),))
        )  # fmt: skip
    return Inventory(tuple(found))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU milliseconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def main() -> None:
    """Prints the table."""
    print(f"{'model':28} {'products':>8} {'wall ms':>9} {'slowest':>9} {'CPU ms':>8}")
    for kinds in (1, len(PRODUCTS)):
        inventory = nodes(kinds)
        for model in MODELS:
            job = parse_spec(
                {"model": {"name": model}, "dataset": {"name": "d"}, "rewards": [{"accuracy": {}}]}
            )  # fmt: skip
            first = timed(lambda job=job, inventory=inventory: plan_job(job, inventory))  # type: ignore[misc]
            runs = [timed(lambda job=job, inventory=inventory: plan_job(job, inventory)) for _ in range(RUNS)]  # type: ignore[misc]
            wall, cpu = zip(*runs, strict=True)
            print(
                f"{model:28} {kinds:8} {statistics.median(wall):9.1f} {max(wall):9.1f} {statistics.median(cpu):8.1f}"
                f"   first call {first[0]:.0f}"
            )


if __name__ == "__main__":
    main()
