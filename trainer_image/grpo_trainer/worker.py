"""One training process from rendezvous to the last step: build, prove, train, export.

Exists as the place where the parts meet; each part is a module of its own. Called by `__main__`, which imports it late:
this module pulls in torch and TRL.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from grpo_api.contract import DATA_MOUNT, DATA_MOUNT_ENV
from grpo_api.plan import TrainingPlan
from grpo_api.report import Outcome

from . import rendezvous
from .data import Prompts, load_prompts
from .engine import ReferenceGRPOTrainer
from .errors import Preempted
from .export import export_model
from .identity import identity
from .models import LoadedModel, load_policy
from .outcome import announce, finished_attempt, keep
from .phases import PhaseClock
from .placement import Placement
from .preemption import Preemption
from .pulse import Pulse
from .recorder import Recorder
from .reference import strategy_for
from .resuming import choose, claim_folder
from .rewards import RewardSet, build_rewards
from .saving import SealCheckpoints
from .server import serve
from .settings import config_arguments, uses_deepspeed
from .telemetry import KLGuard, Telemetry
from .watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Run:
    """The built parts of a run."""

    trainer: ReferenceGRPOTrainer
    pulse: Pulse
    rewards: RewardSet
    checkpoint: Path | None
    """The checkpoint to continue from."""


def train(plan: TrainingPlan, place: Placement, recorder: Recorder) -> str:
    """Run the plan to its end; returns the sentence for the Outcome.

    Raises:
        TrainingError: any of its kinds; other exceptions are bugs, or failures of the machine.
    """
    if place.is_main:
        serve(recorder)
    watchdog = Watchdog(plan, recorder, lambda outcome: _end(plan, place, outcome))
    watchdog.start()
    with recorder.part("rendezvous"):
        rendezvous.join(plan, place)
    claim_folder(plan)
    earlier = finished_attempt(plan)
    if earlier is not None:
        return f"attempt {earlier.attempt} had finished already: {earlier.message}"
    run = build(plan, recorder, watchdog)
    try:
        run.trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
    finally:
        run.rewards.close()
    return _finish(plan, run, recorder)


def _end(plan: TrainingPlan, place: Placement, outcome: Outcome) -> None:
    """The watchdog's way out, past a main thread that may be stuck for good."""
    keep(plan, outcome, place)
    os._exit(announce(outcome))


def build(plan: TrainingPlan, recorder: Recorder, watchdog: Watchdog) -> Run:
    """Everything up to the first step."""
    recorder.stage("Loading")
    rewards = build_rewards(plan.rewards)
    if uses_deepspeed(plan.execution):
        rendezvous.prepare_deepspeed(plan)
    config = GRPOConfig(**config_arguments(plan), reward_weights=rewards.weights)
    with recorder.part("load"):
        loaded = load_policy(plan)
    with recorder.part("data"):
        prompts = load_prompts(
            plan.dataset, plan.training, loaded.tokenizer, root=Path(os.environ.get(DATA_MOUNT_ENV, DATA_MOUNT))
        )
    run_identity = identity(plan, prompts.fingerprint)
    checkpoint = choose(plan, run_identity)
    preemption = Preemption.of(plan)
    pulse = Pulse(recorder, watchdog, PhaseClock(), preemption)
    seal = SealCheckpoints(plan, run_identity, recorder, preemption)
    callbacks = [pulse, seal, Telemetry(recorder), KLGuard(plan.guard)]
    recorder.stage("Proving")
    with recorder.part("trainer"):
        trainer = _trainer(plan, loaded, config, prompts, rewards, callbacks)
    return Run(trainer, pulse, rewards, checkpoint)


def _trainer(
    plan: TrainingPlan,
    loaded: LoadedModel,
    config: GRPOConfig,
    prompts: Prompts,
    rewards: RewardSet,
    callbacks: list[Any],
) -> ReferenceGRPOTrainer:
    return ReferenceGRPOTrainer(
        loaded=loaded,
        strategy=strategy_for(plan),
        args=config,
        reward_funcs=list(rewards.functions),
        train_dataset=prompts.rows,
        callbacks=callbacks,
    )


def _finish(plan: TrainingPlan, run: Run, recorder: Recorder) -> str:
    """Export a finished run; say how far a preempted one came."""
    state = run.trainer.state
    if run.pulse.verdict == "save":
        raise Preempted(f"SIGTERM; a checkpoint was saved at step {state.global_step}")
    if run.pulse.verdict == "stop":
        raise Preempted(f"SIGTERM; stopped at step {state.global_step}, the last periodic checkpoint stands")
    recorder.stage("Exporting")
    folder = export_model(plan, run.trainer)
    rendezvous.leave_together()
    recorder.stage("Finished")
    where = f"; the model is in {folder}" if folder else "; no checkpoint volume, so no model was exported"
    return f"trained {state.global_step} steps{where}"
