"""Single steps with chosen inputs: an overflowing KL, and the same batch split over ranks.

Generation can't be made to produce these. Runs on every rank of a gang, or in one process.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_trainer.gang import ranks
from grpo_trainer.runtime.errors import Diverged
from grpo_trainer.training import finite_loss
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer

from ..ranks import demo_model, runs
from .fault_facts import STAGES
from .reference_facts import TOKENS, whole

POISONED_STEP = 2
PROMPT = 6


def overflowed(folder: Path, parallelisms: list[str]) -> dict[str, dict[str, Any]]:
    """Logs of a run in which the last rank's KL overflows in step 2, whether its parameters are
    finite, and what ends a run whose KL can't be limited; by parallelism."""
    model = saved_model(folder)
    facts: dict[str, dict[str, Any]] = {}
    for parallelism in parallelisms:
        facts[parallelism] = {"rows": _poisoned(model, parallelism, -math.log(0.5) + 120.0)}
        try:
            _poisoned(model, parallelism, math.nan)
        except Diverged as error:
            facts[parallelism]["ended"] = str(error)
        runs.reset()
    return facts


def _poisoned(model: Path, parallelism: str, value: float) -> list[dict[str, Any]]:
    """What four steps log if one token's reference log-probability is `value` on the last rank in
    step 2."""
    runs.reset()
    logs = runs.Logs()
    trainer = _trainer(model, parallelism, logs, training={"maxSteps": 4})
    poison(trainer, value)
    trainer.train()
    keys = ("loss", "grad_norm", "kl", "entropy", finite_loss.KL_OVERFLOW_METRIC)
    rows = [{key: logs.rows[step].get(key) for key in keys} for step in range(1, 5)]
    finite = all(torch.isfinite(tensor).all().item() for tensor in whole(trainer.model).values())
    return [row | {"finite": finite} for row in rows]


def poison(trainer: ReferenceGRPOTrainer, value: float) -> None:
    """Makes one token's reference log-probability `value` in step 2, on the last rank only."""
    real = trainer._compute_loss

    def poisoned(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if (
            trainer.state.global_step == POISONED_STEP - 1
            and ranks.rank() == ranks.world_size() - 1
        ):
            reference = inputs["ref_per_token_logps"].clone()
            reference[0, 0] = value
            inputs = inputs | {"ref_per_token_logps": reference}
        return real(model, inputs)

    patched: Any = trainer
    patched._compute_loss = poisoned


def stepped(folder: Path, parallelisms: list[str]) -> dict[str, float]:
    """Takes one step on a fixed batch, split over the ranks, and leaves the parameters in
    `<parallelism>.safetensors`; the logged gradient norms.

    Adam's epsilon is 1, so that the step is proportional to the gradient.
    """
    model = saved_model(folder)
    norms = {}
    for parallelism in parallelisms:
        runs.reset()
        logs = runs.Logs()
        training = {"maxSteps": 1, "adamEpsilon": 1.0, "learningRate": 0.1, "maxGradNorm": 1e6}
        trainer: Any = _trainer(model, parallelism, logs, training=training)
        trainer._prepare_inputs = lambda _: fixed_inputs()
        trainer.train()
        after = whole(trainer.model)
        if ranks.rank() == 0:
            save_file(after, folder / f"{parallelism}.safetensors")
        norms[parallelism] = logs.rows[1]["grad_norm"]
    runs.reset()
    return norms


def fixed_inputs() -> dict[str, Any]:
    """This rank's rows of a batch with known advantages, as TRL's loss takes them."""
    mine = slice(ranks.rank(), None, ranks.world_size())
    tokens = TOKENS[mine]
    completion_mask = torch.ones_like(TOKENS[:, PROMPT:])
    completion_mask[3, 5:] = 0
    return {
        "prompt_ids": tokens[:, :PROMPT],
        "prompt_mask": torch.ones_like(tokens[:, :PROMPT]),
        "completion_ids": tokens[:, PROMPT:],
        "completion_mask": completion_mask[mine],
        "advantages": torch.linspace(-1, 1.5, len(TOKENS))[mine],
        "num_items_in_batch": completion_mask.sum(),
        "ref_per_token_logps": torch.linspace(-3, -1, completion_mask.numel()).view(
            completion_mask.shape
        )[mine],
    }


def saved_model(folder: Path) -> Path:
    """The demo model, written by rank 0."""
    if ranks.rank() == 0:
        demo_model.save_policy(folder / "model")
    ranks.gather(0)
    return folder / "model"


def _trainer(
    model: Path, parallelism: str, logs: runs.Logs, training: dict[str, Any]
) -> ReferenceGRPOTrainer:
    stage, strategy = STAGES[parallelism]
    job = runs.plan(model, strategy, stage, ranks.world_size(), training=training)
    return runs.build(job, logs, output_dir=str(model.parent / "output"), save_strategy="no")
