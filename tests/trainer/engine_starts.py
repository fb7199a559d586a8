"""Tells, as JSON, how runs end whose real engine can't start or computes wrong numbers, beside one
whose engine is right. Run in a process of its own, with vLLM: `python -m
tests.trainer.engine_starts FOLDER`.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.worker.utils import request_memory

from grpo_acceptance.tiny_model import save_tiny, tiny_config
from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.engine_pod.engine_start import start_engine
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.generation_base import EngineSetup
from grpo_trainer.runtime.errors import classify_error, engine_cause
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.training.guard import EngineGuard
from grpo_trainer.weights.models import load_policy
from harness.controlplane import free_port
from tests.support.ranks import runs
from tests.trainer.engine_runs import FACTS

ENGINE: dict[str, Any] = {
    "kind": "Colocated",
    "memoryShare": 0.1,
    "cacheBytes": 2**25,
    "maxModelLength": 128,
    "maxSequences": 8,
    "modelRunner": "V1",
    "maxMismatch": 0.01,
}
STEPS = 2


def make_plan(folder: Path, *, training: Any = None, dtype: str = "float32", **engine: Any) -> Any:
    """A plan with this engine."""
    execution = {"engine": ENGINE | engine, "dtype": dtype}
    training = {"beta": 0.0, "maxSteps": STEPS} | (training or {})
    return runs.plan(folder / "model", "None", training=training, execution=execution)


def trained(plan: TrainingPlan, of_engine: TrainingPlan | None = None) -> dict[str, Any]:
    """How a run with this plan ends, whose engine is made by another plan where one is given."""
    folder, record = Path(plan.model.name), PhaseClock(lambda: 0.0)
    setup = EngineSetup(of_engine or plan, folder, record, lambda _: None, lambda: None)
    execution = plan.execution
    guard = EngineGuard(execution.engine, execution.compute_dtype, completions=runs.BATCH)
    logs = runs.Logs()
    make: Callable[..., Any] = lambda model, stop: ColocatedGeneration(setup, model, stop)  # noqa: E731
    try:
        loaded = load_policy(plan.model, execution, plan.adapter)
        config = runs.configuration(plan)
        trainer = runs.trainer(plan, config, loaded, logs, make_engine=make)
        trainer.engine_guard = guard
        trainer.train()
    except Exception as error:
        result, message = classify_error(error)
        cause = engine_cause(error)
        return {"result": result, "cause": cause, "message": message, "steps": len(logs.rows)}
    engine: Any = trainer.engine
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    return {"steps": trainer.state.global_step, "runner": type(worker.model_runner).__module__}


def without_room() -> dict[str, Any]:
    """How a start ends on a GPU of 80 GiB, half of which the engine takes, with one of them
    free."""
    snapshot: Any = SimpleNamespace(device_="cuda:0", free_memory=2**30, total_memory=80 * 2**30)
    cache: Any = SimpleNamespace(gpu_memory_utilization=0.5)
    try:
        start_engine(lambda: request_memory(snapshot, cache))
    except Exception as error:
        result, message = classify_error(error)
        return {"result": result, "cause": engine_cause(error), "message": message}
    return {}


def main(folder: Path) -> None:
    """All of it, a line each."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as a pod's process has them
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    save_tiny(folder / "model", tiny_config(hidden=128))
    right, strict = make_plan(folder), make_plan(folder, maxMismatch=1e-4)
    found = {
        # The first, since a variable of a later engine stays set in this process.
        "vLLM's choice": trained(make_plan(folder, modelRunner="Auto")),
        "longer than the model": trained(make_plan(folder, maxModelLength=2**20)),
        "no room for one completion": trained(make_plan(folder, cacheBytes=4096)),
        "no free memory": without_room(),
        "right": trained(strict),
        "another dtype": trained(strict, make_plan(folder, dtype="bfloat16")),
        "another temperature": trained(right, make_plan(folder, training={"temperature": 1.5})),
    }
    (folder / FACTS).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
