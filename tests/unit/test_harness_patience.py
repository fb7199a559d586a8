"""How long a test waits: on an idle machine, a busy one, and one that is never idle."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.programs.patience import BUSY_FACTOR, Patience, idle_seconds

SECONDS = 60.0


@dataclass
class Machine:
    """One whose processors are idle for a share of the time."""

    now: float = 1000.0
    idle: float = 500.0

    def pass_time(self, seconds: float, idle_share: float) -> None:
        self.now += seconds
        self.idle += seconds * idle_share

    def patience(self, seconds: float = SECONDS) -> Patience:
        return Patience(seconds, idle=lambda: self.idle, clock=lambda: self.now)


def seconds_waited(machine: Machine, idle_share: float) -> float:
    """Wall time until patience ends, where each look takes half a second."""
    patience, began = machine.patience(), machine.now
    while not patience.is_over:
        machine.pass_time(0.5, idle_share)
    return machine.now - began


@given(st.floats(0.0, 1.0))
def test_patience_ends_after_its_seconds_of_idle_time_and_at_the_latest_after_ten_times(
    idle_share: float,
) -> None:
    waited = seconds_waited(Machine(), idle_share)
    longest = BUSY_FACTOR * SECONDS
    expected = min(longest, SECONDS / idle_share) if idle_share else longest
    assert waited == pytest.approx(expected, abs=0.51)


def test_where_the_kernel_counts_no_idle_time_the_wall_clock_decides(tmp_path: Path) -> None:
    statistics = tmp_path / "stat"
    statistics.write_text("cpu 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0\n")
    assert idle_seconds(statistics, lambda: 7.0) == 7.0


def test_idle_time_is_the_mean_of_all_processors(tmp_path: Path) -> None:
    statistics = tmp_path / "stat"
    statistics.write_text("cpu 9 9 9 1000 50 0\ncpu0 1 1 1 400 20 0\ncpu1 1 1 1 600 30 0\nctxt 7\n")
    assert idle_seconds(statistics) == pytest.approx(5.0)


def test_this_machine_counts_idle_time() -> None:
    assert idle_seconds() > 0.0
