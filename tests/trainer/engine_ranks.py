"""Two training ranks under ZeRO-3 with two engine pods, all of them real processes: beside a run of
one rank, and once more with an engine that dies on the way. Part of engine_servers.py.
"""

import json
import signal
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from harness.controlplane import free_port
from tests.support.ranks import runs
from tests.support.ranks.pods import Gang
from tests.trainer.engine_names import DIES
from tests.trainer.engine_pods import EnginePods
from tests.trainer.engine_world import engine
from tests.trainer.recording_reward import RECORD_ENV, recorded
from tests.trainer.stopping_reward import STOP_ENV

STEPS = 4
HOSTS = ["127.0.0.4", "127.0.0.5"]
"""Not those of engines that another run has left."""


def plan(folder: Path, name: str, ranks: int) -> TrainingPlan:
    """A run of so many pods with one rank each."""
    execution = {"nodes": ranks, "processesPerNode": 1, "engine": engine(len(HOSTS), sequences=1)}
    plan_json = runs.plan(
        folder / "model",
        "None",
        3 if ranks > 1 else 0,
        ranks,
        folder=folder / name,
        training={"beta": 0.0, "maxSteps": STEPS, "learningRate": 1e-4},
        execution=execution,
    ).model_dump(by_alias=True)
    plan_json["rendezvous"]["port"] = free_port()
    plan_json["engines"] = {"hosts": HOSTS, "port": free_port(), "weightsPort": free_port()}
    plan_json["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan_json["rewards"] = [
        {"python": {"function": "tests.trainer.recording_reward:digits", "timeoutSeconds": 500}}
    ]
    return TrainingPlan.model_validate(plan_json)


def trained(folder: Path, name: str, ranks: int, fault: str | None = None) -> dict[str, Any]:
    """What a run logged and completed, and its metrics at the end; the fault strikes the second
    engine."""
    here = folder / name
    here.mkdir()
    job = plan(folder, f"{name}/runs", ranks)
    environment = {RECORD_ENV: str(here), STOP_ENV: str(STEPS - 1)}
    with (
        EnginePods(job, here) as engines,
        Gang(job, folder, here / "pods", environment=environment) as gang,
    ):
        if fault:
            engines.strike(1, fault)
        with engines.kept_up():
            gang.until(lambda: STEPS - 1 in gang.steps())
        found = {
            "steps": [gang.steps()[step] for step in range(1, STEPS)],
            "metrics": gang.progress().metrics,
            "struck": fault is None or engines.struck(1, fault),
        }
        for pod in gang.pods:
            pod.send_signal(signal.SIGKILL)
        gang.wait()
    return found | {"completions": list(recorded(here, ranks).values())}


def train_on_ranks(folder: Path) -> dict[str, Any]:
    """One rank; two; and two with an engine that dies in mid-batch, comes back, and is brought the
    weights."""
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.PROMPTS))
    return {
        "one": trained(folder, "one", 1),
        "two": trained(folder, "two", 2),
        "struck": trained(folder, "struck", 2, DIES),
    }
