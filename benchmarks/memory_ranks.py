"""Compares the memory model with live DeepSpeed engines on several gloo ranks, phase by phase.

    python -m benchmarks memory_ranks [--quick]

Prints the table of docs/internals/memory-model.md, in Markdown. Takes ten minutes on two quiet
cores; the same cases are tests (tests/trainer/test_memory_ranks.py), six of them in `make test-all`
and all in `make soak`.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.pages import table
from tests.support.ledger.ledger_cases import CASES, HELD, MORE, Case, live
from tests.support.ledger.live_ledger import Peaks
from tests.support.ranks.gang import run_gang


def measured(cases: Iterable[Case], folder: Path) -> dict[Case, list[Peaks]]:
    """Peaks of each case by rank; one gang of each size runs all of its cases."""
    found: dict[Case, list[Peaks]] = {}
    ordered = sorted(cases, key=lambda case: case.world)
    for world, group in itertools.groupby(ordered, key=lambda case: case.world):
        alike = list(group)
        arguments = [asdict(case) for case in alike]
        by_rank = run_gang(
            "tests.support.ledger.rank_ledgers:ledgers", folder / str(world), world, cases=arguments
        )
        found |= {
            case: [rank["cases"][number]["peaks"] for rank in by_rank]
            for number, case in enumerate(alike)
        }
    return found


def cell(planned: float, there: int, bound: float) -> str:
    """Predicted, measured, difference; in parentheses where the prediction is an upper bound."""
    difference = f"{100 * (planned / there - 1):+.1f} %"
    return f"{planned / 1e6:.1f} / {there / 1e6:.1f}, {f'({difference})' if bound else difference}"


def row(case: Case, peaks: list[Peaks]) -> list[str]:
    """One line of the table."""
    planned = case.predicted().phases
    cells = [
        cell(planned[phase], there, case.bound(phase))
        if (there := live(peaks, phase, "device"))
        else ""
        for phase in HELD
    ]
    host = live(peaks, "step", "host")
    return [case.name, *cells, cell(case.host(), host, 0) if case.offload else ""]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the cases of `make test`")
    cases = CASES if parser.parse_args().quick else CASES + MORE
    with tempfile.TemporaryDirectory() as folder:
        found = measured(cases, Path(folder))
    header = ["ranks and sharding", *HELD, "host"]
    print(table(header, [row(case, found[case]) for case in cases]), end="")
