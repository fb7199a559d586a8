"""The list of benchmarks, and the one that needs nothing. tests/trainer and tests/e2e run the
others."""

import sys

import pytest

from benchmarks import plan_speed
from benchmarks.__main__ import benchmarks, main
from tests.benchmark_sizes import IN_THE_GATE, SMALLEST, WITH_LIMITS

HELPERS = {
    *("bench_cluster", "burst_floor", "burst_kinds", "pages", "turns"),
    *("__init__", "__main__"),
}


def test_the_list_has_every_benchmark_with_a_sentence_and_no_helper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = benchmarks()
    assert known.keys() & HELPERS == set()
    assert all(summary.endswith(".") for summary in known.values())
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert main() == 0
    listed = capsys.readouterr().out
    assert all(f"  {name:17} {summary}" in listed for name, summary in known.items())


def test_a_benchmark_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "pages"])
    assert main() == 2
    assert "there is no benchmark pages" in capsys.readouterr().err


def test_every_benchmark_has_a_smallest_size() -> None:
    assert SMALLEST.keys() == benchmarks().keys()
    assert {*IN_THE_GATE, *WITH_LIMITS} <= SMALLEST.keys()


def test_plans_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_speed, "MODELS", plan_speed.MODELS[:2])
    monkeypatch.setattr(plan_speed, "HARD", dict(list(plan_speed.HARD.items())[-1:]))
    monkeypatch.setattr(sys, "argv", ["plan_speed", *SMALLEST["plan_speed"]])
    plan_speed.main()
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * 3
