"""The findings of real runs: bare TRL trained each of them on a CPU (`python -m benchmarks
finding_runs`), most of them healthy, the others to die of a known cause."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_api.findings.diagnosis import Diagnosis
from grpo_api.findings.step_row import step_row

HISTORIES = Path(__file__).parent / "data" / "finding_runs.jsonl.gz"
CAUSES = {
    "entropy": {"EntropyCollapsed", "NoSignal"},
    "length": {"LengthExploding", "Truncating"},
    "hacking": {"RewardHacking"},
    "too hard": {"NoSignal"},
    "drift": {"KLRising"},
    "leap": {"RewardFalling", "NoSignal", "Truncating"},
}
"""What a run of each death is found to have, one of these at least."""
MAX_BYTES = 2_000_000


def histories() -> dict[str, list[dict[str, Any]]]:
    """The steps of each run by its name."""
    lines = gzip.decompress(HISTORIES.read_bytes()).decode().splitlines()
    return {run["run"]: run["steps"] for run in map(json.loads, lines)}


RUNS = histories()


def first_found(steps: list[dict[str, Any]]) -> dict[str, int]:
    """By finding, the step at which it was first there."""
    diagnosis = Diagnosis()
    found: dict[str, int] = {}
    for row in filter(None, map(step_row, steps)):
        diagnosis.add(row)
        for finding in diagnosis.findings:
            found.setdefault(finding.finding, row.step)
    return found


def of_cause(name: str) -> list[str]:
    """The runs of one kind."""
    return [run for run in RUNS if run.rpartition(" ")[0] == name]


def test_nothing_is_ever_found_in_healthy_runs() -> None:
    found = {run: first_found(RUNS[run]) for run in of_cause("healthy")}
    assert len(found) >= 30
    assert {run: findings for run, findings in found.items() if findings} == {}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_death_is_named(cause: str) -> None:
    runs = of_cause(cause)
    assert len(runs) >= 4
    for run in runs:
        assert first_found(RUNS[run]).keys() & CAUSES[cause], run


def test_the_histories_are_small() -> None:
    assert HISTORIES.stat().st_size < MAX_BYTES
