"""Measures what strategy-measurements.md claims of every strategy under every parallelism.

The tests and the documented table rest on the same measurements. `measure` runs on one rank or as a
gang. Every cell says: log-probabilities on one fixed batch, how the weights were proven, what an
interrupted run logged after its resume against the uninterrupted one, and whether the sync is bit
for bit what TRL does.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import use_adapter

from grpo_trainer.gang import ranks
from grpo_trainer.reference.strategies import mix_weights
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights import parameters
from grpo_trainer.weights.parameters import combined_fingerprint, fingerprint, unwrap_model

from ..ranks import demo_model, runs

CELLS = {
    "1 process": ["Clone", "Offload", "Adapter", "None", "Clone in bfloat16"],
    "DDP": ["Clone", "Offload", "Adapter", "None", "Clone in bfloat16"],
    "ZeRO-2": ["Clone", "Offload", "Adapter", "None", "Clone in bfloat16"],
    "ZeRO-3": ["Sharded", "Offload", "Adapter", "None", "Sharded in bfloat16"],
}
"""Strategies by parallelism; other combinations are in no plan."""
STAGES = {"1 process": 0, "DDP": 0, "ZeRO-2": 2, "ZeRO-3": 3}
HALF = " in bfloat16"
"""Ends the name of a cell whose weights are in bfloat16."""
SYNCED = ("Clone", "Offload", "Sharded")
MIXUP = 0.3
STEPS, SAVED = 6, 3
TOKENS = torch.tensor(
    [[(7 * row + 3 * column) % 90 + 6 for column in range(14)] for row in range(8)]
)
"""One fixed batch: 8 rows of 6 prompt and 8 completion tokens."""


def measure(folder: Path, cells: dict[str, list[str]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Facts of the strategies in `cells`, by parallelism. Collective under a process group."""
    model = folder / "model"
    if ranks.rank() == 0:
        demo_model.save_policy(model)
    ranks.gather(0)
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    for parallelism, strategies in cells.items():
        stage = STAGES[parallelism]
        for strategy in strategies:
            cell = folder / f"{parallelism}-{strategy}".replace(" ", "-")
            facts.setdefault(parallelism, {})[strategy] = _cell(cell, model, stage, strategy)
            runs.reset()
    return facts


def _cell(folder: Path, model: Path, stage: int, strategy: str) -> dict[str, Any]:
    """An uninterrupted run, probed before its first step, and one that starts at its checkpoint."""
    job = {"model": model, "zero": stage, "world_size": ranks.world_size(), **_arguments(strategy)}
    probe = Probe()
    whole_run = _run(folder, job, None, probe)
    resumed_run = _run(folder, job, f"checkpoint-{SAVED}", None)
    ranks.gather(0)
    if ranks.rank() == 0:
        shutil.rmtree(folder)
    return probe.facts | {
        "proofs": whole_run["proofs"],
        "uninterrupted": whole_run["logged"],
        "resumed": resumed_run["logged"],
        "proven": [what for what, *_ in resumed_run["proofs"]],
    }


def _run(
    folder: Path, job: dict[str, Any], checkpoint: str | None, probe: Probe | None
) -> dict[str, Any]:
    """What the steps after the checkpoint log, and what was proven."""
    runs.reset()
    logs = runs.Logs()
    settings = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": SAVED}
    trainer = runs.build(runs.plan(**job), logs, **settings)
    if probe:
        probe.trainer = trainer
        trainer.add_callback(probe)
    trainer.train(resume_from_checkpoint=str(folder / checkpoint) if checkpoint else None)
    proofs = [
        [proof.what, proof.parameters, proof.across_ranks, proof.seconds]
        for proof in trainer.proofs
    ]
    return {"logged": logs.numbers(SAVED + 1, STEPS), "proofs": proofs}


def _arguments(strategy: str) -> dict[str, Any]:
    """How a cell's plan differs from the default one: a moving reference wherever there is one."""
    reference: dict[str, Any] = (
        {"sync": {"everySteps": 2, "mixup": MIXUP}} if strategy in SYNCED else {}
    )
    if strategy.endswith(HALF):
        return _arguments(strategy.removesuffix(HALF)) | {"execution": {"dtype": "bfloat16"}}
    return {
        "strategy": strategy,
        "reference": reference,
        "training": {"beta": 0.0} if strategy == "None" else {},
    }


class Probe(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Looks at the wrapped models before the first step, and leaves them as they were."""

    trainer: ReferenceGRPOTrainer

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Scores the fixed batch with a policy that differs from the reference in a known way."""
        trainer = self.trainer
        start = whole(trainer.model)
        disturb(trainer.model)
        self.facts["policy"] = score(trainer, trainer.model_wrapped)
        if trainer.ref_model is not None:
            self.facts["reference"] = score(trainer, trainer.ref_model)
            self.facts["synced"] = mixed(trainer, ours=True)
            self.facts["synced_by_trl"] = mixed(trainer, ours=False)
        elif trainer.beta:
            with use_adapter(trainer.accelerator.unwrap_model(trainer.model), None):
                self.facts["reference"] = score(trainer, trainer.model)
        fill(trainer.model, start)


@torch.no_grad()
def disturb(model: nn.Module, scale: float = 0.02) -> None:
    """Adds a wave to every trained parameter: the same values however it is partitioned."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            with parameters.local_share(parameter) as share:
                wave = (
                    torch.arange(share.start, share.stop, dtype=torch.float64)
                    .mul(0.37)
                    .sin()
                    .mul(scale)
                )
                share.tensor.add_(wave.to(share.tensor.dtype))
            parameters.release(parameter)


@torch.no_grad()
def score(trainer: ReferenceGRPOTrainer, model: nn.Module) -> list[float]:
    """Log-probabilities of the fixed batch's completions, flattened; every rank scores all of
    it."""
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        model, TOKENS, torch.ones_like(TOKENS), 8
    )
    values: list[float] = logps.flatten().tolist()
    return values


def mixed(trainer: ReferenceGRPOTrainer, ours: bool) -> str:
    """Fingerprint of the whole reference after one sync, ours or TRL's; the reference is put
    back."""
    reference = unwrap_model(trainer.ref_model)
    before = whole(reference)
    score(trainer, trainer.ref_model)  # leaves persistent parameters gathered, as a step does
    if ours:
        mix_weights(trainer.model, reference, MIXUP)
    else:
        SyncRefModelCallback.sync_target_model(trainer.model, reference, MIXUP)
    after = whole(reference)
    score(trainer, trainer.ref_model)
    fill(reference, before)
    return combined_fingerprint(fingerprint(tensor) for tensor in after.values())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered."""
    tensors = {}
    for name, parameter in parameters.parameters_by_name(model).items():
        with parameters.gathered_share(parameter) as share:
            tensors[name] = share.tensor.clone()
    return tensors


@torch.no_grad()
def fill(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Puts whole parameters back."""
    for name, parameter in parameters.parameters_by_name(model).items():
        with parameters.local_share(parameter) as share:
            share.tensor.copy_(tensors[name][share.start : share.stop])
        parameters.release(parameter)
