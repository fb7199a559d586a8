"""Resident memory of real trainers on several ranks: a model of hundreds of millions of parameters
beside a tiny one.

What the interpreter, the libraries and the communicators take is measured in the same process, as
the highest that the tiny model's run takes; the rest is what the planner's terms are of.
"""

import os
import warnings
from pathlib import Path

from transformers import Qwen2Config

from grpo_acceptance.tiny_model import save_tiny
from grpo_trainer.gang import ranks

from ..ranks import runs
from .ledger_cases import RESIDENT, large_config, model_config
from .rank_ledgers import as_on_a_gpu, overrides, plan


def peaks(folder: Path) -> dict[str, int]:
    """Bytes that were resident at most while a tiny model, then a large one trained for two steps.
    Collective.

    RESIDENT is the case. It wants MALLOC_MMAP_THRESHOLD_ as in the test: freed tensors leave the
    process at once.
    """
    warnings.simplefilter("ignore")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    return {
        name: _peak(folder / name, config)
        for name, config in (("tiny", model_config()), ("large", large_config()))
    }


def _peak(folder: Path, config: Qwen2Config) -> int:
    """The highest once the model is loaded."""
    runs.reset()
    model = folder / "model"
    if ranks.rank() == 0:
        save_tiny(model, config)
    ranks.gather(0)
    job = plan(model, RESIDENT)
    with as_on_a_gpu():
        trainer = runs.build(job, output_dir=str(folder), save_strategy="no", **overrides(job))
        forget_peak()
        trainer.train()
        highest = resident("VmHWM")
        del trainer
    runs.reset()
    return highest


def forget_peak() -> None:
    """Reset the kernel's peak of this process's resident memory (man 5 proc, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """Bytes of a field of this process's status (man 5 proc)."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024
