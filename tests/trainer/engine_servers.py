"""Tells, as JSON, what becomes of training with two engine pods and of faults in them. Run in a
process of its own, which has vLLM, since TRL looks for it: `python -m tests.trainer.engine_servers
FOLDER PART`. The part `gate` is one calm run and one with an engine that dies; `more` is the rest.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.generation.generation_base import Sample
from grpo_trainer.generation.remote_engines import ServersGeneration
from grpo_trainer.runtime.errors import EngineLost
from harness.controlplane import free_port
from tests.trainer import engine_ranks, engine_soak
from tests.trainer.engine_names import DIES, POD_FAULTS, SKIPPED, STOPS, STOPS_LATER
from tests.trainer.engine_pods import EnginePods
from tests.trainer.engine_runs import FACTS
from tests.trainer.engine_world import PROMPTS, World, plan, set_up


def faults(pods: EnginePods, world: World) -> dict[str, Any]:
    """Each fault once, in one of two engines."""
    found = {}
    for fault in POD_FAULTS:
        world.drift()
        pods.strike(1, fault)
        found[fault] = world.sync_and_sample() | {"struck": pods.struck(1, fault)}
    world.drift()
    found["after"] = world.sync_and_sample()
    return found


def stopped(pods: EnginePods, job: TrainingPlan) -> dict[str, Any]:
    """Engines are told to end: one in mid-batch, one that has answered all the same, and one that
    is only starting."""
    pods.strike(1, STOPS)
    pods.strike(0, STOPS_LATER)
    with ThreadPoolExecutor(2) as pool:
        replaced = pool.map(pods.replaced, (0, 1))
        found = World(job).trained()
        ends = list(replaced)
    pods.signal(1, signal.SIGKILL)
    pods.start(1)
    pods.await_children(1)
    pods.end(1)
    ends.append(pods.ended(1))
    return found | {"ends": [(code, outcome.result) for code, outcome in ends]}


def restarted(pods: EnginePods, job: TrainingPlan) -> dict[str, Any]:
    """The only engine is killed after a sync and comes back, with no weights, while completions are
    waited for."""
    world = World(job)
    world.engine.sync_weights()
    before = world.engine.proven_version
    pods.signal(0, signal.SIGKILL)
    again = threading.Timer(1.0, lambda: pods.start(0))
    again.start()
    found = {"apart": world.sampled(), "before": before, "after": world.engine.proven_version}
    world.close()
    return found


def blocked(pods: EnginePods, job: TrainingPlan) -> dict[str, Any]:
    """The only engine is stopped: a sync, and then, in another run, a generation after the last
    engine was lost."""
    world = World(job)
    world.engine.sync_weights()
    pods.signal(0, signal.SIGSTOP)
    found = {"sync": world.sync_and_sample()}
    world.engine.proven_version = world.engine._last
    try:
        world.sampled()
    except EngineLost as error:
        found["generation"] = {"error": type(error).__name__, "message": str(error)}
    pods.signal(0, signal.SIGCONT)
    code, outcome = pods.ended(0)
    found["engine"] = {"code": code, "message": outcome.message}
    world.close()
    return found


def differing(pods: EnginePods, job: TrainingPlan) -> dict[str, Any]:
    """The only engine loses a weight at every sync."""
    world = World(job)
    for fault in ("always", SKIPPED):
        pods.strike(0, fault)
    found = world.sync_and_sample()
    code, outcome = pods.ended(0)
    world.close()
    return found | {"code": code, "outcome": outcome.message}


class Hotter(ServersGeneration):
    """Engines whose sampler has another temperature than it is asked for."""

    def sample(
        self, prompts: list[list[int]], seeds: list[int], arguments: dict[str, Any], **more: Any
    ) -> list[Sample]:
        return super().sample(prompts, seeds, arguments | {"temperature": 1.5}, **more)


def truncated(folder: Path) -> dict[str, float]:
    """How far the log-probabilities of canaries are from the policy's at most where completions are
    cut, with a right and a wrong sampler, and those of completions afterwards."""
    job = plan(folder, engines=(0,), training={"topP": 0.5})
    found = {}
    with EnginePods(job, folder):
        for name, kind in {"right": ServersGeneration, "hotter": Hotter}.items():
            world = World(job, kind=kind)
            world.engine.sync_weights()
            found[name] = max(
                float((torch.tensor(one.logprobs) - world.scored(prompt, one.tokens)).abs().max())
                for prompt, one in world.engine.sample_canary(PROMPTS)
            )
            found[f"completions, {name}"] = world.sampled()
            world.close()
    return found


Jobs = Callable[..., TrainingPlan]


def gate(pods: EnginePods, job: Jobs) -> dict[str, Any]:
    """A training whose engines live, and the same training with one that dies."""
    calm = World(job()).trained()
    pods.strike(1, DIES)
    return {"calm": calm, "killed": World(job()).trained()}


def more(pods: EnginePods, job: Jobs) -> dict[str, Any]:
    """Every other fault."""
    found = {
        "faults": faults(pods, World(job())),
        "stopped": stopped(pods, job()),
        "restarted": restarted(pods, job(0)),
        "blocked": blocked(pods, job(0, weightSyncTimeoutSeconds=10)),
    }
    pods.start(0)
    pods.await_up(0)
    return found | {"differing": differing(pods, job(0))}


def main(folder: Path, part: str) -> None:
    """One part."""
    set_up(folder)
    port = free_port()

    def job(*indices: int, **guard: Any) -> TrainingPlan:
        return plan(folder, port, indices or (0, 1), guard=guard)

    with EnginePods(job(), folder) as pods:
        found = gate(pods, job) if part == "gate" else more(pods, job)
    if part == "more":
        found["truncated"] = truncated(folder)
        found["ranks"] = engine_ranks.train_on_ranks(folder)
        found["soak"] = engine_soak.soak(folder, "0", steps=16, kills=3)
    (folder / FACTS).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    os._exit(0)
