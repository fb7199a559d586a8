"""Training with engine pods on real vLLM: what is sampled, and faults that are each found before a
completion is used.

engine_servers.py does it all, beside engines with processes of their own, and tells what came of
it. `make test` has a calm run and an engine that is killed, `make test-all` the rest; `make soak`
kills more of them, with another seed in each round.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from grpo_api.report.report import Result
from grpo_api.report.training_metrics import (
    ENGINE_LOSSES,
    ENGINE_PROOF_FAILURES,
    ENGINE_TOKENS,
    ENGINE_UP,
    ENGINE_VERSION,
    WEIGHTS_VERSION,
)
from tests.trainer.engine_names import POD_FAULTS
from tests.trainer.engine_runs import engine_run

pytestmark = pytest.mark.realtime

Facts = dict[str, Any]
SAME = ("reward", "loss", "grad_norm", "entropy", "completion_length", "tokens", "engine_mismatch")
"""What a rank logs that doesn't depend on time."""
CLOSE = 1e-4
"""How far log-probabilities of float32 may lie apart, in nats, and importance ratios from 1."""


@pytest.fixture(scope="module")
def facts(vllm_cpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """A calm run and one with an engine that dies."""
    found: Facts = engine_run(
        "engine_servers", tmp_path_factory.mktemp("servers"), vllm_cpu, "gate"
    )
    return found


@pytest.fixture(scope="module")
def more(vllm_cpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What became of every other fault."""
    found: Facts = engine_run(
        "engine_servers", tmp_path_factory.mktemp("more-servers"), vllm_cpu, "more"
    )
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
        assert (
            metrics[f"{ENGINE_VERSION.key}/{index}"]
            == metrics[WEIGHTS_VERSION.key]
            == 1_000_000_003
        )
        assert metrics[f"{ENGINE_TOKENS.key}/{index}"] > 0
        assert metrics[f"{ENGINE_LOSSES.key}/{index}"] == 0


def test_an_engine_that_dies_in_mid_batch_costs_no_step_and_changes_no_completion(
    facts: Facts,
) -> None:
    killed = facts["killed"]
    assert killed["completions"] == facts["calm"]["completions"]
    assert all(abs(ratio - 1) < CLOSE for ratio in killed["ratios"])
    assert killed["metrics"][f"{ENGINE_UP.key}/0"] == 1
    assert killed["metrics"][f"{ENGINE_UP.key}/1"] == 0
    assert killed["metrics"][f"{ENGINE_LOSSES.key}/1"] == 1


@pytest.mark.slow
def test_an_engine_that_is_told_to_end_does_so_with_all_its_processes(more: Facts) -> None:
    assert more["stopped"]["ends"] == [[143, Result.PREEMPTED]] * 3


@pytest.mark.slow
def test_an_engine_that_is_told_to_end_is_a_loss_and_no_failed_proof(
    facts: Facts, more: Facts
) -> None:
    stopped = more["stopped"]
    assert stopped["completions"] == facts["calm"]["completions"]
    assert [stopped["metrics"][f"{ENGINE_LOSSES.key}/{index}"] for index in (0, 1)] == [1, 1]
    assert stopped["metrics"][ENGINE_PROOF_FAILURES.key] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", POD_FAULTS)
def test_a_fault_in_one_engine_is_found_and_what_is_used_is_the_policys(
    more: Facts, fault: str
) -> None:
    found = more["faults"][fault]
    assert found["struck"]
    assert found["apart"] < CLOSE
    if fault != "wrong-version":
        assert found["failures"] == 1


@pytest.mark.slow
def test_both_engines_serve_again_once_the_faults_are_gone(more: Facts) -> None:
    after = more["faults"]["after"]
    assert after["apart"] < CLOSE
    assert [after["metrics"][f"{ENGINE_UP.key}/{index}"] for index in (0, 1)] == [1, 1]


@pytest.mark.slow
def test_a_canary_shows_the_sampler_where_completions_are_cut(more: Facts) -> None:
    truncated = more["truncated"]
    assert truncated["right"] < CLOSE
    assert truncated["hotter"] > 0.1
    assert truncated["completions, right"] < CLOSE, "taken before the sampler again"
    assert truncated["completions, hotter"] < CLOSE, "so that they don't show it"


@pytest.mark.slow
def test_an_engine_that_restarted_serves_after_a_sync_alone(more: Facts) -> None:
    restarted = more["restarted"]
    assert restarted["apart"] < CLOSE
    assert restarted["after"] > restarted["before"]


@pytest.mark.slow
def test_a_sync_that_blocks_ends_with_both_sides_named(more: Facts) -> None:
    sync = more["blocked"]["sync"]
    assert sync["error"] == "WeightSyncTimeout"
    assert "guard.weightSyncTimeoutSeconds = 10" in sync["message"]
    assert "rank 0 at 127.0.0.1; engine 0 at 127.0.0.2" in sync["message"]


@pytest.mark.slow
def test_a_generation_without_any_engine_ends_with_its_last_state(more: Facts) -> None:
    generation = more["blocked"]["generation"]
    assert generation["error"] == "EngineLost"
    assert "engine 0 at 127.0.0.2" in generation["message"]


@pytest.mark.slow
def test_an_engine_that_was_given_up_makes_room_for_another(more: Facts) -> None:
    for engine in (
        more["blocked"]["engine"],
        {**more["differing"], "message": more["differing"]["outcome"]},
    ):
        assert engine["code"] == 1
        assert engine["message"].startswith("engine: given up by rank 0: ")


@pytest.mark.slow
def test_the_only_engine_with_other_weights_at_every_sync_ends_the_attempt(more: Facts) -> None:
    assert more["differing"]["error"] == "EngineWeightsDiffer"
    assert "k_proj" in more["differing"]["message"]


@pytest.mark.slow
def test_two_ranks_get_the_completions_of_one(more: Facts) -> None:
    one, two = more["ranks"]["one"], more["ranks"]["two"]
    assert two["completions"] == one["completions"]
    assert len({text for step in one["completions"] for text in step}) > 6
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        assert {key: ours[key] for key in SAME} == {
            key: pytest.approx(theirs[key], rel=1e-3, abs=1e-5) for key in SAME
        }


@pytest.mark.slow
def test_two_ranks_repeat_every_digit_with_an_engine_that_dies_and_comes_back(more: Facts) -> None:
    two, struck = more["ranks"]["two"], more["ranks"]["struck"]
    assert struck["struck"]
    assert (
        struck["metrics"][f"{ENGINE_LOSSES.key}/1"] == 1 > two["metrics"][f"{ENGINE_LOSSES.key}/1"]
    )
    assert struck["completions"] == two["completions"]
    for ours, theirs in zip(struck["steps"], two["steps"], strict=True):
        assert {key: ours[key] for key in SAME} == {key: theirs[key] for key in SAME}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["one", "two", "struck"])
def test_what_ranks_are_given_was_sampled_with_proven_weights_of_their_policy(
    more: Facts, run: str
) -> None:
    found = more["ranks"][run]
    assert found["metrics"][ENGINE_PROOF_FAILURES.key] == 0
    assert (
        found["metrics"][WEIGHTS_VERSION.key]
        == found["metrics"][f"{ENGINE_VERSION.key}/0"]
        == 1_000_000_003
    )
    assert all(row["engine_mismatch_max"] < CLOSE for row in found["steps"])


def require_undisturbed(found: Facts, steps: int) -> None:
    """A training whose engines were killed is the one whose weren't."""
    told = "\n".join(found["story"])
    assert found["missed"] == {}, told
    assert found["struck"]["sampled"], told
    assert all(len(versions) == 1 for versions in found["struck"]["sampled"]), told
    assert {version for versions in found["struck"]["sampled"] for version in versions} <= set(
        found["proven"]
    ), told
    assert found["struck"]["steps"] == steps, told
    assert all(lost <= killed for lost, killed in zip(*found["losses"], strict=True)), told
    for key in ("completions", "logged", "weights"):
        assert found["struck"][key] == found["calm"][key], told


@pytest.mark.slow
def test_engines_that_are_killed_on_the_way_change_no_digit(more: Facts) -> None:
    require_undisturbed(more["soak"], 16)


@pytest.mark.soak
def test_engines_that_are_killed_again_and_again_change_no_digit(
    chance: random.Random, vllm_cpu: dict[str, str], tmp_path: Path
) -> None:
    require_undisturbed(
        engine_run("engine_soak", tmp_path, vllm_cpu, str(chance.random()), "60", "10"), 60
    )
