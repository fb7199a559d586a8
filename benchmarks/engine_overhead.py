"""Compares our colocated engine with TRL's own: CPU and wall seconds per step, and the proof's
share of them.

As trainer_overhead: both trainers in one process, in turns. Bare TRL syncs its engine and samples
with it, without a proof and without a seed for every completion; ours is everything that a pod
runs. Needs nothing beside the repository: vLLM for CPUs is fetched as the tests fetch it. In about
five minutes:

    python -m benchmarks engine_overhead [--processes 4] [--steps 16] [--write]

Prints every process and the medians; exits 1 where ours without the proof costs more than the
limit.
"""

import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import trainer_overhead
from benchmarks.turns import Meter, asked, measure_all, median_ratio, seconds_of, take_turns, tell
from grpo_api.plan.plan import TrainingPlan
from harness.images.vllm_packages import engine_environment, engine_packages
from harness.programs.cache import REPOSITORY
from tests.support.ranks.fork_servers import ISOLATED

LIMIT = 1.02
PAGE = REPOSITORY / "docs/internals/engines.md"
ENGINE = {
    "kind": "Colocated",
    "memoryShare": 0.1,
    "cacheBytes": 2**26,
    "maxModelLength": 256,
    "maxSequences": 16,
}


def make_plan(folder: Path, steps: int) -> TrainingPlan:
    """trainer_overhead's, with an engine."""
    plan = trainer_overhead.make_plan(folder, steps).model_dump(by_alias=True)
    plan["execution"]["engine"] = ENGINE
    return TrainingPlan.model_validate(plan)


def bare(folder: Path, plan: TrainingPlan, whole: Any) -> Any:
    """TRL with its own engine, which gets two settings that TRL lacks: the dtype, and eager
    execution on CPUs."""
    import trl.generation.vllm_generation as own

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": ENGINE["cacheBytes"],
    }
    own.LLM = partial(own.LLM, **settings)
    return trainer_overhead.bare(folder, plan, whole)


def measure(folder: Path, steps: int, bare_first: bool) -> dict[str, Any]:
    """Seconds of every step of both but the first and last, and the proof's, in a process of its
    own."""
    from grpo_trainer.engine_pod.hash_check import expected_prints
    from grpo_trainer.engine_pod.weight_receiver import WeightsWorker
    from grpo_trainer.generation import colocated

    plan, proof = make_plan(folder, steps), Meter()
    proof.watch(WeightsWorker, WeightsWorker.weights_prints.__name__)
    proof.watch(colocated, expected_prints.__name__)
    whole = trainer_overhead.ours(folder, plan, Meter())
    trainers = {"bare": bare(folder, plan, whole), "ours": whole}
    proof.seconds = 0.0
    turns = take_turns(trainers, bare_first)
    return seconds_of(turns) | {"proof": proof.seconds / sum(turns["ours"].cpu)}


def use_engines() -> None:
    """Processes from here on have vLLM for CPUs."""
    folder = engine_packages()
    path = os.pathsep.join((ISOLATED["PYTHONPATH"], str(folder)))
    os.environ |= engine_environment(folder) | {"PYTHONPATH": path}
    ISOLATED["PYTHONPATH"] = path


def main() -> int:
    """Measure, print, write; 1 if ours costs more than the limit."""
    options = asked(__doc__, PAGE, processes=4)
    use_engines()
    measured = measure_all("benchmarks.engine_overhead:measure", options)
    cpu, wall = median_ratio(measured, "cpu"), median_ratio(measured, "wall")
    proof = statistics.median(one["proof"] for one in measured)
    tell(
        options,
        PAGE,
        measured,
        f"CPU {cpu:.4f}, wall {wall:.4f}, of which the proof is {proof:.2%} of a step: without it "
        "CPU "
        f"{cpu * (1 - proof):.4f} (limit {LIMIT}).",
    )
    return int(cpu * (1 - proof) > LIMIT)
