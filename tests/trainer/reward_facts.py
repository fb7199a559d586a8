"""Trains a tiny model on GSM8K-like rows with every kind of reward at once, and says what TRL made
of them.

The rewards are seen inside TRL's own loop, in one process and in a ZeRO-3 gang. `measure` runs on
every rank.
"""

from pathlib import Path
from typing import Any

import torch

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.dataset import DatasetFiles, DatasetSpec
from grpo_api.spec.rewards import RewardSpec
from grpo_trainer.data.dataset import load_prompts
from grpo_trainer.reference.strategies import strategy_for
from grpo_trainer.rewards.reward_set import RewardSet, build_rewards
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.models import load_policy
from grpo_trainer.weights.policy_checks import check_states
from tests.support.ranks import runs

ROWS = Path(__file__).parent / "data" / "gsm8k-format.jsonl"
SETTINGS: tuple[str, ...] = (
    "learning_rate",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "beta",
)
"""Of trl.GRPOConfig."""


def measure(folder: Path, runs_of: list[dict[str, Any]]) -> dict[str, Any]:
    """For each run, by its name: logs of the last step, the settings that TRL runs with, the reward
    model's state.

    A run is a `name`, a `plan`, the folder `data` where the dataset's files are and the folder
    `root` of the rewards'.
    """
    return {run["name"]: _measured(run) for run in runs_of}


def _measured(run: dict[str, Any]) -> dict[str, Any]:
    runs.reset()
    job = TrainingPlan.model_validate(run["plan"])
    rewards = build_rewards(job.rewards, root=Path(run["root"]))
    try:
        return _trained(job, rewards, Path(run["data"]))
    finally:
        rewards.close()


def _trained(job: TrainingPlan, rewards: RewardSet, data: Path) -> dict[str, Any]:
    logs = runs.Logs()
    config = runs.configuration(job, reward_weights=rewards.weights)
    loaded = load_policy(job.model, job.execution, job.adapter)
    prompts = load_prompts(job.dataset, job.training, loaded.tokenizer, root=data)
    rewards.check_dataset(prompts.rows)
    trainer = ReferenceGRPOTrainer(
        loaded=loaded,
        strategy=strategy_for(
            job.execution, job.reference, trust_remote_code=job.model.trust_remote_code
        ),
        args=config,
        reward_funcs=list(rewards.functions),
        reward_processing_classes=rewards.processing_classes,
        train_dataset=prompts.rows,
        callbacks=[logs],
    )
    trainer.train()
    check_states(trainer)
    models = [function for function in rewards.functions if isinstance(function, torch.nn.Module)]
    return {
        "logs": {
            key: value
            for key, value in logs.rows[trainer.state.global_step].items()
            if isinstance(value, float)
        }
        | {"steps": trainer.state.global_step},
        "dtypes": sorted(
            {str(parameter.dtype) for model in models for parameter in model.parameters()}
        ),
        "elements": sum(parameter.numel() for model in models for parameter in model.parameters()),
        "policy_dtypes": sorted({str(parameter.dtype) for parameter in trainer.model.parameters()}),
        "rows": len(prompts.rows),
        "settings": {name: str(getattr(trainer.args, name)) for name in SETTINGS},
        "counters": {name: [c.timeouts, c.failures] for name, c in rewards.counters.items()},
    }


def job(
    model: Path, rewards: list[dict[str, Any]], zero: int = 0, world_size: int = 1
) -> TrainingPlan:
    """A plan for the GSM8K-like rows with these rewards."""
    base = runs.plan(
        model, "Sharded" if zero == 3 else "Clone", zero, world_size, training={"maxSteps": 2}
    )
    dataset = {
        "files": {"configMap": {"name": "rows"}, "paths": [ROWS.name]},
        "promptColumn": "question",
        "systemPrompt": "Answer.",
    }
    return base.model_copy(
        update={
            "dataset": DatasetSpec.model_validate(dataset),
            "rewards": [RewardSpec.model_validate(reward) for reward in rewards],
        }
    )


def gsm8k_job(model: Path, spec: GRPOJobSpec, rows: Path) -> TrainingPlan:
    """The GSM8K example with a tiny model, two steps and short completions; a character is a token
    here."""
    execution = {"microBatch": 4, "gradientAccumulation": 4, "stepsPerGeneration": 4}
    smaller = {"max_steps": 2, "max_prompt_length": 8192, "max_completion_length": 12}
    files = DatasetFiles.model_validate({"configMap": {"name": "rows"}, "paths": [rows.name]})
    return runs.plan(model, execution=execution).model_copy(
        update={
            "dataset": spec.dataset.model_copy(
                update={"name": None, "config": None, "files": files}
            ),
            "rewards": spec.rewards,
            "training": spec.training.model_copy(update=smaller),
        }
    )
