"""Which rank is found to be slow: by recorded times of equal ranks, and by generated ones."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.findings.diagnosis import diagnose
from grpo_codegen.stories.logged_runs import logged_steps
from tests.generated import gated
from tests.unit.test_findings import SEEDS, first_found, rows


def test_a_slow_rank_is_named_and_ranks_that_take_turns_are_not() -> None:
    slow = [
        row | {"rank_seconds": [1.0, 1.0 + row["step"] % 3 / 50, 1.6]} for row in logged_steps()
    ]
    (finding,) = diagnose(rows(slow))
    assert (finding.finding, finding.evidence["rank"]) == ("Straggler", 2.0)
    of_two = [row | {"rank_seconds": [1.6, 1.0]} for row in logged_steps()]
    assert diagnose(rows(of_two))[0].evidence["rank"] == 0.0
    turns = [
        row | {"rank_seconds": [2.0 if rank == row["step"] % 4 else 1.0 for rank in range(4)]}
        for row in logged_steps()
    ]
    assert diagnose(rows(turns)) == []


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_is_slow_half_of_the_time_is_named_and_those_in_turns_are_not(
    seed: int, size: int
) -> None:
    alone, in_turns = (ranks_of_equal_speed(seed, size, steps=600) for _ in range(2))
    turns = itertools.cycle(range(size))
    for at in range(600):
        if "rank_seconds" in alone[at]:
            alone[at]["rank_seconds"][0] *= 1 + at // 20 % 2
            in_turns[at]["rank_seconds"][next(turns)] *= 2
    assert "Straggler" in first_found(alone)
    assert first_found(in_turns) == {}


RECORDED: dict[str, list[list[float]]] = json.loads(
    (Path(__file__).parent / "rank_seconds.json").read_text()
)
"""Seconds of two ranks of a live gang of equal speed, whose two cores other programs used, too."""


@pytest.mark.parametrize("strategy", RECORDED)
def test_no_rank_is_named_in_recorded_times_of_equal_ranks(strategy: str) -> None:
    steps = [
        {"step": step, "rank_seconds": seconds} for step, seconds in enumerate(RECORDED[strategy])
    ]
    assert first_found(steps) == {}


def ranks_of_equal_speed(seed: int, size: int, steps: int = 2000) -> list[dict[str, Any]]:
    """Steps as GPUs would have them: 4 % of noise, clocks that drift by 3 %, and now and then a
    pause of one rank or of a whole node."""
    chance = random.Random(seed)
    drift = [chance.uniform(0, 6.3) for _ in range(size)]
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        seconds = [
            chance.lognormvariate(0, 0.04) * (1 + 0.03 * math.sin(step / 50 + drift[rank]))
            for rank in range(size)
        ]
        if chance.random() < 0.03:
            paused = chance.randrange(size)
            seconds[paused] *= chance.uniform(1.2, 5)
        if chance.random() < 0.01:
            seconds = [each * 2 if rank < size // 2 else each for rank, each in enumerate(seconds)]
        is_measured = step <= 6 or step % 10 == 2
        rows.append(
            {"step": step, "loss": 0.1} | ({"rank_seconds": seconds} if is_measured else {})
        )
    return rows


@pytest.mark.parametrize("size", gated([2, 8, 4, 64], 2))
@pytest.mark.parametrize("seed", SEEDS)
def test_no_rank_is_named_in_2000_steps_of_equal_ranks(seed: int, size: int) -> None:
    assert first_found(ranks_of_equal_speed(seed, size)) == {}


@given(
    size=st.integers(2, 16),
    num_slow=st.integers(1, 8),
    factor=st.floats(1.5, 4),
    seed=st.integers(0, 10**6),
)
def test_slow_ranks_are_named_within_20_steps_wherever_they_are(
    size: int, num_slow: int, factor: float, seed: int
) -> None:
    chance = random.Random(seed)
    slow = set(chance.sample(range(size), min(num_slow, size // 2)))
    steps = ranks_of_equal_speed(seed, size, steps=20)
    for row in steps:
        if "rank_seconds" in row:
            row["rank_seconds"] = [
                chance.lognormvariate(0, 0.04) * (factor if rank in slow else 1)
                for rank in range(size)
            ]
    (finding,) = diagnose(rows(steps))
    assert finding.finding == "Straggler"
    assert finding.evidence["rank"] in slow
    assert finding.evidence["slowRanks"] == len(slow)


def test_a_straggler_that_recovers_is_forgotten() -> None:
    steps = [
        {"step": step, "rank_seconds": [1.0, 2.0 if step < 30 else 1.02]} for step in range(1, 60)
    ]
    assert diagnose(rows(steps[:29]))
    assert diagnose(rows(steps)) == []


def test_ranks_that_were_planned_anew_are_not_compared_with_those_before() -> None:
    before = [{"step": step, "rank_seconds": [1.0, 1.0, 2.0, 1.0]} for step in range(1, 30)]
    after = [{"step": step, "rank_seconds": [1.0, 1.0]} for step in range(30, 50)]
    assert diagnose(rows(before + after)) == []
