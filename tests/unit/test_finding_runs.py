"""The findings of real runs: bare TRL trained each of them on a CPU (`python -m benchmarks
finding_runs`), most of them healthy, the others to die of a known cause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_codegen.stories.finding_runs import (
    DEATHS,
    HEALTHY,
    HISTORIES,
    cause_of,
    first_found,
    histories,
    lost_share,
)

MAX_BYTES = 2_000_000
MAX_FALSE = 1
"""Healthy runs in which something may be found."""
RUNS = histories()


def of_cause(cause: str) -> list[str]:
    """The runs of one kind."""
    return [run for run in RUNS if cause_of(run) == cause]


def test_at_most_one_healthy_run_has_a_finding() -> None:
    found = {run: first_found(RUNS[run]) for run in of_cause(HEALTHY)}
    assert len(found) >= 60
    false = {run: findings for run, findings in found.items() if findings}
    assert len(false) <= MAX_FALSE, false


@pytest.mark.parametrize("cause", DEATHS)
def test_each_death_is_found_before_half_of_what_is_lost_is_lost(cause: str) -> None:
    death, runs = DEATHS[cause], of_cause(cause)
    assert len(runs) >= 6
    for run in runs:
        found = first_found(RUNS[run])
        named = [step for finding, step in found.items() if finding in death.findings]
        assert named, (run, found)
        assert lost_share(RUNS[run], death.quality, min(named)) < 0.5, (run, found)


def test_every_kept_run_is_judged() -> None:
    assert {cause_of(run) for run in RUNS} == {HEALTHY, *DEATHS}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_a_loss_only_grows_and_is_whole_at_the_end(values: list[float]) -> None:
    steps = [{"step": number, "value": value} for number, value in enumerate(values, 1)]
    shares = [lost_share(steps, lambda step: float(step["value"]), at) for at in range(61)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] in (0, pytest.approx(1))


def test_the_histories_are_small() -> None:
    assert HISTORIES.stat().st_size < MAX_BYTES
