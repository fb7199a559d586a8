"""What a run holds that begins with another's exported adapter, on real process groups.

One LoRA run is trained and exported; others begin with that export, are looked at before their
first step, and go on from their own checkpoint, which no longer knows of the export.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl.trainer.utils import use_adapter

from grpo_api.plan.plan import JobIdentity, TrainingPlan
from grpo_trainer.gang import ranks
from grpo_trainer.runtime.errors import TrainingError
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.models import load_policy
from tests.support.ranks.checkpoint_plans import begin, claim_folder, export_model

from ..ranks import demo_model, runs
from .reference_facts import score, whole

CELLS: dict[str, dict[str, Any]] = {
    "DDP": {"zero": 0},
    "ZeRO-2": {"zero": 2},
    "ZeRO-3": {"zero": 3},
    "ZeRO-3 in bfloat16": {"zero": 3, "execution": {"dtype": "bfloat16"}},
}
"""How the runs differ that begin with the export."""
BASE = "base"
FAULTS: dict[str, dict[str, Any]] = {
    "rank": {"adapter": {"rank": 8}},
    "alpha": {"adapter": {"alpha": 16}},
    "modules": {"adapter": {"targetModules": ["q_proj", "v_proj"]}},
    BASE: {},
}
"""How a plan's adapter, or its model, is another than the export's."""
STEPS, SAVED = 2, 1


def everything(folder: Path, cells: list[str], faults: list[str]) -> dict[str, Any]:
    """Facts by cell, and how the faults end. Collective."""
    model, other = folder / "model", folder / "other"
    if ranks.rank() == 0:
        demo_model.save_policy(model)
        demo_model.save_policy(other, seed=1)
    ranks.gather(0)
    first, bad = folder / "first", folder / "bad"
    _exported(job(model, first))
    begun = {
        name: _begun(job(model, folder / name.replace(" ", "-"), first, **CELLS[name]))
        for name in cells
    }
    ends = {
        name: _end(job(other if name == BASE else model, bad, first, **FAULTS[name]))
        for name in faults
    }
    return {"cells": begun, "ends": ends}


def job(model: Path, folder: Path, source: Path | None = None, **settings: Any) -> TrainingPlan:
    """A LoRA run that keeps its files in `folder`, and begins with the export in `source`."""
    arguments: dict[str, Any] = {"training": {"maxSteps": STEPS}} | settings
    arguments["execution"] = {"saveEverySteps": SAVED} | arguments.get("execution", {})
    plan = runs.plan(model, "Adapter", world_size=ranks.world_size(), folder=folder, **arguments)
    identity = JobIdentity(namespace="default", name="adapter", uid=folder.name, attempt=1)
    return plan.model_copy(
        update={"job": identity, "resume_from": str(source / "export") if source else None}
    )


def _exported(plan: TrainingPlan) -> None:
    """Train and export, as a job does."""
    runs.reset()
    claim_folder(plan)
    trainer = runs.build(plan, save_strategy="no")
    trainer.train()
    export_model(plan, trainer.source, trainer.save_model)
    ranks.gather(0)


def _build(plan: TrainingPlan, *callbacks: TrainerCallback) -> ReferenceGRPOTrainer:
    """The trainer of a job that begins with an adapter."""
    runs.reset()
    config = runs.configuration(plan)
    loaded = replace(
        load_policy(plan.model, plan.execution, plan.adapter), adapter=begin(plan, {}).adapter
    )
    return runs.trainer(plan, config, loaded, *callbacks)


def _begun(plan: TrainingPlan) -> dict[str, Any]:
    """A run that begins with the export, and what it logs after its checkpoint when it goes on from
    there."""
    probe, logs, again = Probe(), runs.Logs(), runs.Logs()
    trainer = _build(plan, probe, logs)
    held = {key: tensor.clone() for key, tensor in get_peft_model_state_dict(trainer.model).items()}
    saved = load_file(Path(plan.resume_from or "") / "adapter_model.safetensors")
    probe.trainer, probe.saved = trainer, saved
    trainer.train()
    ranks.gather(0)
    runs.reset()
    resumed = runs.build(plan.model_copy(update={"resume_from": None}), again)
    resumed.train(
        resume_from_checkpoint=f"{plan.checkpoint_directory}/attempt-1/checkpoint-{SAVED}"
    )
    return probe.facts | {
        "equal": held.keys() == saved.keys()
        and all(torch.equal(held[key], saved[key].to(held[key].dtype)) for key in saved),
        "dtypes": sorted({str(tensor.dtype) for tensor in held.values()}),
        "proofs": [[proof.what, proof.parameters, proof.across_ranks] for proof in trainer.proofs],
        "first": logs.rows[1],
        "uninterrupted": logs.numbers(SAVED + 1, STEPS),
        "resumed": again.numbers(SAVED + 1, STEPS),
    }


class Probe(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Looks at the wrapped policy and at its reference before the first step."""

    trainer: ReferenceGRPOTrainer
    saved: dict[str, torch.Tensor]

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """What is held once the model is wrapped and partitioned, and how both score one batch."""
        held = {
            name.replace(".default.", "."): tensor
            for name, tensor in whole(self.trainer.model).items()
        }
        pairs = [(held[key], tensor.reshape(-1)) for key, tensor in self.saved.items()]
        self.facts["wrapped"] = all(
            torch.equal(mine, theirs.to(mine.dtype)) for mine, theirs in pairs
        )
        self.facts["policy"] = score(self.trainer, self.trainer.model_wrapped)
        with use_adapter(self.trainer.accelerator.unwrap_model(self.trainer.model), None):
            self.facts["reference"] = score(self.trainer, self.trainer.model)


def _end(plan: TrainingPlan) -> str:
    """The error with which a run ends before its first step."""
    try:
        _build(plan)
    except TrainingError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
