"""Tells, as JSON, what becomes of training with two engine pods and of faults in them. Run in a process of its own,
which has vLLM, since TRL looks for it: `python -m tests.trainer.engine_servers FOLDER`.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_api.generation import EnginePlan
from grpo_api.plan import TrainingPlan
from grpo_trainer.acceptance.tiny import save_tiny, tiny_config
from grpo_trainer.engine import ReferenceGRPOTrainer
from grpo_trainer.errors import EngineLost, TrainingError
from grpo_trainer.generation.base import EngineSetup
from grpo_trainer.generation.servers import ServersGeneration
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.weights.models import load_policy
from harness.ranks import runs
from harness.ranks.pods import free_port
from tests.trainer.engine_pods import EnginePods
from tests.trainer.faulty_engine import DIES, FOUND, SKIPPED

STEPS = 3
PROMPTS = [[7, 30, 12], [3, 9, 27, 81, 5, 40], [60], [11] * 20]
HOSTS = ["127.0.0.2", "127.0.0.3"]
RATIO = "sampling/importance_sampling_ratio"


def plan(folder: Path, ports: tuple[int, int], engines: Sequence[int] = (0, 1), **guard: Any) -> TrainingPlan:
    """A plan with these engines; `ports` are theirs and that of the weights."""
    engine = EnginePlan(
        kind="Servers",
        replicas=len(engines),
        memory_share=0.1,
        cache_bytes=2**25,
        max_model_length=128,
        max_sequences=4,
    )
    job = runs.plan(
        folder / "model",
        "None",
        training={"beta": 0.0, "maxSteps": STEPS, "promptsPerStep": 4, "numGenerations": 2},
        execution={"engine": engine.model_dump(by_alias=True)},
    )
    told = job.model_dump(by_alias=True)
    told["engines"] = {"hosts": [HOSTS[index] for index in engines], "port": ports[0], "weightsPort": ports[1]}
    told["guard"] |= guard
    return TrainingPlan.model_validate(told)


class World:
    """A policy and its engines."""

    def __init__(self, job: TrainingPlan) -> None:
        self.logged: dict[str, float] = {}
        self.completions: list[str] = []
        setup = EngineSetup(job, Path(job.model.name), PhaseClock(lambda: 0.0), self.logged.update, event=lambda: None)
        self.logs = runs.Logs()
        self.trainer: ReferenceGRPOTrainer = runs.trainer(
            job,
            runs.configuration(job),
            load_policy(job),
            self.logs,
            rewards=self.reward,
            make_engine=lambda model, stop: ServersGeneration(setup, model, stop),
        )
        engine = self.trainer.engine
        assert isinstance(engine, ServersGeneration)
        self.engine = engine

    def reward(self, completions: list[str], **more: Any) -> list[float]:
        """Digits, and what was completed is kept."""
        self.completions += completions
        return runs.digits(completions, **more)

    def trained(self) -> dict[str, Any]:
        """All steps."""
        self.trainer.train()
        keys = [f"{RATIO}/{end}" for end in ("min", "max")]
        ratios = [row[key] for row in self.logs.rows.values() for key in keys if key in row]
        found = {"completions": self.completions, "ratios": ratios, "metrics": dict(self.logged)}
        self.close()
        return found

    def drift(self) -> None:
        """The policy moves, as it does in a step."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)

    def sampled(self) -> float:
        """How far the engines' log-probabilities of a generation are from the policy's at most."""
        self.engine.at(3, 0)
        _, tokens, scores, _ = self.engine.generate(PROMPTS, None, 1)
        return max(
            float((torch.tensor([one[0] for one in row]) - self.scored(prompt, ids)).abs().max())
            for prompt, ids, row in zip(PROMPTS, tokens, scores, strict=True)
        )

    @torch.no_grad()
    def scored(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """The policy's log-probability of each token of a completion."""
        logits = self.trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        scores: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        return scores

    def told(self) -> dict[str, Any]:
        """A sync and a generation."""
        before = self.engine.failures
        try:
            self.engine.sync_weights()
            apart = self.sampled()
        except TrainingError as error:
            return {"error": type(error).__name__, "message": str(error)}
        self.engine._sign()
        return {
            "apart": apart,
            "failures": self.engine.failures - before,
            "version": self.engine.proven,
            "metrics": dict(self.logged),
        }

    def close(self) -> None:
        """Let go of the engines and of the port."""
        assert self.engine._main is not None
        self.engine._main.close()
        self.engine._main = None


def faults(pods: EnginePods, world: World) -> dict[str, Any]:
    """Each fault once, in one of two engines."""
    found = {}
    for fault in FOUND:
        world.drift()
        pods.strike(1, fault)
        found[fault] = world.told() | {"struck": pods.struck(1, fault)}
    world.drift()
    found["after"] = world.told()
    return found


def restarted(pods: EnginePods, job: TrainingPlan) -> dict[str, Any]:
    """The only engine is killed after a sync and comes back, with no weights, while completions are waited for."""
    world = World(job)
    world.engine.sync_weights()
    before = world.engine.proven
    pods.signal(0, signal.SIGKILL)
    again = threading.Timer(1.0, lambda: pods.start(0))
    again.start()
    found = {"apart": world.sampled(), "before": before, "after": world.engine.proven}
    world.close()
    return found


def blocked(pods: EnginePods, job: TrainingPlan) -> dict[str, Any]:
    """The only engine is stopped: a sync, and then, in another run, a generation after the last engine was lost."""
    world = World(job)
    world.engine.sync_weights()
    pods.signal(0, signal.SIGSTOP)
    found = {"sync": world.told()}
    world.engine.proven = world.engine._last
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
    found = world.told()
    code, outcome = pods.ended(0)
    world.close()
    return found | {"code": code, "outcome": outcome.message}


def main(folder: Path) -> None:
    """All of it."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    save_tiny(folder / "model", tiny_config(hidden=128))
    engines = free_port()

    def job(*indices: int, **guard: Any) -> TrainingPlan:
        return plan(folder, (engines, free_port()), indices or (0, 1), **guard)

    found: dict[str, Any] = {}
    with EnginePods(job(), folder) as pods:
        found["calm"] = World(job()).trained()
        found["faults"] = faults(pods, World(job()))
        pods.strike(1, DIES)
        found["killed"] = World(job()).trained()
        found["restarted"] = restarted(pods, job(0))
        found["blocked"] = blocked(pods, job(0, weightSyncTimeoutSeconds=5))
        pods.start(0)
        pods.await_up(0)
        found["differing"] = differing(pods, job(0))
    (folder / "facts.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
