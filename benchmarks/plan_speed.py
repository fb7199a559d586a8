"""Measures the time of one plan on big inventories, ordinary jobs and the hardest that are known.

    python -m benchmarks plan_speed [--runs 11] [--nodes 1000]

Goal: at most 50 ms for ordinary jobs on 1,000 nodes, 150 ms for the hardest. Prints the median CPU
time and wall time of several runs, the slowest run and the first, which also reads the catalogue;
never part of the tests.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_api.text.units import GIB
from grpo_planner.explain.fixes import with_value
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.hardware.products import lookup_product
from grpo_planner.plan import plan_job

PRODUCTS = [
    "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", "NVIDIA-L4", "Tesla-T4", "NVIDIA-A10G",
    "NVIDIA-L40S",
    "NVIDIA-H200", "NVIDIA-B200", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A30", "NVIDIA-GB200",
    "NVIDIA-RTX-A6000",
]  # fmt: skip
MODELS = [
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B",
    "google/gemma-3-1b-it",
    "microsoft/Phi-4-mini", "Qwen/Qwen2.5-7B", "mistralai/Mixtral-8x7B", "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.3-70B",
    "Qwen/Qwen3-235B-A22B", "meta-llama/Llama-3.1-405B",
]  # fmt: skip
LLAMA_405B, QWEN_7B = "meta-llama/Llama-3.1-405B", "Qwen/Qwen2.5-7B"
STRETCHED = {
    "model.name": "ours/long-405b",
    "model.architecture": {
        "modelType": "llama", "layers": 126, "hiddenSize": 16384, "attentionHeads": 128,
        "keyValueHeads": 8, "headDim": 128, "intermediateSize": 53248, "vocabSize": 128256,
    },
}  # fmt: skip
"""The same model with as many positions as sequences may have."""
HARD: dict[str, tuple[str, dict[str, Any]]] = {
    "16,384 completions": (QWEN_7B, {"training.numGenerations": 64,
    "training.promptsPerStep": 256}),
    "16,384 completions, 405 B": (LLAMA_405B, {"training.numGenerations": 64,
    "training.promptsPerStep": 256}),
    "40 M completions, 1,344 divisors": (
        QWEN_7B, {"training.numGenerations": 720, "training.promptsPerStep": 55440,
        "reference.strategy": "Auto"},
    ),
    "a million tokens: nothing fits": (
        LLAMA_405B, STRETCHED | {"training.maxCompletionLength": 1048576},
    ),
    "the same without adapter": (
        LLAMA_405B, STRETCHED | {"training.maxCompletionLength": 1048576, "adapter.use": "Never",
        "training.optimizer": "AdamW"},
    ),
    "the same, 16,384 completions": (
        LLAMA_405B,
        STRETCHED | {"training.maxCompletionLength": 1048576, "training.numGenerations": 64,
        "training.promptsPerStep": 256},
    ),
    "every pin set, one GPU: nothing fits": (
        "meta-llama/Llama-3.3-70B",
        {
            "training.gradientCheckpointing": "Disabled", "training.optimizer": "AdamW",
            "training.dtype": "float32",
            "training.perDeviceTrainBatchSize": 8, "reference.strategy": "Clone",
            "adapter.use": "Never",
            "placement.gpus.max": 1,
        },
    ),
    "one token too many per GPU": (
        "Qwen/Qwen2.5-7B-Instruct-1M",
        {"training.maxCompletionLength": 524288, "adapter.use": "Never", "placement.gpus.max": 64},
    ),
    "more GPUs than there are": (QWEN_7B, {"placement.gpus.min": 4096,
    "training.promptsPerStep": 4096}),
}  # fmt: skip


def nodes(kinds: int, number: int, seed: int = 1) -> Inventory:
    """Return `number` nodes of `kinds` products, each with its own free GPUs, memory and CPUs."""
    choose = random.Random(seed)
    found = []
    for index in range(number):
        product = PRODUCTS[index % kinds]
        host, cpu = choose.randrange(64, 2048) * GIB, float(choose.randrange(16, 192))
        free = choose.randrange(9)
        found.append(
            Node(name=f"n{index}", gpu_product=product,
            gpu_memory_mib=lookup_product(product).memory_mib,
                 gpus_free=free, gpus_total=8, host_memory_free=host, host_memory_total=2048 * GIB,
                 cpu_free=cpu, cpu_total=192.0, node_selector=(("nvidia.com/gpu.product", product),
                 ))
        )  # fmt: skip
    return Inventory(tuple(found))


def jobs() -> dict[str, GRPOJobSpec]:
    """Jobs by their name in the table: every model with defaults, and the hard ones."""
    found = {}
    for name, (model, changes) in ({model: (model, {}) for model in MODELS} | HARD).items():
        spec = parse_spec(
            {"model": {"name": model}, "dataset": {"name": "d"}, "rewards": [{"accuracy": {}}]}
        )
        for path, value in changes.items():
            spec = with_value(spec, path, value)
        found[name] = spec
    return found


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU milliseconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11, help="of each plan (default 11)")
    parser.add_argument("--nodes", type=int, default=1000, help="of the inventory (default 1000)")
    options = parser.parse_args()
    # As the operator and the CLI do: a collection that walks all modules takes longer than a plan.
    gc.freeze()
    print(
        f"{'job':38} {'products':>8} {'CPU ms':>8} {'wall ms':>8} {'slowest':>8} {'first':>8}  "
        "planned"
    )
    for kinds in (1, 4, len(PRODUCTS)):
        inventory = nodes(kinds, options.nodes)
        for name, job in jobs().items():

            def work(job: GRPOJobSpec = job, inventory: Inventory = inventory) -> object:
                return plan_job(job, inventory)

            first, runs = timed(work)[1], [timed(work) for _ in range(options.runs)]
            wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
            slowest, planned = max(run[1] for run in runs), plan_job(job, inventory).reason
            print(
                (
                    f"{name:38} {kinds:8} {cpu:8.1f} {wall:8.1f} {slowest:8.1f} {first:8.1f}  "
                    f"{planned}"
                ),
                flush=True,
            )
