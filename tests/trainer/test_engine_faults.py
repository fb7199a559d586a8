"""Faults of a colocated engine on real vLLM, each found before a completion of it is used; and what
an engine computes.

engine_faults.py does them in one process, which has vLLM, and tells what came of each.
"""

import math
from typing import Any

import pytest

from grpo_api.spec.keyword_arguments import VLLM
from tests.trainer.engine_names import FAULTS
from tests.trainer.engine_runs import engine_run

pytestmark = pytest.mark.realtime

Facts = dict[str, Any]
GREEDY = 48
CLOSE = 1e-4
"""How far log-probabilities of float32 may lie apart, in nats."""


@pytest.fixture(scope="module")
def facts(vllm_cpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What became of them."""
    found: Facts = engine_run("engine_faults", tmp_path_factory.mktemp("engine"), vllm_cpu)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_a_second_sync_and_no_completion(
    facts: Facts, fault: str
) -> None:
    once = facts["once"][fault]
    assert once["failures"] == 1
    assert once["apart"] < CLOSE


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_ends_the_attempt_before_a_completion_is_used(
    facts: Facts, fault: str
) -> None:
    always = facts["always"][fault]
    assert always["proven"] is None
    assert ("k_proj" if fault in ("skipped", "stale") else "engine's weights") in always["error"]


def test_the_engine_is_the_trainers_again_once_the_fault_is_gone(facts: Facts) -> None:
    assert facts["after"]["failures"] == 0
    assert facts["after"]["apart"] < CLOSE


def test_a_buffer_that_changes_ends_the_attempt_as_long_as_it_is_another(facts: Facts) -> None:
    buffer = facts["buffer"]
    assert buffer["tables"] > 0
    assert buffer["changed"]["proven"] is None
    assert "cos_sin_cache (buffer)" in buffer["changed"]["error"]
    assert buffer["restored"]["failures"] == 0
    assert buffer["restored"]["apart"] < CLOSE


@pytest.mark.parametrize("truncation", ["cut", "uncut"])
def test_where_trl_compares_no_completions_a_canary_is(facts: Facts, truncation: str) -> None:
    """One every eight generations: of two steps the first has one."""
    canary = facts["canary"][truncation]
    first, second = canary["steps"]
    assert 0 < first < CLOSE
    assert second is None
    assert canary["hotter"] > 0.1


def test_the_importance_ratio_is_unbiased_where_sampling_is_truncated(facts: Facts) -> None:
    """TRL issue 6789: the mass of the kept tokens must not be in it."""
    for truncation, means in facts["ratios"].items():
        assert len(means) == 3, truncation
        assert means == pytest.approx([1.0] * 3, abs=1e-3), truncation


def test_the_acceptance_finds_damage_of_live_weights(facts: Facts) -> None:
    assert facts["acceptance"] == []


def test_versions_only_grow(facts: Facts) -> None:
    versions = [one["version"] for one in facts["once"].values()] + [facts["after"]["version"]]
    assert versions == sorted(set(versions))
    assert versions[0] > 1_000_000_000


def test_an_engine_samples_the_same_tokens_again(facts: Facts) -> None:
    first, again = facts["seeds"]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == len(first)


def test_greedy_completions_are_those_of_transformers(facts: Facts) -> None:
    greedy = facts["greedy"]
    parted = [one for one in greedy["gaps"] if math.isfinite(one)]
    assert len(parted) < len(greedy["gaps"])
    assert all(one < CLOSE for one in parted)
    assert max(len(set(tokens)) for tokens in greedy["engine"]) > 3


@pytest.mark.parametrize("settings", ["cut", "hot", "hot cut"])
def test_log_probabilities_are_of_the_trainers_distribution(facts: Facts, settings: str) -> None:
    """With top-p at temperature 1, at another temperature, and with both."""
    assert facts[settings]["apart"] < CLOSE


def test_a_stop_string_ends_an_engine_s_completion_as_it_ends_one_of_transformers(
    facts: Facts,
) -> None:
    stop = facts["stop"]
    assert stop["stopped"] == stop["matched"] != stop["whole"]
    assert stop["apart"] < CLOSE, "of as many tokens as there are log-probabilities"
    is_shorter = [
        len(ids) < len(all_ids) for ids, all_ids in zip(stop["stopped"], stop["whole"], strict=True)
    ]
    assert stop["marked"] == is_shorter
    assert is_shorter[:2] == [True, True]
    row = stop["row"]
    assert row["completions/clipped_ratio"] < 1


def test_further_arguments_of_vllm_are_obeyed_and_log_probabilities_stay_the_trainers(
    facts: Facts,
) -> None:
    arguments = facts["arguments"]
    assert sorted(arguments["known"]) == sorted(VLLM)
    assert all(len(tokens) == GREEDY for tokens in arguments["tokens"]), "min_tokens"
    assert all(6 <= token < 80 for tokens in arguments["tokens"] for token in tokens)
    assert not any("a" in words for words in arguments["words"])
    assert arguments["apart"] < CLOSE
