"""Small runs, each taken whole and again from where a kill would have left it: what both logged,
and their weights.

Any number that the resumed run logs otherwise is a defect, at whatever step, epoch, batch split or
reference it is. Tests say which cases; a process takes as many as it likes, alone or as a rank of a
gang.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

import torch
from torch import nn
from trl import GRPOConfig, GRPOTrainer

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.timing import Beginning
from grpo_trainer.checkpoints.volume_checkpoints import complete, sealed_at
from grpo_trainer.data.dataset import load_prompts
from grpo_trainer.gang import ranks
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.rewards.reward_set import build_rewards
from grpo_trainer.runtime.paths import number_in_name
from grpo_trainer.telemetry.observer import StepObserver
from grpo_trainer.tracking.tracking import NO_TRACKING, Tracking
from grpo_trainer.training.build_run import build
from grpo_trainer.training.trl_config import config_arguments
from grpo_trainer.weights.models import load_policy
from grpo_trainer.weights.parameters import combined_fingerprint, fingerprint
from tests.support.ranks.checkpoint_plans import claim_folder

from ..ranks import runs
from .history import of_run, without_clocks
from .reference_facts import whole

MIXUP = 0.3
GROUP = 2
"""Completions of one prompt, and of a micro-batch where a case says nothing else."""
ADAPTIVE = {
    "useAdaptiveEntropy": True,
    "entropyCoef": 0.02,
    "entropyTarget": 3.0,
    "topEntropyQuantile": 0.6,
}
"""An entropy bonus whose coefficient changes at each step, so that it is state of the run."""
REWARDS = [
    {"format": {"pattern": "[^0-9]*[0-9].*"}},
    {"name": "tall", "format": {"pattern": ".*[bdfhkl].*"}},
]


ADDED_BY_RANK_0 = ("findings", "checkpoint_step")
"""Keys of a row that the run's own logs of other ranks lack."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and where it is cut."""

    rows: int
    """Prompts of the dataset."""
    steps: int | None = None
    """maxSteps; None: epochs decide."""
    epochs: float = 1.0
    save: int
    """Steps between two checkpoints."""
    kill: int
    """Finished steps when the run is killed."""
    accumulation: int = 1
    """Micro-batches of a step."""
    ahead: int = 1
    """Micro-batches generated at a time (stepsPerGeneration)."""
    iterations: int = 1
    shuffle: bool = True
    sync: int = 0
    """Steps between two moves of the reference; 0: it stays."""
    strategy: str = "Clone"
    zero: int = 0
    micro_batch: int = GROUP
    """Completions of a micro-batch on each process."""
    checkpointing: bool = False
    loss: str = "dapo"
    sample_groups: int = 1
    """Groups that are kept of a sampled step."""
    training: dict[str, Any] = field(default_factory=dict)
    """Further fields of spec.training."""


@dataclass(frozen=True, slots=True)
class Story:
    """What an attempt did."""

    logged: dict[int, dict[str, Any]]
    """All that TRL logged and our row has besides, by step, but for times."""
    weights: str
    """Fingerprint of the trained model."""
    reference: str
    """Fingerprint of the reference; empty where it has no model of its own."""
    last: dict[str, Any]
    """Prompts, completions, rewards and advantages of the last generation, of all ranks."""
    samples: dict[int, Any]
    """Groups that the run's history has, by step, as rank 0 reads it."""


def plan(case: Case, folder: Path, attempt: int) -> TrainingPlan:
    """The case's plan; groups of two completions of four tokens. `folder` has `model` and the
    data."""
    world = ranks.world_size()
    made = runs.plan(
        folder / "model",
        case.strategy,
        case.zero,
        world,
        reference={"sync": {"everySteps": case.sync, "mixup": MIXUP}} if case.sync else {},
        # one prompt per step: a plan by the planner has whole steps in a generation, and these must
        # not
        training={"numGenerations": GROUP, "promptsPerStep": 1, "lossType": case.loss}
        | {"generationBatchSize": case.micro_batch * case.ahead * world}
        | {
            "maxCompletionLength": 4,
            "beta": 0.0 if case.strategy == "None" else 0.04,
            "lrSchedulerType": "cosine",
        }
        | {"numIterations": case.iterations, "numTrainEpochs": case.epochs, "maxSteps": case.steps}
        | case.training,
        execution={"microBatch": case.micro_batch, "gradientAccumulation": case.accumulation}
        | {"stepsPerGeneration": case.ahead, "saveEverySteps": case.save}
        | {"gradientCheckpointing": case.checkpointing},
        adapter={"dropout": 0.1},
        folder=folder / "runs",
    ).model_dump(by_alias=True)
    made["job"]["attempt"] = attempt
    made["checkpoint"]["keep"] = 1000
    made["dataset"] = {
        "files": {"volume": {"claimName": "data"}, "paths": [data(case)]},
        "shuffle": case.shuffle,
    }
    made["rewards"] = REWARDS
    made["samples"] = {"everySteps": 2, "groups": case.sample_groups}
    return TrainingPlan.model_validate(made)


def data(case: Case) -> str:
    """Name of the case's data file."""
    return f"{case.rows}-rows.jsonl"


def write_data(case: Case, folder: Path) -> None:
    """The case's prompts, all different."""
    lines = (json.dumps({"prompt": f"say {row}"}) + "\n" for row in range(case.rows))
    (folder / data(case)).write_text("".join(lines))


def train(
    case: Case,
    folder: Path,
    attempt: int,
    start: Path | None = None,
    tracking: Tracking = NO_TRACKING,
) -> Story:
    """One attempt of the case to its end, from the newest checkpoint that there is, or of `start`.
    A collective."""
    runs.reset()
    job = plan(case, folder, attempt).model_copy(update={"resume_from": start and str(start)})
    recorder = Recorder(
        job.job.attempt, Placement(ranks.rank(), ranks.rank(), ranks.world_size(), 1), time()
    )
    claim_folder(job)
    watchdog = Watchdog(
        job.guard, job.execution, job.grace_period_seconds, recorder, lambda *_: None
    )
    run = build(job, recorder, watchdog, StepObserver(), tracking=tracking)
    checkpoint = run.beginning.checkpoint
    if checkpoint:
        recorder.record_resume(number_in_name(checkpoint), sealed_at(checkpoint), Beginning())
    run.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    run.rewards.close()
    reference = run.trainer.ref_model
    return Story(
        logged(run.trainer),
        hashed(run.trainer.model),
        hashed(reference) if reference is not None else "",
        generated(run.trainer),
        sampled(folder / "runs") if case.sample_groups else {},
    )


def sampled(folder: Path) -> dict[int, Any]:
    """The groups of the run's samples, by step. A collective."""
    ranks.gather(None)
    groups = {line["step"]: line["groups"] for line in of_run(folder)[1]}
    # The next story clears the folder.
    ranks.gather(None)
    return groups


def generated(trainer: GRPOTrainer) -> dict[str, Any]:
    """What TRL keeps of the last generation, as plain lists."""
    logs = trainer._logs
    texts = {key: list(logs[key]) for key in ("prompt", "completion", "advantages")}
    return texts | {f"rewards/{name}": list(values) for name, values in logs["rewards"].items()}


def bare(case: Case, folder: Path) -> dict[int, dict[str, Any]]:
    """What TRL alone logs with the same configuration, data and rewards."""
    runs.reset()
    job = plan(case, folder, 1)
    rewards = build_rewards(job.rewards, device=torch.device("cpu"))
    loaded = load_policy(job.model, job.execution, job.adapter)
    config = GRPOConfig(**config_arguments(job), reward_weights=rewards.weights)
    if case.sync:
        config.sync_ref_model, config.ref_model_sync_steps, config.ref_model_mixup_alpha = (
            True,
            case.sync,
            MIXUP,
        )
    trainer = GRPOTrainer(
        model=loaded.model,
        processing_class=loaded.tokenizer,
        args=config,
        reward_funcs=list(rewards.functions),
        train_dataset=load_prompts(job.dataset, job.training, loaded.tokenizer, root=folder).rows,
    )
    trainer.train()
    rewards.close()
    return logged(trainer)


def log_of_plan(plan: TrainingPlan) -> dict[int, dict[str, Any]]:
    """Train a plan to its end in this process; return the rows of its history, by step."""
    recorder = Recorder(1, Placement(0, 0, 1, 1), time())
    watchdog = Watchdog(plan.guard, plan.execution, 30, recorder, lambda *_: None)
    run = build(plan, recorder, watchdog, StepObserver())
    run.trainer.train()
    run.rewards.close()
    return logged(run.trainer)


def logged(trainer: GRPOTrainer) -> dict[int, dict[str, Any]]:
    """The rows of the run's history, by step, but for times."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    rows = {entry["step"]: without_clocks(entry) for entry in steps}
    # Every rank of a resumed run begins with rank 0's rows, which have what only rank 0 adds.
    if ranks.rank():
        for row in rows.values():
            for key in ADDED_BY_RANK_0:
                row.pop(key, None)
    return rows


def hashed(model: nn.Module) -> str:
    """One fingerprint of all parameters, gathered."""
    return combined_fingerprint(fingerprint(tensor) for tensor in whole(model).values())


def differences(case: Case, folder: Path) -> list[str]:
    """What differs between the whole run and the one that was killed; nothing, as it should. A
    collective.

    The kill is what it leaves: the whole run's checkpoints up to that step.
    """
    undisturbed, resumed = (asdict(story) | {"last": {}} for story in killed(case, folder, case))
    return list(different(undisturbed, resumed))


def killed(case: Case, folder: Path, goes_on: Case) -> tuple[Story, Story]:
    """The whole run, and what it is if it was killed and another case goes on from its checkpoints.
    A collective."""
    if ranks.rank() == 0:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        write_data(case, folder)
    ranks.gather(None)
    undisturbed = train(case, folder, 1)
    if ranks.rank() == 0:
        for checkpoint in complete(folder / "runs"):
            if number_in_name(checkpoint) > case.kill:
                shutil.rmtree(checkpoint)
    ranks.gather(None)
    return undisturbed, train(goes_on, folder, 2)


def different(one: dict[str, Any], other: dict[str, Any], path: str = "") -> list[str]:
    """Every leaf of two nested dictionaries that differs."""
    differences = []
    for key in {**one, **other}:
        left, right, where = one.get(key), other.get(key), f"{path}/{key}"
        if isinstance(left, dict) and isinstance(right, dict):
            differences += different(left, right, where)
        elif left != right:
            differences.append(f"{where}: {left} and {right}")
    return differences


def several(folder: Path, cases: list[dict[str, Any]]) -> list[list[str]]:
    """The differences of several cases, as a scenario for a gang."""
    return [differences(Case(**case), folder) for case in cases]
