"""Plans and trainers for the reference tests, built as the worker builds them, without its
telemetry and checkpoints.

Every test and benchmark of references says only what it varies.
"""

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from grpo_acceptance import trial_runs
from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.gang import rendezvous
from grpo_trainer.reference.strategies import strategy_for
from grpo_trainer.training.reference_trainer import MakeEngine, ReferenceGRPOTrainer
from grpo_trainer.training.trl_config import config_arguments, uses_deepspeed
from grpo_trainer.weights.models import LoadedModel, load_policy

reset = trial_runs.reset_parallelism
"""Forgets the last trainer's parallelism, so that one process can run several; the process group
stays."""
PROMPTS = [{"prompt": f"say {number % 10}"} for number in range(64)]
COMPLETION = 8
BATCH = 8
"""Completions per step over all ranks; two groups of four."""


class Logs(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Keeps what TRL logs, by step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def on_log(
        self, _: Any, state: Any, *__: Any, logs: dict[str, Any] | None = None, **___: Any
    ) -> None:
        """Merges one log."""
        self.rows.setdefault(state.global_step, {}).update(logs or {})

    def numbers(self, first: int, last: int) -> list[dict[str, float]]:
        """What must be the same in a resumed run, for steps `first` to `last`."""
        keys = (
            "loss",
            "grad_norm",
            "reward",
            "kl",
            "entropy",
            "completions/mean_length",
            "learning_rate",
        )
        return [
            {key: self.rows[step][key] for key in keys if key in self.rows[step]}
            for step in range(first, last + 1)
        ]


def plan(
    model: Path,
    strategy: str = "Clone",
    zero: int = 0,
    world_size: int = 1,
    *,
    reference: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    execution: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> TrainingPlan:
    """A plan for one of the demo models on CPUs; LoRA for strategy Adapter."""
    method = "LoRA" if strategy == "Adapter" else "Full"
    settings = {
        "strategy": strategy,
        "method": method,
        "zeroStage": zero,
        "accelerator": "CPU",
        "processesPerNode": world_size,
        "microBatch": BATCH // world_size,
        "gradientAccumulation": 1,
        "stepsPerGeneration": 1,
        "dtype": "float32",
        "saveEverySteps": 3,
    }
    return TrainingPlan.model_validate(
        {
            "job": {"namespace": "default", "name": "demo", "uid": "0", "attempt": 1},
            "rendezvous": {"address": "127.0.0.1"},
            "model": {"name": str(model), "parameters": "84K"},
            "dataset": {"name": "demo/prompts"},
            "rewards": [{"python": {"function": "demo:digits"}}],
            "training": {
                "learningRate": 1e-3,
                "numGenerations": 4,
                "promptsPerStep": 2,
                "maxSteps": 6,
            }
            | {"maxCompletionLength": COMPLETION, "lrSchedulerType": "constant"}
            | (training or {}),
            "reference": {"strategy": strategy} | (reference or {}),
            "adapter": {"rank": 4, "alpha": 8} | (adapter or {}),
            "checkpoint": {},
            "guard": {},
            "checkpointDirectory": str(folder) if folder else None,
            "execution": settings | (execution or {}),
        }
    )


def digits(completions: list[str], **_: Any) -> list[float]:
    """A deterministic reward: share of digits in a completion."""
    return [
        sum(letter.isdigit() for letter in completion) / COMPLETION for completion in completions
    ]


def configuration(job: TrainingPlan, **overrides: Any) -> GRPOConfig:
    """The plan's GRPOConfig, made the way the worker makes it."""
    if uses_deepspeed(job.execution):
        rendezvous.prepare_deepspeed(job.execution)
    return GRPOConfig(**{**config_arguments(job), "log_level": "error", **overrides})


def build(job: TrainingPlan, *callbacks: TrainerCallback, **overrides: Any) -> ReferenceGRPOTrainer:
    """A trainer for the plan, with its model."""
    config = configuration(job, **overrides)
    return trainer(job, config, load_policy(job.model, job.execution, job.adapter), *callbacks)


def trainer(
    job: TrainingPlan,
    config: GRPOConfig,
    loaded: LoadedModel,
    *callbacks: TrainerCallback,
    rewards: Any = digits,
    reward_tokenizers: Any = None,
    make_engine: MakeEngine | None = None,
) -> ReferenceGRPOTrainer:
    """A trainer for the plan with a model that may differ from the plan's."""
    built = ReferenceGRPOTrainer(
        loaded=loaded,
        strategy=strategy_for(
            job.execution, job.reference, trust_remote_code=job.model.trust_remote_code
        ),
        args=config,
        generation_sub_batch=job.execution.generation_sub_batch,
        stop=job.generation.stop or (),
        make_engine=make_engine,
        reward_funcs=rewards,
        reward_processing_classes=reward_tokenizers,
        train_dataset=Dataset.from_list(PROMPTS),
        callbacks=list(callbacks),
    )
    built.remove_callback(PrinterCallback)
    return built
