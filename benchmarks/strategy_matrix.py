"""Measures every reference strategy under every parallelism, for the tables of
docs/internals/strategy-measurements.md.

What the page claims is measured here, in two minutes on two cores:

    python -m benchmarks strategy_matrix [--parallelisms DDP ZeRO-2 ZeRO-3] [--write]

The measurements are those of the tests (tests/support/facts), over all cells instead of a reduced
set.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import STRATEGIES, replace_section, table
from tests.support.ranks.gang import run_gang

PARALLELISMS = ["DDP", "ZeRO-2", "ZeRO-3"]
Facts = dict[str, dict[str, dict[str, Any]]]


def cell_rows(facts: Facts, parallelisms: Sequence[str]) -> list[list[str]]:
    """One row of measured differences per strategy and parallelism that plans combine."""
    from tests.support.facts.reference_facts import CELLS, HALF

    names = list(dict.fromkeys(name for one in parallelisms for name in CELLS[one]))
    rows = []
    for strategy in names:
        baseline = facts["1 process"]["Clone in bfloat16" if strategy.endswith(HALF) else "Clone"]
        for parallelism in parallelisms:
            measured = facts[parallelism].get(strategy)
            if measured is not None:
                rows.append([strategy, parallelism, *checked(measured, baseline)])
    return rows


def checked(cell: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """The four checks of a cell in words and numbers."""
    kl = "no KL"
    if "reference" in cell:
        kl = number(
            max(abs(a - b) for a, b in zip(cell["reference"], baseline["reference"], strict=True))
        )
    proofs = ", ".join(f"{what} {parameters}" for what, parameters, _, _ in cell["proofs"])
    synced = (
        "stays"
        if "synced" not in cell
        else "same bits"
        if cell["synced"] == cell["synced_by_trl"]
        else "DIFFERENT"
    )
    return [kl, proofs, number(largest_difference(cell)), synced]


def largest_difference(cell: dict[str, Any]) -> float:
    """Largest difference of any logged number between the uninterrupted and the resumed run."""
    pairs = zip(cell["uninterrupted"], cell["resumed"], strict=True)
    differences = [abs(first[key] - second[key]) for first, second in pairs for key in first]
    return float(max(differences))


def number(difference: float) -> str:
    """Zero stays `0`, anything else keeps two digits."""
    return "0" if difference == 0 else f"{difference:.1e}"


def step_rows(overflow: dict[str, Any], norms: dict[str, float], single: float) -> list[list[str]]:
    """What an overflow on one rank logs, and the gradient norm of one batch split over two
    ranks."""
    rows = []
    for parallelism in overflow:
        logged = overflow[parallelism]["rows"][1]
        finite = (
            "finite"
            if all(row["finite"] for row in overflow[parallelism]["rows"])
            else "NOT FINITE"
        )
        relative = abs(norms[parallelism] - single) / single
        tokens = f"{logged['kl_overflow_tokens']:.0f}"
        rows.append([parallelism, tokens, f"{logged['grad_norm']:.3f}", finite, number(relative)])
    return rows


def fault_rows(faults: dict[str, dict[str, str]]) -> list[list[str]]:
    """Outcome of every injected fault by parallelism."""
    names = list(next(iter(faults.values())))
    return [
        [name, *(found[name].partition(":")[0] or "accepted" for found in faults.values())]
        for name in names
    ]


def main() -> int:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parallelisms",
        nargs="+",
        choices=PARALLELISMS,
        default=PARALLELISMS,
        help="(default: all)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the tables into docs/internals/strategy-measurements.md, all of them",
    )
    options = parser.parse_args()
    if options.write and options.parallelisms != PARALLELISMS:
        parser.error("--write takes all parallelisms")
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.support.facts.reference_facts import CELLS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = run_gang(
            "tests.support.facts.reference_facts:measure",
            folder / "1",
            1,
            cells={"1 process": CELLS["1 process"]},
        )
        single = run_gang(
            "tests.support.facts.step_facts:stepped", folder / "2", 1, parallelisms=["1 process"]
        )[0]
        chosen = options.parallelisms
        several = {parallelism: CELLS[parallelism] for parallelism in chosen}
        tables = {"cells": several, "overflow": chosen, "step": chosen, "faults": chosen}
        others: dict[str, Any] = {"drift": [], "strikes": [], "savers": False}
        gang = run_gang(
            "tests.support.facts.gang_facts:everything", folder / "3", 2, **tables, **others
        )[0]
    print(json.dumps({"alone": alone[0], "single": single, "gang": gang}))
    facts: Facts = alone[0] | gang["cells"]
    matrix = [
        "strategy",
        "parallelism",
        "KL: largest difference",
        "proven parameters",
        "resume: largest difference",
        "sync",
    ]
    steps = [
        "parallelism",
        "tokens limited",
        "gradient norm of that step",
        "parameters",
        "gradient norm, halves against whole",
    ]
    sections = {
        "matrix": table(matrix, cell_rows(facts, ["1 process", *chosen])),
        "steps": table(steps, step_rows(gang["overflow"], gang["step"], single["1 process"])),
        "faults": table(["fault", *chosen], fault_rows(gang["faults"])),
    }
    for name, text in sections.items():
        print(text)
        if options.write:
            replace_section(STRATEGIES, name, text)
    return 0
