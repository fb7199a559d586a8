"""One rank works while the other waits: both see the same results, the same errors, and signs of
life meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.gang import run_gang

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("led")
    return run_gang("tests.trainer.led_facts:facts", folder)


def test_all_ranks_have_rank_0s_word_and_know_meanwhile_that_it_works(
    facts: list[dict[str, Any]],
) -> None:
    assert [one["word"] for one in facts] == ["from rank 0"] * 2
    assert all(one["signs"] >= 3 for one in facts)


def test_all_ranks_raise_what_rank_0_raised(facts: list[dict[str, Any]]) -> None:
    assert [one["error"] for one in facts] == ["EngineLost: rank 0: no engine was left"] * 2
    assert [one["bug"] for one in facts] == [
        "KeyError: 'x'",
        "TrainingError: rank 0: KeyError: 'x'",
    ]


def test_all_ranks_raise_the_error_of_the_lowest_leader_that_failed(
    facts: list[dict[str, Any]],
) -> None:
    assert [one["failing"] for one in facts] == ["BadInput: ranks 0, 1: of 0"] * 2


def test_a_leader_that_stands_still_gives_no_sign_of_life(facts: list[dict[str, Any]]) -> None:
    assert facts[0]["before"] >= 3
    # Of ten, if it went on. Rank 0 may be an exchange behind, and the part of the next one sent.
    assert facts[0]["meanwhile"] <= 2


def test_each_rank_gets_its_own_completions_also_after_its_weights_were_brought_again(
    facts: list[dict[str, Any]],
) -> None:
    assert [one["tokens"] for one in facts] == [[[0, 7], [1, 8]], [[10, 7], [11, 8]]]
    assert all(one["versions"] == [1_000_000_001] for one in facts)
