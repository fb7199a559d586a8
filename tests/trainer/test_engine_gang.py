"""Colocated engines in a gang, through the real entry point: ZeRO-3 and an adapter on two ranks,
killed and resumed.

The first attempt stands still after step 5, where all its pods are killed; the second goes on from
the checkpoint of step 3 and must log the same numbers, which come from the same completions.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_acceptance.tiny_model import save_tiny, tiny_config
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Progress, Result
from harness.controlplane import free_port
from tests.support.facts import history
from tests.support.ranks import runs
from tests.support.ranks.pods import Gang
from tests.trainer.stopping_reward import STOP_ENV

pytestmark = pytest.mark.realtime

STEPS, SAVED, STOPPED = 6, 3, 5
EXACT = (
    "reward",
    "kl",
    "loss",
    "grad_norm",
    "entropy",
    "completion_length",
    "tokens",
    "engine_mismatch",
)
CLOSE = 1e-4
ENGINE = {
    "kind": "Colocated",
    "memoryShare": 0.1,
    "cacheBytes": 2**25,
    "maxModelLength": 128,
    "maxSequences": 8,
}


def make_plan(model: Path, folder: Path, attempt: int) -> TrainingPlan:
    """Two pods of one process, LoRA under ZeRO-3."""
    execution = {"nodes": 2, "processesPerNode": 1, "engine": ENGINE}
    plan = runs.plan(model, "Adapter", 3, 2, folder=folder, execution=execution).model_dump(
        by_alias=True
    )
    plan["job"]["attempt"] = attempt
    plan["rendezvous"]["port"] = free_port()
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [
        {"python": {"function": "tests.trainer.stopping_reward:digits", "timeoutSeconds": 500}}
    ]
    return TrainingPlan.model_validate(plan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads vLLM has kernels for, and data."""
    made = tmp_path_factory.mktemp("engines")
    save_tiny(made / "model", tiny_config(hidden=128))
    (made / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.PROMPTS))
    return made


def gang(folder: Path, vllm: Mapping[str, str], attempt: int, name: str) -> Gang:
    """The pods of an attempt, with vLLM."""
    plan = make_plan(folder / "model", folder / "runs", attempt)
    return Gang(plan, folder, folder / name, environment=vllm)


def versions(run: Gang) -> float:
    """The number of the engine's weights, as /progress has it."""
    return Progress.model_validate_json(run.get("/progress")).metrics["weights_version"]


def numbers(steps: Mapping[int, Mapping[str, Any]]) -> list[float]:
    """The number of the weights that each step's completions were sampled with."""
    return [steps[step]["weights_version"] for step in sorted(steps)]


@pytest.mark.slow
def test_a_resumed_attempt_samples_the_same_completions_with_weights_of_new_numbers(
    folder: Path, vllm_cpu: dict[str, str]
) -> None:
    with gang(folder, {**vllm_cpu, STOP_ENV: str(STOPPED)}, 1, "pods-1") as first:
        first.until(lambda: STOPPED in first.steps())
        progress = Progress.model_validate_json(first.get("/progress"))
        for pod in first.pods:
            pod.kill()
        first.wait()
        killed = first.steps()
    with gang(folder, vllm_cpu, 2, "pods-2") as second:
        second.until(lambda: bool(second.steps()))
        later = versions(second)
        second.wait()
        assert second.outcome().result is Result.SUCCEEDED
        resumed = second.steps()
    assert sorted(resumed) == list(range(SAVED + 1, STEPS + 1))
    for step in range(SAVED + 1, STOPPED + 1):
        assert {key: resumed[step][key] for key in EXACT} == {
            key: killed[step][key] for key in EXACT
        }
    assert all(row["engine_mismatch_max"] < CLOSE for row in [*killed.values(), *resumed.values()])
    assert progress.metrics["weights_version"] < 2_000_000_000 < later
    assert [*numbers(killed), *numbers(resumed)] == sorted({*numbers(killed), *numbers(resumed)})
    assert progress.metrics["engine_proof_failures"] == 0
    assert progress.metrics["weight_sync_seconds"] > 0 < progress.metrics["weight_proof_seconds"]
    assert progress.metrics["phase_seconds/sync"] > 0
    sampled = history.of_run(folder / "runs")[1][0]["groups"]
    assert {one["weights_version"] for group in sampled for one in group["completions"]} == {
        killed[1]["weights_version"]
    }
