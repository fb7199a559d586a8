"""Everything that needs two ranks, measured in one launch.

Starting a rank (torch, TRL, DeepSpeed) costs more than most of what is measured in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import (
    divergence_facts,
    fault_facts,
    reference_facts,
    saver_facts,
    step_facts,
    straggler_facts,
)

PARALLELISMS = ["DDP", "ZeRO-2", "ZeRO-3"]
REPLICATED = ["DDP", "ZeRO-2"]
"""Those under which every rank has the whole policy."""
STRIKES = [
    {"parallelism": "DDP", "moment": "gradient", "step": 2, "rank": 1},
    {"parallelism": "DDP", "moment": "reward", "step": 3, "rank": 0, "beta": 0.0},
    {"parallelism": "ZeRO-2", "moment": "gradient", "step": 3, "rank": 0, "dtype": "bfloat16"},
    {"parallelism": "ZeRO-2", "moment": "optimizer", "step": 2},
    {"parallelism": "ZeRO-3", "moment": "gradient", "step": 3, "rank": 1},
    {
        "parallelism": "ZeRO-3",
        "moment": "gradient",
        "step": 2,
        "rank": 0,
        "beta": 0.0,
        "dtype": "bfloat16",
    },
    {"parallelism": "ZeRO-3", "moment": "loss", "step": 2, "rank": 1},
    {"parallelism": "ZeRO-3", "moment": "weights", "step": 2, "rank": 1},
]
"""What is not finite, in which step and on which rank; under ZeRO-3 the damaged weight is rank
1's."""


def everything(
    folder: Path,
    cells: dict[str, list[str]],
    *,
    overflow: Sequence[str] = PARALLELISMS,
    step: Sequence[str] = PARALLELISMS,
    faults: Sequence[str] = PARALLELISMS,
    drift: Sequence[str] = REPLICATED,
    strikes: Sequence[int] = range(len(STRIKES)),
    savers: bool = True,
    straggler: Sequence[str] = PARALLELISMS,
) -> dict[str, Any]:
    """Facts of strategies, single steps, memory savers and injected faults.

    Args:
        folder: of this launch.
        cells: strategies by parallelism.
        overflow: parallelisms whose KL overflows on one rank.
        step: parallelisms that take one step with a fixed batch.
        faults: parallelisms that load wrong weights.
        drift: parallelisms whose ranks drift apart.
        strikes: indices in STRIKES.
        savers: whether ZeRO-3's memory savers are measured.
        straggler: parallelisms with a rank of half the speed.
    """
    struck = [STRIKES[number] for number in strikes]
    measured = divergence_facts.all_of(folder / "divergence", struck)
    return {
        "cells": reference_facts.measure(folder / "cells", cells),
        "overflow": step_facts.overflowed(folder / "overflow", list(overflow)),
        "step": step_facts.stepped(folder / "step", list(step)),
        "faults": fault_facts.inject(folder / "faults", list(faults)),
        "divergence": {str(number): facts for number, facts in zip(strikes, measured, strict=True)},
        "savers": saver_facts.zero3(folder / "savers") if savers else {},
        "straggler": straggler_facts.slowed(folder / "straggler", list(straggler)),
        "drift": fault_facts.drifted(folder / "drift", list(drift)),
    }
