"""A sync of an engine in the trainer's own process: what is loaded, what is forgotten, and what is
proven, in order."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_trainer.engine_pod.hash_check import expected_prints
from grpo_trainer.engine_pod.weight_layout import Strided
from grpo_trainer.generation import colocated
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.generation_base import EngineSetup
from grpo_trainer.runtime.errors import TrainingError
from grpo_trainer.telemetry.phases import PhaseClock
from tests.support.ranks import demo_model, runs


class FakeEngine:
    """vLLM's part: keeps each weight whole, and notes what it is asked for."""

    def __init__(self, *, forgets: bool = True) -> None:
        self.forgets = forgets
        self.weights: dict[str, Any] = {}
        self.calls: list[str] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """One worker's answer."""
        self.calls.append(method)
        return [getattr(self, method)(*args)]

    def weights_learn(
        self, shapes: dict[str, list[int]], _: str
    ) -> tuple[dict[str, list[Strided]], list[str]]:
        """Every weight lies there as it is sent."""
        whole = {name: [(0, tuple(shape), _strides(shape))] for name, shape in shapes.items()}
        self.layout: dict[str, list[Strided | None]] = whole  # type: ignore[assignment]
        return whole, []

    def weights_load(self, name: str, tensor: Any) -> None:
        """Takes it."""
        self.weights[name] = tensor.clone()

    def weights_prints(self, seed: int) -> dict[str, list[int]]:
        """Hashes it."""
        return {
            name: expected_prints(tensor, self.layout[name], seed)
            for name, tensor in self.weights.items()
        }

    def logprobs_switch(self, mode: str) -> None:
        """Its log-probabilities are the caller's own."""

    def reset_prefix_cache(self) -> bool:
        """Nothing that was computed with earlier weights is left."""
        self.calls.append("reset")
        return self.forgets


def _strides(shape: list[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> ColocatedGeneration:
    """The generation over this engine, with the demo's policy."""
    monkeypatch.setattr(colocated, "_start_engine", lambda _: engine)
    folder = demo_model.save_policy(tmp_path / "model")
    policy: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    settings = {"kind": "Colocated", "memoryShare": 0.1, "maxModelLength": 64, "maxSequences": 4}
    plan = runs.plan(folder, "None", training={"beta": 0.0}, execution={"engine": settings})
    setup = EngineSetup(plan, folder, PhaseClock(lambda: 0.0), lambda _: None, lambda: None)
    return ColocatedGeneration(setup, policy, [1])


def test_what_is_cached_of_earlier_weights_is_forgotten_once_all_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    generation = made(tmp_path, monkeypatch, engine)
    for _ in range(2):
        engine.calls.clear()
        generation.sync_weights()
        loads = [at for at, call in enumerate(engine.calls) if call == "weights_load"]
        assert len(loads) == len(engine.weights) > 10
        assert "reset" in engine.calls[loads[-1] :]
    assert generation.changed_weights() == []


def test_an_engine_that_keeps_its_cache_is_not_sampled_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = made(tmp_path, monkeypatch, FakeEngine(forgets=False))
    with pytest.raises(TrainingError, match="did not reset its prefix cache"):
        generation.sync_weights()
    assert generation.proven_version is None
