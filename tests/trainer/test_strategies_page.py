"""The measured tables of strategy-measurements.md are there, whole, and say what it claims.

They are written by benchmarks that run by hand: an empty or stale one would be noticed by nobody.
What they say is measured anew in CI by test_reference_gang.py, over fewer cells.
"""

import re

import pytest

from benchmarks.pages import STRATEGIES
from benchmarks.strategy_matrix import PARALLELISMS
from benchmarks.trainer_overhead import LIMIT
from tests.support.facts.reference_facts import CELLS, SYNCED
from tests.trainer.test_reference_gang import FAULTS


def section(name: str) -> str:
    """What is between a section's markers."""
    found = re.search(
        rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", STRATEGIES.read_text(), flags=re.DOTALL
    )
    assert found, name
    return found[1]


def rows(name: str) -> list[list[str]]:
    """Cells of a section's table, by row, without its header."""
    lines = [line for line in section(name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("parallelism", CELLS)
def test_every_cell_is_measured_without_a_difference(parallelism: str) -> None:
    page = {row[0]: row[2:] for row in rows("matrix") if row[1] == parallelism}
    assert page.keys() == set(CELLS[parallelism])
    for strategy, (kl, proven, resume, sync) in page.items():
        assert kl == ("no KL" if strategy == "None" else "0")
        assert re.fullmatch(r"policy [1-9]\d*(, reference [1-9]\d*)?", proven)
        assert resume == "0"
        assert sync == ("same bits" if strategy.startswith(SYNCED) else "stays")


def test_an_overflow_and_a_split_batch_are_measured_under_each_parallelism() -> None:
    assert [row[0] for row in rows("steps")] == PARALLELISMS
    for _, limited, norm, finite, apart in rows("steps"):
        assert (limited, finite) == ("1", "finite")
        assert float(norm) < 10
        assert float(apart) < 1e-5


def test_every_fault_has_its_outcome() -> None:
    expected = {"none": "accepted"} | {fault: error for fault, (error, _) in FAULTS.items()}
    assert {row[0]: set(row[1:]) for row in rows("faults")} == {
        fault: {error} for fault, error in expected.items()
    }


def test_the_load_is_within_its_bounds() -> None:
    assert len(rows("load")) == 8
    for name, value, bound in rows("load"):
        assert 0 < float(value) <= float(bound), name


def test_the_overhead_is_within_its_limit() -> None:
    assert len(rows("overhead")) >= 5
    medians = re.search(
        r"CPU ([\d.]+), wall [\d.]+ .*Telemetry's share of a step: ([\d.]+)%", section("overhead")
    )
    assert medians
    assert float(medians[1]) <= LIMIT
    assert float(medians[2]) <= 0.5
