"""The plans that the checks train by: the tiny model on this machine's devices, in the words of the
real contract.

Whatever a check varies it names; everything else is the same in all of them.
"""

import json
import os
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.contract import DATA_MOUNT_ENV

from .findings import Context

COMPLETIONS = 8
"""Completions of a step on each device: two groups of four."""
LENGTH = 8
"""Tokens of a completion."""
FILE = "prompts.jsonl"
Section = dict[str, Any] | None


def make_plan(
    context: Context,
    strategy: str = "Clone",
    zero: int = 0,
    *,
    model: Path | None = None,
    training: Section = None,
    generation: Section = None,
    execution: Section = None,
    reference: Section = None,
    folder: Path | None = None,
    attempt: int = 1,
) -> TrainingPlan:
    """A plan for one pod with this context's processes; LoRA for strategy Adapter. `folder` takes
    checkpoints."""
    accelerator, gpus = ("GPU", context.world) if context.is_gpu else ("CPU", 0)
    settings = {
        "strategy": strategy,
        "method": "LoRA" if strategy == "Adapter" else "Full",
        "zeroStage": zero,
        "accelerator": accelerator,
        "gpus": gpus,
        "processesPerNode": context.world,
        "microBatch": COMPLETIONS,
        "gradientAccumulation": 1,
        "stepsPerGeneration": 1,
        "dtype": "float32",
        "saveEverySteps": 3,
    }
    return TrainingPlan.model_validate(
        {
            "job": {"namespace": "default", "name": "acceptance", "uid": "0", "attempt": attempt},
            "rendezvous": {"address": "127.0.0.1", "port": context.port},
            "model": {"name": str(model or tiny_model(context)), "parameters": "84K"},
            "dataset": {"files": {"volume": {"claimName": "acceptance"}, "paths": [FILE]}},
            "rewards": [{"format": {"pattern": "[^0-9]*[0-9].*"}}],
            "training": {
                "learningRate": 1e-3,
                "lrSchedulerType": "constant",
                "numGenerations": 4,
                "promptsPerStep": 2 * context.world,
                "maxSteps": 3,
                "maxCompletionLength": LENGTH,
            }
            | ({"beta": 0.0} if strategy == "None" else {})
            | (training or {}),
            "generation": generation or {},
            "reference": reference or {},
            "adapter": {"rank": 4, "alpha": 8},
            "checkpoint": {},
            "guard": {"hangTimeoutSeconds": 300, "rendezvousTimeoutSeconds": 120},
            "checkpointDirectory": str(folder) if folder else None,
            "execution": settings | (execution or {}),
        }
    )


def tiny_model(context: Context) -> Path:
    """The folder of the tiny model. Creates the model if the folder does not exist."""
    return _create_model(context, context.path / "model", large=False)


def middling_model(context: Context) -> Path:
    """The folder of a model whose passes over a few thousand tokens take gigabytes."""
    return _create_model(context, context.path / "middling", large=True)


def _create_model(context: Context, folder: Path, large: bool) -> Path:
    """Made under another name first: a check that was ended in the middle leaves nothing that looks
    whole."""
    if not folder.exists() and context.rank == 0:
        # transformers takes seconds to load, and not every check that has a plan has a model
        from .tiny_model import save_tiny, tiny_config

        unfinished = folder.with_suffix(".unfinished")
        save_tiny(unfinished, tiny_config(hidden=512, layers=4) if large else tiny_config())
        unfinished.rename(folder)
    return folder


def write_prompts(context: Context) -> None:
    """Write the prompts, and let the trainer find them."""
    rows = [{"prompt": f"say {number % 10}"} for number in range(64)]
    if context.rank == 0:
        (context.path / FILE).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    os.environ[DATA_MOUNT_ENV] = context.folder
