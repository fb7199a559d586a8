"""Tells, as JSON, what becomes of a training whose engine pods are killed again and again, beside
one whose aren't.

Run in a process of its own, with vLLM: `python -m tests.trainer.engine_soak FOLDER SEED STEPS
KILLS`; and, with fewer steps, by engine_servers.py.
"""

import hashlib
import json
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.training_metrics import ENGINE_LOSSES
from grpo_trainer.generation.fleet import EngineView
from grpo_trainer.generation.generation_base import Sample
from grpo_trainer.generation.remote_engines import ServersGeneration
from harness.controlplane import free_port
from tests.trainer import engine_world
from tests.trainer.engine_names import DIES, DIES_RECEIVING
from tests.trainer.engine_pods import EnginePods
from tests.trainer.engine_runs import FACTS
from tests.trainer.engine_world import World

Phase = Literal["sampling", "syncing", "idle"]
ENGINES = ((0,), (1,), (0, 1))
LATER = 10
"""Steps that are left to a fault to strike: a new process is seen within a second."""


@dataclass(frozen=True)
class Kill:
    """What is killed once a step's completions are there: at the next request or sync, or at
    once."""

    step: int
    phase: Phase
    engines: tuple[int, ...]


def drawn(seed: str, steps: int, kills: int) -> list[Kill]:
    """Each of them at another step."""
    chance = random.Random(seed)
    when = sorted(chance.sample(range(steps - LATER), kills))
    phases: tuple[Phase, ...] = ("sampling", "syncing", "idle")
    return [Kill(step, chance.choice(phases), chance.choice(ENGINES)) for step in when]


class Recording(ServersGeneration):
    """Keeps the versions of what was sampled, by generation."""

    sampled: list[list[int]]

    def sample(self, *arguments: Any, **more: Any) -> list[Sample]:
        """As ever."""
        samples = super().sample(*arguments, **more)
        self.sampled = [*getattr(self, "sampled", []), sorted({one.version for one in samples})]
        return samples


class Struck(World):
    """A training whose engines are killed on the way."""

    def __init__(self, job: TrainingPlan, pods: EnginePods, kills: list[Kill]) -> None:
        super().__init__(job, kind=Recording)
        self.pods = pods
        self.kills = {kill.step: kill for kill in kills}
        self.steps = 0

    def reward(self, completions: list[str], **more: Any) -> list[float]:
        """Called once a step's completions are there, while the engines are idle."""
        if kill := self.kills.get(self.steps):
            for index in kill.engines:
                self._strike(index, kill.phase)
        self.steps += 1
        return super().reward(completions, **more)

    def _strike(self, index: int, phase: Phase) -> None:
        self.pods.await_up(index)
        if phase == "idle":
            self.pods.signal(index, signal.SIGKILL)
        else:
            self.pods.strike(index, DIES if phase == "sampling" else DIES_RECEIVING)

    def result(self) -> dict[str, Any]:
        """What the training came to."""
        found = self.trained()
        weights = hashlib.sha256()
        for parameter in self.trainer.model.parameters():
            weights.update(parameter.detach().numpy().tobytes())
        assert isinstance(self.engine, Recording)
        return found | {
            "steps": self.trainer.state.global_step,
            "logged": self.logs.numbers(1, self.trainer.state.global_step),
            "weights": weights.hexdigest(),
            "sampled": self.engine.sampled,
        }


def soak(folder: Path, seed: str, steps: int, kills: int) -> dict[str, Any]:
    """The undisturbed training and the other, with what struck it."""
    proven: list[int] = []
    prove = EngineView.record_proof

    def noted(view: EngineView, version: int) -> None:
        proven.append(version)
        prove(view, version)

    EngineView.record_proof = noted  # type: ignore[method-assign,assignment]
    story = drawn(seed, steps, kills)
    port, own = free_port(), folder / "soak"
    own.mkdir()

    def job() -> TrainingPlan:
        return engine_world.plan(
            folder, port, sequences=1, training={"maxSteps": steps, "learningRate": 1e-4}
        )

    with EnginePods(job(), own) as pods, pods.kept_up():
        calm = Struck(job(), pods, []).result()
        proven.clear()
        struck = Struck(job(), pods, story).result()
        armed = [
            index
            for index in (0, 1)
            if not (pods.struck(index, DIES) and pods.struck(index, DIES_RECEIVING))
        ]
        restarts = [pods.starts(index) - 1 for index in (0, 1)]
    EngineView.record_proof = prove  # type: ignore[method-assign]
    wanted = [sum(index in kill.engines for kill in story) for index in (0, 1)]
    losses = [struck["metrics"][f"{ENGINE_LOSSES.key}/{index}"] for index in (0, 1)]
    return {
        "story": [str(kill) for kill in story],
        "calm": calm,
        "struck": struck,
        "proven": sorted(set(proven)),
        "losses": [losses, wanted],
        "missed": {"armed": armed, "restarts": [restarts, wanted]}
        if armed or restarts != wanted
        else {},
    }


if __name__ == "__main__":
    engine_world.set_up(here := Path(sys.argv[1]))
    (here / FACTS).write_text(
        json.dumps(soak(here, sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    )
    os._exit(0)
