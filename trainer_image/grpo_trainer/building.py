"""Builds a run from its plan, up to the first step: rewards, configuration, policy, data, trainer and callbacks.

Much depends on the order, which is why it can be read in one place: reward models before GRPOConfig (inside ZeRO-3
they would be partitioned), GRPOConfig before the policy (which must be).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from grpo_api.plan.hang_timeouts import patience
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import DATASET_FINGERPRINT, Generations
from grpo_api.text.clock import Clock
from grpo_api.text.contract import DATA_MOUNT, DATA_MOUNT_ENV

from .checkpoints.continuing import FollowPlan
from .checkpoints.identity import identity
from .checkpoints.manifest import Manifest
from .checkpoints.resume import Beginning, begin
from .checkpoints.seal import SealCheckpoints
from .checkpoints.volume import read_manifest
from .clock import SYSTEM_CLOCK
from .data.columns import hidden
from .data.dataset import Prompts, load_prompts
from .data.order import Cadence, merged
from .engine import MakeEngine, ReferenceGRPOTrainer, Save
from .errors import BadInput
from .gang import rendezvous
from .generation.choosing import engine_maker
from .guard import EngineGuard, KLGuard, LossGuard
from .hub.repositories import Hub
from .process.preemption import Preemption
from .process.recorder import Recorder
from .process.watchdog import Watchdog
from .reference import strategy_for
from .rewards.reward_set import RewardSet, build_rewards
from .settings import config_arguments, uses_deepspeed
from .telemetry.logs import PublishLogs, log_line
from .telemetry.observer import StepObserver
from .telemetry.samples import KeepSamples
from .telemetry.step_exchange import StepExchange
from .weights.architecture import architecture_of
from .weights.models import LoadedModel, load_policy


@dataclass(frozen=True, slots=True)
class Run:
    """The built parts of a run."""

    trainer: ReferenceGRPOTrainer
    step_exchange: StepExchange
    seal: SealCheckpoints
    rewards: RewardSet
    prompts: Prompts
    beginning: Beginning
    """The checkpoint to continue, or the adapter that the policy began with."""
    cadence: Cadence


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The parts that the trainer is built from."""

    loaded: LoadedModel
    config: GRPOConfig
    prompts: Prompts
    rewards: RewardSet
    skipped: Sequence[Generations]
    """What is left out of the order of the data."""
    make_engine: MakeEngine | None
    """Makes what samples the completions; None where the policy does."""


def build(
    plan: TrainingPlan, recorder: Recorder, watchdog: Watchdog, observer: StepObserver, clock: Clock = SYSTEM_CLOCK
) -> Run:
    """Everything up to the first step. A collective.

    `observer` is new, `clock` the time by which the hub is waited for.

    Raises:
        TrainingError: the plan, the model, the data, a reward or the checkpoint can't be used.
    """
    recorder.stage("Loading")
    hub = Hub(plan.revisions, recorder.fetched, clock=clock)
    rewards = build_rewards(plan.rewards, device=device(plan), hub=hub)
    require_patience(plan, rewards.longest_seconds)
    if uses_deepspeed(plan.execution):
        rendezvous.prepare_deepspeed(plan)
    config = GRPOConfig(**config_arguments(plan), reward_weights=rewards.weights)
    with recorder.part("load"):
        loaded = load_policy(plan, hub)
    recorder.loaded(architecture_of(loaded.model))
    with recorder.part("data"):
        prompts = _load_data(plan, loaded, hub)
        rewards.check(prompts.rows)
    recorder.resolved({**hub.commits, DATASET_FINGERPRINT: prompts.fingerprint})
    _tell_prompts(prompts, recorder)
    run_identity = identity(plan, prompts.fingerprint)
    cadence = Cadence.of(plan, len(prompts.rows))

    def outdated(made: Manifest) -> bool:
        return cadence.outdated(made.step, made.skipped, plan.skipped)

    with recorder.part("verify"):
        beginning = begin(plan, run_identity, outdated, recorder.event)
    skipped = _skipped(plan, beginning)
    preemption = Preemption.of(plan)
    observer.clock.entered = recorder.phase
    step_exchange = StepExchange(recorder, watchdog, observer, preemption, rewards.failure_limits)
    seal = SealCheckpoints(plan, run_identity, recorder, preemption, skipped)
    callbacks = [step_exchange, seal, PublishLogs(recorder, observer), KeepSamples(plan, observer)]
    callbacks += [LossGuard(), KLGuard(plan.guard), EngineGuard(plan.guard), FollowPlan()]
    make_engine = engine_maker(plan, loaded.source, observer, recorder)
    parts = TrainerParts(replace(loaded, adapter=beginning.adapter), config, prompts, rewards, skipped, make_engine)
    recorder.stage("Proving")
    with recorder.part("trainer"):
        trainer = make_trainer(plan, parts, observer, callbacks, seal.save)
    recorder.startup("proof", sum(proof.seconds for proof in trainer.proofs))
    return Run(trainer, step_exchange, seal, rewards, prompts, beginning, cadence)


def _skipped(plan: TrainingPlan, beginning: Beginning) -> Sequence[Generations]:
    """What the plan leaves out, and what another run had whose checkpoint this one continues."""
    made = read_manifest(beginning.checkpoint).skipped if beginning.checkpoint else []
    return merged([*plan.skipped, *made])


def device(plan: TrainingPlan) -> torch.device:
    """The device of this process."""
    return torch.device("cpu" if plan.execution.accelerator == "CPU" else f"cuda:{torch.cuda.current_device()}")


def require_patience(plan: TrainingPlan, longest_seconds: float) -> None:
    """A reward may not take longer than the watchdog waits.

    Raises:
        BadInput: the rewards' declared time-outs exceed its patience.
    """
    limit = patience("Training", plan.guard, plan.execution)
    if longest_seconds >= limit:
        raise BadInput(
            f"the rewards' time-outs allow {longest_seconds:.0f} s for one batch, but a run without a finished step "
            f"for {limit:.0f} s is ended as a hang; raise guard.hangTimeoutSeconds, or lower the time-outs"
        )


def _tell_prompts(prompts: Prompts, recorder: Recorder) -> None:
    """Publish what became of the dataset: nobody notices from its results that half of it is not trained on."""
    recorder.logged({key: float(count) for key, count in prompts.counts.items()})
    if recorder.place.is_main:
        log_line(**prompts.counts)


def _load_data(plan: TrainingPlan, loaded: LoadedModel, hub: Hub) -> Prompts:
    root = Path(os.environ.get(DATA_MOUNT_ENV, DATA_MOUNT))
    return load_prompts(plan.dataset, plan.training, loaded.tokenizer, root=root, hub=hub)


def make_trainer(
    plan: TrainingPlan, parts: TrainerParts, observer: StepObserver, callbacks: list[TrainerCallback], save: Save
) -> ReferenceGRPOTrainer:
    """TRL's trainer with the plan's reference strategy; without transformers' own printing. A collective."""
    trainer = ReferenceGRPOTrainer(
        loaded=parts.loaded,
        strategy=strategy_for(plan),
        args=parts.config,
        observer=observer,
        save=save,
        generation_sub_batch=plan.execution.generation_sub_batch,
        make_engine=parts.make_engine,
        skipped=parts.skipped,
        reward_funcs=list(parts.rewards.functions),
        reward_processing_classes=parts.rewards.processing_classes,
        train_dataset=hidden(parts.prompts.rows),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
