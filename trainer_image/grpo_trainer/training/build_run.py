"""Builds a run from its plan up to the first step: rewards, configuration, policy, data, engine and
trainer.

The order matters: reward models before GRPOConfig (inside ZeRO-3 they would be partitioned),
GRPOConfig before the policy (which must be).

A resumed run takes some settings from its plan where transformers would take the checkpoint's:
checkpoint.everySteps may change between two attempts. A run that begins with another run's
checkpoint may go further, so that its learning rate falls more slowly. The last rate of the other
run is often zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.report.report import LOAD
from grpo_api.report.revisions import DATASET_FINGERPRINT, Generations
from grpo_api.spec.checkpoint import SamplesSpec
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.keyword_arguments import Overrides
from grpo_api.spec.run_policy import GuardSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.clock import Clock

from ..checkpoints.checkpoint_target import (
    CheckpointSource,
    CheckpointTarget,
    address_of,
    open_source,
    open_target,
)
from ..checkpoints.manifest import Manifest, identity
from ..checkpoints.resume import Beginning, begin
from ..checkpoints.seal import SealCheckpoints
from ..checkpoints.volume_checkpoints import read_manifest
from ..data.dataset import Prompts, hide_columns, load_prompts
from ..data.order import Cadence, merge_spans
from ..gang import ranks, rendezvous
from ..generation import canary
from ..generation.colocated import ColocatedGeneration
from ..generation.generation_base import EngineGeneration, EngineSetup
from ..generation.remote_engines import ServersGeneration
from ..history.run_history import RunHistory
from ..hub.repositories import Hub
from ..process.compile_cache import CompileCache
from ..process.preemption import Preemption
from ..process.recorder import Recorder
from ..process.watchdog import Watchdog
from ..reference.strategies import strategy_for
from ..rewards.reward_set import RewardSet, build_rewards
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import BadInput
from ..telemetry.observer import KeepSamples, PublishLogs, SendLogs, StepObserver, log_numbers
from ..telemetry.step_exchange import StepExchange
from ..tracking.tracking import NO_TRACKING, Tracking
from ..weights.model_files import Source, require_decoder
from ..weights.models import architecture_of, load_policy
from .guard import EngineGuard, FindingGuard, KLGuard, LossGuard, RewardGuard
from .reference_trainer import ReferenceGRPOTrainer
from .trl_config import config_arguments, uses_deepspeed


def engine_maker(
    plan: TrainingPlan, source: Source, observer: StepObserver, recorder: Recorder
) -> Callable[[nn.Module, list[int]], EngineGeneration] | None:
    """Makes the plan's engine of the policy and the tokens that end a completion; None for
    Transformers."""
    if plan.execution.engine is None:
        return None
    setup = EngineSetup(
        plan, source.folder, observer.clock, recorder.record_metrics, recorder.record_event,
        partial(recorder.record_wait, "Engines"),
    )  # fmt: skip
    if plan.execution.engine.kind == "Servers":
        return partial(ServersGeneration, setup)
    return partial(_compile_engine, setup, recorder)


def _compile_engine(
    setup: EngineSetup, recorder: Recorder, model: nn.Module, stop_tokens: list[int]
) -> ColocatedGeneration:
    """The colocated engine. vLLM compiles while it is constructed. A collective."""
    place, clock = recorder.place, setup.clock
    recorder.enter_stage("Compiling")
    with recorder.measure_part("engine"):
        # It starts awake, with the memory that it has in a generation.
        clock.enter("generate")
        engine = ColocatedGeneration(setup, model, stop_tokens)
        clock.enter(LOAD)
        clock.take_seconds()  # the first step's begin after this
        # The constructor ends with a collective, so no process of the pod still writes.
        if place.local_rank == 0:
            CompileCache.of_pod(setup.plan.model, setup.plan.execution, place.node).publish()
    recorder.enter_stage("Proving")
    return engine


class FollowPlan(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Puts the plan's interval and schedule back in force; in a run with the checkpoint's own plan
    nothing changes."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        *,
        lr_scheduler: Any,
        **_: Any,
    ) -> None:
        """The checkpoint is loaded, and no step is taken yet.

        Raises:
            BadInput: the schedule has no step to decay in.
        """
        require_decay(args, state.max_steps)
        # transformers has restored the intervals of the checkpoint, and the plan's may differ.
        state.compute_steps(args, state.max_steps)
        # Under ZeRO the scheduler is inside accelerate's wrapper.
        while not isinstance(lr_scheduler, LambdaLR):
            lr_scheduler = lr_scheduler.scheduler
        set_scheduled_rate(lr_scheduler)


def require_decay(args: TrainingArguments, steps: int) -> None:
    """Check a schedule that can't be all warm-up: transformers (5.23) divides by the steps of the
    decay, after the last step.

    Raises:
        BadInput: the warm-up of lrSchedulerType polynomial takes all steps.
    """
    if args.lr_scheduler_type == "polynomial" and args.get_warmup_steps(steps) >= steps:
        raise BadInput(
            f"spec.training.warmupRatio takes all {steps} steps to warm up, and lrSchedulerType "
            "polynomial needs one to decay; lower warmupRatio, or set lrSchedulerType to linear"
        )


def set_scheduled_rate(scheduler: LambdaLR) -> None:
    """Set the rate of the next step to what the schedule says of it; every schedule of
    spec.training is a LambdaLR."""
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": rates})


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
    history: RunHistory
    target: CheckpointTarget | None
    """Where the run's checkpoints are; None where nothing is kept."""
    source: CheckpointSource | None
    """The checkpoints of spec.resumeFrom."""

    def address(self, checkpoint: Path) -> str:
        """Address of a checkpoint that the run made or began with, for messages."""
        return address_of(checkpoint, self.target, self.source)

    def is_own(self, checkpoint: Path) -> bool:
        """True if a checkpoint belongs to this job."""
        return is_in(self.target, checkpoint)


def is_in(target: CheckpointTarget | None, checkpoint: Path) -> bool:
    """True if a checkpoint is in the run's own folder."""
    return target is not None and checkpoint.is_relative_to(target.folder)


def build(
    plan: TrainingPlan,
    recorder: Recorder,
    watchdog: Watchdog,
    observer: StepObserver,
    clock: Clock = SYSTEM_CLOCK,
    *,
    tracking: Tracking = NO_TRACKING,
) -> Run:
    """Everything up to the first step. A collective.

    `observer` is new, `clock` the time by which the hub is waited for, `tracking` follows the logs.

    Raises:
        TrainingError: the plan, the model, the data, a reward or the checkpoint can't be used.
    """
    recorder.enter_stage("Loading")
    execution, training = plan.execution, plan.training
    hub = Hub(
        plan.revisions,
        recorder.record_fetched_bytes,
        report_total=recorder.record_expected_bytes,
        clock=clock,
        on_wait=partial(recorder.record_wait, "Hub"),
    )
    await_rewards = partial(recorder.record_wait, "Rewards")
    rewards = build_rewards(plan.rewards, device=device(execution), hub=hub, on_wait=await_rewards)
    require_patience(plan.guard, execution, rewards.longest_seconds)
    if uses_deepspeed(execution):
        rendezvous.prepare_deepspeed(execution)
    arguments = config_arguments(plan) | {"reward_weights": rewards.weights}
    config = make_config(arguments, training.overrides)
    with recorder.measure_part("load"):
        loaded = load_policy(plan.model, execution, plan.adapter, hub)
    recorder.record_architecture(architecture_of(loaded.model))
    require_router(training.overrides, loaded.model)
    with recorder.measure_part("data"):
        prompts = load_prompts(
            plan.dataset, training, loaded.tokenizer, vocabulary=loaded.vocabulary,
            template_kwargs=plan.model.chat_template_kwargs, hub=hub,
        )  # fmt: skip
        rewards.check_dataset(prompts.rows)
    recorder.record_revisions({**hub.commits, DATASET_FINGERPRINT: prompts.fingerprint})
    _tell_prompts(prompts, recorder)
    run_identity = identity(plan, prompts.fingerprint)
    cadence = Cadence.from_plan(execution, training, len(prompts.rows))

    def is_outdated(manifest: Manifest) -> bool:
        return cadence.is_outdated(manifest.step, manifest.skipped, plan.skipped)

    target = open_target(plan, on_answer=recorder.record_store_answer)
    source = open_source(plan, recorder.record_store_answer)
    with recorder.measure_part("verify"):
        beginning = begin(target, source, run_identity, execution.method, is_outdated)
    skipped = _all_skipped_spans(plan.skipped, beginning.checkpoint)
    preemption = Preemption(plan.grace_period_seconds, can_save=target is not None)
    observer.clock.on_phase_change = recorder.enter_phase
    step_exchange = StepExchange(recorder, watchdog, observer, preemption, rewards.failure_limits)
    seal = SealCheckpoints(target, source, run_identity, recorder, preemption, skipped=skipped)
    callbacks = [step_exchange, seal]
    history = open_history(plan.job.attempt, plan.samples, target, beginning.checkpoint)
    callbacks += log_callbacks(plan.guard, rewards, history, recorder, observer, tracking=tracking)
    make_engine = engine_maker(plan, loaded.source, observer, recorder)
    stop = _stop_strings(plan.generation, loaded.tokenizer)
    loaded = replace(loaded, adapter=beginning.adapter)
    recorder.enter_stage("Proving")
    with recorder.measure_part("trainer"):
        remote_code, sub_batch = plan.model.trust_remote_code, execution.generation_sub_batch
        strategy = strategy_for(execution, plan.reference, trust_remote_code=remote_code)
        trainer = make_trainer(
            prompts, rewards, history, callbacks,
            loaded=loaded, strategy=strategy, args=config, observer=observer, save=seal.save,
            generation_sub_batch=sub_batch, make_engine=make_engine, skipped=skipped, stop=stop,
        )  # fmt: skip
    if execution.engine is not None:
        trainer.engine_guard, trainer.canary_guard = _engine_guards(execution, training)
    recorder.record_startup("proof", sum(proof.seconds for proof in trainer.proofs))
    return Run(
        trainer, step_exchange, seal, rewards, prompts, beginning, cadence, history, target, source
    )


def open_history(
    attempt: int, samples: SamplesSpec, target: CheckpointTarget | None, checkpoint: Path | None
) -> RunHistory:
    """Open the run's history, which continues after that checkpoint. Rank 0 writes it. A
    collective."""
    is_main = ranks.rank() == 0
    if target:
        target.fetch_history()
    is_own = checkpoint is None or is_in(target, checkpoint)
    folder = target.attempt_folder if target else None
    return RunHistory(folder, attempt, samples, checkpoint, is_own=is_own, is_main=is_main)


def log_callbacks(
    guard: GuardSpec,
    rewards: RewardSet,
    history: RunHistory,
    recorder: Recorder,
    observer: StepObserver,
    *,
    tracking: Tracking,
) -> list[TrainerCallback]:
    """The callbacks on the logs of each step: telemetry, guards and trackers."""
    publish = PublishLogs(recorder, history, guard.max_kl)
    samples = KeepSamples(observer, history, tracking)
    guards = [
        LossGuard(),
        KLGuard(guard),
        RewardGuard(rewards.names),
        FindingGuard(guard, lambda: recorder.progress.findings),
    ]
    return [publish, samples, *guards, FollowPlan(), SendLogs(tracking)]


def make_config(arguments: dict[str, Any], overrides: Overrides) -> GRPOConfig:
    """GRPOConfig of arguments that contain the overrides.

    Only TRL, with torch and the GPU at hand, can judge some overrides. Rank 0's preflight imports
    no torch, so that they are judged here, before the policy loads.

    Raises:
        BadInput: GRPOConfig refuses an override.
    """
    try:
        return GRPOConfig(**arguments)
    except (TypeError, ValueError) as error:
        settings = overrides.arguments
        if not settings:
            raise
        named = [name for name in settings if name in str(error)] or list(settings)
        paths = ", ".join(f"spec.training.overrides.{name}" for name in named)
        raise BadInput(f"{paths}: GRPOConfig refuses the value: {error}; remove it") from error


def require_router(overrides: Overrides, model: Any) -> None:
    """Check what TRL's trainer would refuse once the policy is loaded.

    Raises:
        BadInput: a weight for the routers of a model that has none.
    """
    coefficient = overrides.router_aux_loss_coef
    has_router = hasattr(model.config.get_text_config(), "output_router_logits")
    if coefficient and not has_router:
        raise BadInput(
            f"spec.training.overrides.router_aux_loss_coef is {coefficient:g}, but the model is no "
            "mixture of experts that returns its routers' logits; remove it"
        )


def _engine_guards(
    execution: ExecutionPlan, training: TrainingSpec
) -> tuple[EngineGuard | None, EngineGuard]:
    """The guards over the completions and over the canaries of the plan's engine."""
    engine = execution.engine
    assert engine is not None
    world_size = execution.world_size
    completions = world_size * execution.micro_batch * execution.steps_per_generation
    canaries = world_size * canary.count_per_rank(engine.replicas, world_size)
    make_guard = partial(EngineGuard, engine, execution.compute_dtype, completions=completions)
    of_canaries = make_guard(canary_tokens=canaries * canary.length(training))
    return make_guard() if training.has_engine_comparison else None, of_canaries


def _all_skipped_spans(
    skipped: Sequence[Generations], checkpoint: Path | None
) -> Sequence[Generations]:
    """What the plan leaves out, and what the run had left out whose checkpoint this one
    continues."""
    inherited_spans = read_manifest(checkpoint).skipped if checkpoint else []
    return merge_spans([*skipped, *inherited_spans])


def device(execution: ExecutionPlan) -> torch.device:
    """The device of this process."""
    if execution.accelerator == "CPU":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def require_patience(guard: GuardSpec, execution: ExecutionPlan, longest_seconds: float) -> None:
    """A reward may not take longer than the watchdog waits.

    Raises:
        BadInput: the rewards' declared time-outs exceed its patience.
    """
    limit = hang_timeout_seconds("Training", guard, execution)
    if longest_seconds >= limit:
        raise BadInput(
            f"the rewards' time-outs allow {longest_seconds:.0f} s for one batch, but a run "
            f"without a finished step for {limit:.0f} s is ended as a hang; raise "
            "guard.hangTimeoutSeconds, or lower the time-outs"
        )


def _tell_prompts(prompts: Prompts, recorder: Recorder) -> None:
    """Publish what became of the dataset: its results do not show that half of it is not trained
    on."""
    recorder.record_metrics({key: float(count) for key, count in prompts.counts.items()})
    if recorder.place.is_main:
        log_numbers("prompts that are trained on", **prompts.counts)


def _stop_strings(generation: GenerationSpec, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """Texts that end a completion, which the tokenizer can find."""
    if not generation.stop:
        return ()
    require_decoder(tokenizer)
    return generation.stop


def make_trainer(
    prompts: Prompts,
    rewards: RewardSet,
    history: RunHistory,
    callbacks: list[TrainerCallback],
    **arguments: Any,
) -> ReferenceGRPOTrainer:
    """TRL's trainer with the reference strategy, of the further `arguments` of its constructor;
    without transformers' own printing. A collective."""
    trainer = ReferenceGRPOTrainer(
        save_samples=history.save_samples if history.keeps_samples else None,
        reward_funcs=list(rewards.functions),
        reward_processing_classes=rewards.processing_classes,
        train_dataset=hide_columns(prompts.rows),
        callbacks=callbacks,
        **arguments,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
