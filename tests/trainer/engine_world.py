"""A training of this process with engine pods: its plan, its policy, and what it was told. The
process must see vLLM, since TRL looks for it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_acceptance.tiny_model import save_tiny, tiny_config
from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.generation import EnginePlan
from grpo_trainer.generation.generation_base import EngineSetup
from grpo_trainer.generation.remote_engines import ServersGeneration
from grpo_trainer.runtime.errors import TrainingError
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.models import load_policy
from harness.controlplane import free_port
from tests.support.ranks import runs

STEPS = 3
PROMPTS = [[7, 30, 12], [3, 9, 27, 81, 5, 40], [60], [11] * 20]
HOSTS = ["127.0.0.2", "127.0.0.3"]
RATIO = "sampling/importance_sampling_ratio"


def set_up(folder: Path) -> None:
    """A model whose heads vLLM has kernels for; and this process is the only rank."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    save_tiny(folder / "model", tiny_config(hidden=128))


def engine(replicas: int, sequences: int) -> dict[str, Any]:
    """The plan's engine. Numbers are the same to the last digit with one sequence at a time,
    whatever waits."""
    return EnginePlan(
        kind="Servers",
        replicas=replicas,
        memory_share=0.1,
        cache_bytes=2**25,
        max_model_length=128,
        max_sequences=sequences,
    ).model_dump(by_alias=True)


def plan(
    folder: Path,
    port: int | None = None,
    engines: Sequence[int] = (0, 1),
    *,
    sequences: int = 4,
    training: dict[str, Any] | None = None,
    guard: dict[str, Any] | None = None,
) -> TrainingPlan:
    """A plan with these engines, on this port or a free one; each samples so many completions at a
    time."""
    job = runs.plan(
        folder / "model",
        "None",
        training={"beta": 0.0, "maxSteps": STEPS, "promptsPerStep": 4, "numGenerations": 2}
        | (training or {}),
        execution={"engine": engine(len(engines), sequences)},
    )
    plan_json = job.model_dump(by_alias=True)
    hosts = [HOSTS[index] for index in engines]
    plan_json["engines"] = {"hosts": hosts, "port": port or free_port(), "weightsPort": free_port()}
    plan_json["guard"] |= guard or {}
    return TrainingPlan.model_validate(plan_json)


class World:
    """A policy and its engines."""

    def __init__(
        self, job: TrainingPlan, kind: type[ServersGeneration] = ServersGeneration
    ) -> None:
        self.logged: dict[str, float] = {}
        self.completions: list[str] = []
        setup = EngineSetup(
            job,
            Path(job.model.name),
            PhaseClock(lambda: 0.0),
            self.logged.update,
            record_event=lambda: None,
        )
        self.logs = runs.Logs()
        self.trainer: ReferenceGRPOTrainer = runs.trainer(
            job,
            runs.configuration(job),
            load_policy(job.model, job.execution, job.adapter),
            self.logs,
            rewards=self.reward,
            make_engine=lambda model, stop: kind(setup, model, stop),
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
        self.engine.set_position(3, 0)
        _, tokens, scores, _ = self.engine.generate(PROMPTS, None, 1)
        return max(
            float((torch.tensor([one[0] for one in row]) - self.scored(prompt, ids)).abs().max())
            for prompt, ids, row in zip(PROMPTS, tokens, scores, strict=True)
        )

    @torch.no_grad()
    def scored(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """The policy's log-probability of each token of a completion."""
        logits = (
            self.trainer.model(torch.tensor([prompt + completion]))
            .logits[0, len(prompt) - 1 : -1]
            .float()
        )
        scores: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[
            :, 0
        ]
        return scores

    def sync_and_sample(self) -> dict[str, Any]:
        """A sync and a generation."""
        before = self.engine.failures
        try:
            self.engine.sync_weights()
            apart = self.sampled()
        except TrainingError as error:
            return {"error": type(error).__name__, "message": str(error)}
        self.engine._record_progress()
        return {
            "apart": apart,
            "failures": self.engine.failures - before,
            "version": self.engine.proven_version,
            "metrics": dict(self.logged),
        }

    def close(self) -> None:
        """Let go of the engines and of the port."""
        assert self.engine._main is not None
        self.engine._main.close()
        self.engine._main = None
