"""Everything that needs two ranks, measured in one launch.

Starting a rank (torch, TRL, DeepSpeed) costs more than most of what is measured in it.
"""

from pathlib import Path
from typing import Any

from . import fault_facts, reference_facts, saver_facts, step_facts

PARALLELISMS = ["DDP", "ZeRO-2", "ZeRO-3"]


def everything(folder: Path, cells: dict[str, list[str]]) -> dict[str, Any]:
    """Facts of strategies, single steps, memory savers and injected faults."""
    return {
        "cells": reference_facts.measure(folder / "cells", cells),
        "overflow": step_facts.overflowed(folder / "overflow", PARALLELISMS),
        "step": step_facts.stepped(folder / "step", PARALLELISMS),
        "faults": fault_facts.inject(folder / "faults", PARALLELISMS),
        "savers": saver_facts.zero3(folder / "savers"),
        "drift": fault_facts.drifted(folder / "drift", ["DDP", "ZeRO-2"]),
    }
