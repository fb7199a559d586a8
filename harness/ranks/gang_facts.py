"""Everything that needs two ranks, measured in one launch.

Starting a rank (torch, TRL, DeepSpeed) costs more than most of what is measured in it.
"""

from pathlib import Path
from typing import Any

from . import divergence_facts, fault_facts, reference_facts, saver_facts, step_facts

PARALLELISMS = ["DDP", "ZeRO-2", "ZeRO-3"]
STRIKES = [
    {"parallelism": "DDP", "moment": "gradient", "step": 2, "rank": 1},
    {"parallelism": "DDP", "moment": "reward", "step": 3, "rank": 0, "beta": 0.0},
    {"parallelism": "ZeRO-2", "moment": "gradient", "step": 3, "rank": 0, "dtype": "bfloat16"},
    {"parallelism": "ZeRO-2", "moment": "optimizer", "step": 2},
    {"parallelism": "ZeRO-3", "moment": "gradient", "step": 3, "rank": 1},
    {"parallelism": "ZeRO-3", "moment": "gradient", "step": 2, "rank": 0, "beta": 0.0, "dtype": "bfloat16"},
    {"parallelism": "ZeRO-3", "moment": "loss", "step": 2, "rank": 1},
    {"parallelism": "ZeRO-3", "moment": "weights", "step": 2, "rank": 1},
]
"""What is not finite, in which step and on which rank; under ZeRO-3 the damaged weight is rank 1's."""


def everything(folder: Path, cells: dict[str, list[str]]) -> dict[str, Any]:
    """Facts of strategies, single steps, memory savers and injected faults."""
    return {
        "cells": reference_facts.measure(folder / "cells", cells),
        "overflow": step_facts.overflowed(folder / "overflow", PARALLELISMS),
        "step": step_facts.stepped(folder / "step", PARALLELISMS),
        "faults": fault_facts.inject(folder / "faults", PARALLELISMS),
        "divergence": divergence_facts.all_of(folder / "divergence", STRIKES),
        "savers": saver_facts.zero3(folder / "savers"),
        "drift": fault_facts.drifted(folder / "drift", ["DDP", "ZeRO-2"]),
    }
