"""Training with engine pods on real vLLM: what is sampled, and faults that are each found before a completion is used.

engine_servers.py does it all in one process, beside two engines with processes of their own, and tells what came of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_api.training_metrics import ENGINE_LOSSES, ENGINE_TOKENS, ENGINE_UP, ENGINE_VERSION, WEIGHTS_VERSION
from harness.guard import REPOSITORY
from tests.trainer.faulty_engine import FOUND

Facts = dict[str, Any]
CLOSE = 1e-4
"""How far log-probabilities of float32 may lie apart, in nats, and importance ratios from 1."""


@pytest.fixture(scope="module")
def facts(vllm_cpu: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What became of it all."""
    folder = tmp_path_factory.mktemp("servers")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **vllm_cpu[1]}
    command = [sys.executable, "-m", "tests.trainer.engine_servers", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: Facts = json.loads((folder / "facts.json").read_text())
    return found


def test_engines_sample_from_the_policy_after_every_sync(facts: Facts) -> None:
    ratios = facts["calm"]["ratios"]
    assert len(ratios) == 6
    assert all(abs(ratio - 1) < CLOSE for ratio in ratios)
    assert len(set(facts["calm"]["completions"])) > 12


def test_both_engines_sample_under_the_newest_version_and_say_so(facts: Facts) -> None:
    metrics = facts["calm"]["metrics"]
    for index in (0, 1):
        assert metrics[f"{ENGINE_UP.key}/{index}"] == 1
        assert metrics[f"{ENGINE_VERSION.key}/{index}"] == metrics[WEIGHTS_VERSION.key] == 1_000_000_003
        assert metrics[f"{ENGINE_TOKENS.key}/{index}"] > 0
        assert metrics[f"{ENGINE_LOSSES.key}/{index}"] == 0


def test_an_engine_that_dies_in_mid_batch_costs_no_step_and_changes_no_completion(facts: Facts) -> None:
    killed = facts["killed"]
    assert killed["completions"] == facts["calm"]["completions"]
    assert all(abs(ratio - 1) < CLOSE for ratio in killed["ratios"])
    assert killed["metrics"][f"{ENGINE_UP.key}/0"] == 1
    assert killed["metrics"][f"{ENGINE_UP.key}/1"] == 0
    assert killed["metrics"][f"{ENGINE_LOSSES.key}/1"] == 1


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_in_one_engine_is_found_and_what_is_used_is_the_policys(facts: Facts, fault: str) -> None:
    found = facts["faults"][fault]
    assert found["struck"]
    assert found["apart"] < CLOSE
    if fault != "wrong-version":
        assert found["failures"] == 1


def test_both_engines_serve_again_once_the_faults_are_gone(facts: Facts) -> None:
    after = facts["faults"]["after"]
    assert after["apart"] < CLOSE
    assert [after["metrics"][f"{ENGINE_UP.key}/{index}"] for index in (0, 1)] == [1, 1]


def test_an_engine_that_restarted_serves_after_a_sync_alone(facts: Facts) -> None:
    restarted = facts["restarted"]
    assert restarted["apart"] < CLOSE
    assert restarted["after"] > restarted["before"]


def test_a_sync_that_blocks_ends_with_both_sides_named(facts: Facts) -> None:
    sync = facts["blocked"]["sync"]
    assert sync["error"] == "WeightSyncTimeout"
    assert "guard.weightSyncTimeoutSeconds = 5" in sync["message"]
    assert "rank 0 at 127.0.0.1; engine 0 at 127.0.0.2" in sync["message"]


def test_a_generation_without_any_engine_ends_with_its_last_state(facts: Facts) -> None:
    generation = facts["blocked"]["generation"]
    assert generation["error"] == "EngineLost"
    assert "engine 0 at 127.0.0.2" in generation["message"]


def test_an_engine_that_was_given_up_makes_room_for_another(facts: Facts) -> None:
    for engine in (facts["blocked"]["engine"], {**facts["differing"], "message": facts["differing"]["outcome"]}):
        assert engine["code"] == 1
        assert engine["message"].startswith("engine: given up by rank 0: ")


def test_the_only_engine_with_other_weights_at_every_sync_ends_the_attempt(facts: Facts) -> None:
    assert facts["differing"]["error"] == "EngineWeightsDiffer"
    assert "k_proj" in facts["differing"]["message"]
