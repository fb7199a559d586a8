"""Tells, as JSON, what a TRL script with a colocated vLLM logs by step, or a job that was made of
one.

Run in a process of its own, with vLLM: `python -m tests.trainer.vllm_script FOLDER SCRIPT|PLAN`.

TRL draws all completions from one stream of the engine, so that they depend on the batch. It leaves
the engine's type to vLLM, which takes bfloat16 for a policy in float32. And vLLM's start sets the
process's random numbers, by which TRL orders a batch. In these three TRL has here what a job has.
"""

import itertools
import json
import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.engine_pod.vllm_arguments import completion_seed
from grpo_trainer.rewards.reward_set import build_rewards
from grpo_trainer.training import build_run
from harness.controlplane import free_port
from tests.support.facts.resume_cases import log_of_plan, logged
from tests.trainer.engine_runs import FACTS

SEED = 42
"""transformers' and the job's."""


class SeededEngine(LLM):  # type: ignore[misc]  # vLLM is no dependency of the type checker
    """vLLM's engine, whose completions have the seeds of a job."""

    _generations = itertools.count()

    def __init__(self, **options: Any) -> None:
        """As TRL makes it, in a job's type; vLLM's build for CPUs compiles nothing here."""
        with torch.random.fork_rng():
            super().__init__(**options, dtype="float32", enforce_eager=True)

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
        """As vLLM's own."""
        generation = next(self._generations)
        parameters: Sequence[SamplingParams] = [sampling_params.clone() for _ in prompts]
        for place, one in enumerate(parameters):
            one.seed = completion_seed(SEED, generation, place)
        return super().generate(prompts, parameters, **options)


def log_of_script(script: Path) -> dict[int, dict[str, Any]]:
    """What TRL alone logs."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = SeededEngine
    return logged(runpy.run_path(str(script), run_name="__main__")["trainer"])


def log_of_job(path: Path) -> dict[int, dict[str, Any]]:
    """What our trainer logs. The plan's folder has the rewards."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    root = path.parent / "rewards"
    build_run.build_rewards = partial(build_rewards, root=root)  # type: ignore[attr-defined]
    return log_of_plan(TrainingPlan.model_validate_json(path.read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, source = Path(sys.argv[1]), Path(sys.argv[2])
    os.chdir(folder)  # where the script finds model and rows
    told = log_of_script(source) if source.suffix == ".py" else log_of_job(source)
    (folder / FACTS).write_text(json.dumps(told))
