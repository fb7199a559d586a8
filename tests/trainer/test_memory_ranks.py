"""The memory model against live DeepSpeed engines on two and four gloo ranks: never too low, at most 2 % too high.

Byte counts, so a small model does. Which memory a buffer is in follows from the function that allocates it
(harness/ranks/ledger_sites.py); an unknown one fails here. benchmarks/memory_ranks.py prints the table of
docs/memory-model.md from the same cases.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import ledger_sites
from harness.ranks.gang import run_gang
from harness.ranks.ledger_cases import CASES, HELD, MORE, OVER, UNDER, Case, live, shape

pytestmark = pytest.mark.no_cover


def held(cases: list[Case], folder: Path) -> None:
    """Asserts that live ranks have what is planned, for cases of one size of a gang."""
    arguments = [asdict(case) for case in cases]
    by_rank = run_gang("harness.ranks.rank_ledgers:ledgers", folder, cases[0].world, cases=arguments)
    for number, case in enumerate(cases):
        facts = [rank["cases"][number] for rank in by_rank]
        assert all(fact["unknown"] == {} for fact in facts), (case.name, facts[0]["unknown"])
        peaks = [fact["peaks"] for fact in facts]
        device_is_held(case, peaks)
        if case.offload:
            host_is_held(case, peaks)


def device_is_held(case: Case, peaks: list[Any]) -> None:
    planned = case.predicted()
    for phase in peaks[0]:
        there, limit = live(peaks, phase, "device"), planned.phases.get(phase, planned.peak)
        assert there <= limit + UNDER, (case.name, phase, there, limit)
        if phase in HELD:
            assert limit <= there * (1 + OVER) + case.bound(phase), (case.name, phase, there, limit)
    assert live(peaks, "save", "device") <= planned.static + 2 * case.setup.weight_bytes * shape().largest_module


def host_is_held(case: Case, peaks: list[Any]) -> None:
    for phase in set(HELD) & set(peaks[0]):
        assert case.host() == pytest.approx(live(peaks, phase, "host"), rel=OVER), (case.name, phase)
    weights = case.setup.weight_bytes * shape().parameters
    assert live(peaks, "save", "host") <= case.host() + weights + UNDER


@pytest.mark.parametrize("world", [2, 4])
def test_live_ranks_hold_what_is_planned(world: int, tmp_path: Path) -> None:
    held([case for case in CASES if case.world == world], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_more_configurations_hold_what_is_planned(world: int, tmp_path: Path) -> None:
    held([case for case in MORE if case.world == world], tmp_path)


def test_an_unknown_site_is_told() -> None:
    table = ledger_sites.Table(offload=True)
    table.place(("engine.py:forward", "stage3.py:new_in_this_version"), "aten::empty", 1 << 20)
    assert table.unknown == {"stage3.py:new_in_this_version aten::empty": 1 << 20}
