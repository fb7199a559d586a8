"""What our colocated engine costs on top of TRL's own: CPU and wall seconds per step, and the proof's share told apart.

As trainer_overhead: both trainers in one process, in turns. Bare TRL syncs its engine and samples with it, without a
proof and without a seed for every completion; ours is everything that a pod runs. Needs nothing beside the repository:
vLLM for CPUs is fetched as the tests fetch it. In about five minutes:

    python -m benchmarks.engine_overhead [--processes 4] [--steps 16] [--write]

Prints every process and the medians; exits 1 where ours without the proof costs more than the limit.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Semaphore
from typing import Any

from benchmarks import trainer_overhead
from benchmarks.pages import replace_section, table
from benchmarks.trainer_overhead import KEEP_FREED_MEMORY, Meter, Turns, median_ratio, row
from grpo_api.plan import TrainingPlan
from harness.guard import REPOSITORY
from harness.images.engines import engine_environment, engine_packages
from harness.ranks.gang import run_gang
from harness.ranks.launch import ISOLATED

LIMIT = 1.02
PAGE = REPOSITORY / "docs" / "generation.md"
ENGINE = {"kind": "Colocated", "memoryShare": 0.1, "cacheBytes": 2**26, "maxModelLength": 256, "maxSequences": 16}


def make_plan(folder: Path, steps: int) -> TrainingPlan:
    """trainer_overhead's, with an engine."""
    plan = trainer_overhead.make_plan(folder, steps).model_dump(by_alias=True)
    plan["execution"]["engine"] = ENGINE
    return TrainingPlan.model_validate(plan)


def bare(folder: Path, plan: TrainingPlan, whole: Any) -> Any:
    """TRL with its own engine, which is told what TRL has no setting for: the type and eager execution on CPUs."""
    import trl.generation.vllm_generation as own

    settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": ENGINE["cacheBytes"]}
    own.LLM = partial(own.LLM, **settings)
    return trainer_overhead.bare(folder, plan, whole)


def measure(folder: Path, steps: int, bare_first: bool) -> dict[str, Any]:
    """Seconds of every step of both but the first and last, and the proof's, in a process of its own."""
    from grpo_trainer.generation import colocated
    from grpo_trainer.generation.worker_extension import WeightsWorker

    plan, proof = make_plan(folder, steps), Meter()
    proof.watch(WeightsWorker, "weights_prints")
    proof.watch(colocated, "expected_prints")
    start, one, other = Barrier(2), Semaphore(1), Semaphore(0)
    order = ("bare", "ours") if bare_first else ("ours", "bare")
    turns = {order[0]: Turns(start, one, other), order[1]: Turns(start, other, one)}
    whole = trainer_overhead.ours(folder, plan, Meter())
    trainers = {"bare": bare(folder, plan, whole), "ours": whole}
    for name, trainer in trainers.items():
        trainer.callback_handler.callbacks.insert(0, turns[name])
    proof.seconds = 0.0
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(trainers[name].train) for name in order]:
            done.result()
    inner = slice(1, -1)
    seconds = {name: {"cpu": turn.cpu[inner], "wall": turn.wall[inner]} for name, turn in turns.items()}
    return seconds | {"proof": proof.seconds / sum(turns["ours"].cpu)}


def measure_all(processes: int, steps: int) -> list[dict[str, Any]]:
    """What `measure` returns, of so many processes after each other."""
    folder = engine_packages()
    path = os.pathsep.join((ISOLATED["PYTHONPATH"], str(folder)))
    os.environ |= KEEP_FREED_MEMORY | engine_environment(folder) | {"PYTHONPATH": path}
    ISOLATED["PYTHONPATH"] = path
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trainer_overhead.save_model(folder / "model")
        problems = "".join(json.dumps({"prompt": f"say {number % 10}"}) + "\n" for number in range(64))
        (folder / "problems.jsonl").write_text(problems)
        return [
            run_gang(
                "benchmarks.engine_overhead:measure", folder, 1, fresh=True, steps=steps + 2, bare_first=bool(n % 2)
            )[0]
            for n in range(processes)
        ]


def main() -> int:
    """Measure, print, write; 1 if ours costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16, help="of each trainer in each process")
    parser.add_argument("--write", action="store_true", help="write the table into docs/generation.md")
    options = parser.parse_args()
    measured = measure_all(options.processes, options.steps)
    cpu, wall = median_ratio(measured, "cpu"), median_ratio(measured, "wall")
    proof = statistics.median(one["proof"] for one in measured)
    header = ["process", "TRL: CPU s per step", "ours", "ratio", "TRL: wall s per step", "ours", "ratio"]
    text = (
        f"{table(header, [row(*one) for one in enumerate(measured, 1)])}\nMedian over "
        f"{options.processes * options.steps} pairs of steps: CPU {cpu:.4f}, wall {wall:.4f}, of which the proof is "
        f"{proof:.2%} of a step: without it CPU {cpu * (1 - proof):.4f} (limit {LIMIT})."
    )
    print(text)
    if options.write:
        replace_section(PAGE, "overhead", text)
    return int(cpu * (1 - proof) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
