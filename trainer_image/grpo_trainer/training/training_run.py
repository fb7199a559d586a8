"""Runs a plan from building to export: build, prove, train, export. Importing this module imports
torch and TRL.

Where memory runs out, the number of bytes is read from the exception, since the next plan needs
numbers. The size is only in torch's text. Of a device it says `Tried to allocate 2.00 GiB`
(c10/cuda/CUDACachingAllocator.cpp). Of the host it says `you tried to allocate 512 bytes`
(c10/core/impl/alloc_cpu.cpp).
"""

import os
import re
from functools import partial
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import MemoryShortage, Result
from grpo_api.report.training_metrics import OUTCOME_KEYS
from grpo_api.text.clock import Clock
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.timing import Beginning

from ..checkpoints.checkpoint_target import CheckpointTarget
from ..checkpoints.export import describe_export, export_model
from ..checkpoints.provenance import ProvenanceFacts, write_provenance
from ..checkpoints.volume_checkpoints import describe_checkpoint, read_manifest, sealed_at
from ..gang import ranks, rendezvous
from ..hub.model_card import HERE, TrainedModel, write_card
from ..hub.push import push_folder, require_target
from ..process.process_setup import keep_freed_memory
from ..process.recorder import Recorder
from ..process.watchdog import Watchdog
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import (
    BadInput,
    Diverged,
    DivergedKL,
    HubUnavailable,
    Preempted,
    classify_error,
    is_host_shortage,
)
from ..runtime.paths import number_in_name
from ..telemetry.observer import StepObserver, log_numbers, translate_logs
from ..telemetry.phases import PhaseClock
from ..telemetry.step_exchange import resident_bytes
from ..tracking.tracking import NO_TRACKING, Tracking
from .build_run import Run, build

_ASKED = re.compile(r"ried to allocate ([0-9]{1,20}(?:\.[0-9]{1,9})?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def shortage_of(error: BaseException, clock: PhaseClock) -> MemoryShortage | None:
    """The memory shortage that ended the run; None for another kind of end."""
    if classify_error(error)[0] is not Result.OUT_OF_MEMORY:
        return None
    phase, peak = clock.record_shortage()
    facts = {"phase": phase, "requested_bytes": requested_bytes(str(error))}
    if is_host_shortage(error):
        facts |= {"memory": "Host", "allocated_bytes": resident_bytes()}
    else:
        facts |= {"memory": "Device", "allocated_bytes": peak}
    return MemoryShortage.model_validate(facts)


def requested_bytes(text: str) -> int:
    """Bytes that torch's message says were asked for; 0 where it doesn't."""
    request = _ASKED.search(text)
    return min(MAX_COUNT, round(float(request[1]) * _UNITS[request[2]])) if request else 0


def run(
    plan: TrainingPlan,
    recorder: Recorder,
    watchdog: Watchdog,
    clock: Clock = SYSTEM_CLOCK,
    tracking: Tracking = NO_TRACKING,
) -> str:
    """Train and export; returns the sentence for the Outcome. A collective.

    `clock`: the time by which the hub is waited for. `tracking`: the caller ends it.

    Raises:
        TrainingError: any of its kinds; other exceptions are bugs, or failures of the machine.
    """
    observer = StepObserver(recorder.counters if recorder.place.is_main else None)
    hub = plan.export.hub if plan.export else None
    try:
        if hub:
            on_wait = partial(recorder.record_wait, "Hub")
            ranks.run_on_rank0(
                lambda: require_target(hub, lambda _: recorder.record_event(), clock, on_wait)
            )
        built = build(plan, recorder, watchdog, observer, clock, tracking=tracking)
        _announce_start(plan.job.attempt, recorder, built)
        _train(plan.execution.accelerator, recorder, built)
        return _finish(plan, built, recorder, clock)
    except Exception as error:
        recorder.shortage = shortage_of(error, observer.clock)
        raise


def _train(accelerator: str, recorder: Recorder, built: Run) -> None:
    """Take all steps, and leave rewards and history as they are to be kept."""
    checkpoint = built.beginning.checkpoint
    if accelerator == "CPU":
        keep_freed_memory(os.environ)
    try:
        built.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        # what the last step made is exported, whether a checkpoint has it or not
        built.trainer.require_finite()
    except Diverged as error:
        if not isinstance(error, DivergedKL):
            recorder.record_nonfinite_step(error.step)
        raise _explain_divergence(error, built) from error
    finally:
        built.rewards.close()
        built.history.finish()
        if built.target and recorder.place.is_main:
            built.target.send_history()


def _announce_start(attempt: int, recorder: Recorder, run: Run) -> None:
    """Say where this attempt begins and, in the log, what it leaves out."""
    checkpoint = run.beginning.checkpoint
    adapter = run.beginning.adapter
    step, address, own_checkpoint = 0, None, None
    if checkpoint:
        step = read_manifest(checkpoint).step
        address = run.address(checkpoint)
        if run.is_own(checkpoint):
            own_checkpoint = describe_checkpoint(checkpoint, address)
    recorder.checkpoint_step = step
    if recorder.place.is_main:
        saved_at = sealed_at(checkpoint) if checkpoint else 0.0
        recorder.record_resume(step, saved_at, _resumed_beginning(run), own_checkpoint)
        left_out = [(span.first, span.last) for span in run.trainer.skipped]
        log_numbers(
            f"attempt {attempt} begins after step {step}",
            resumedFromStep=step,
            checkpoint=address,
            adapter=str(adapter) if adapter else None,
            skipped=left_out or None,
        )


def _resumed_beginning(run: Run) -> Beginning:
    """Which attempt's time this one goes on from; another run's is no time of this job."""
    checkpoint = run.beginning.checkpoint
    if checkpoint is None or not run.is_own(checkpoint):
        return Beginning()
    manifest = read_manifest(checkpoint)
    return Beginning(attempt=manifest.attempt, clock=manifest.clock)


def _explain_divergence(error: Diverged, run: Run) -> Diverged:
    """The same end with what a rollback needs: the last checkpoint, and what the run diverged
    on."""
    checkpoint = run.seal.last or run.beginning.checkpoint
    last_good = "No checkpoint was saved before"
    if checkpoint is not None:
        last_good = f"The last good checkpoint is {run.address(checkpoint)}"
    explained = type(error)(f"{error}. {last_good}", error.step)
    if error.step:
        explained.diverged_on = run.cadence.generations_of_step(error.step, run.trainer.skipped)
    return explained


def _finish(plan: TrainingPlan, run: Run, recorder: Recorder, clock: Clock = SYSTEM_CLOCK) -> str:
    """Export a finished run; say how far a preempted one came."""
    step, verdict = run.trainer.state.global_step, run.step_exchange.verdict
    saved_step = number_in_name(run.seal.last) if run.seal.last else None
    if verdict == "save" and saved_step == step:
        raise Preempted(f"SIGTERM; a checkpoint was saved at step {step}")
    if verdict == "save":
        problem = recorder.progress.checkpoint_problem
        raise Preempted(
            f"SIGTERM; stopped at step {step}, the checkpoint before stands, for {problem}"
        )
    if verdict == "stop":
        raise Preempted(f"SIGTERM; stopped at step {step}, the last periodic checkpoint stands")
    recorder.enter_stage("Exporting")
    write_model_card = partial(write_card, _trained_model(plan, run, recorder))

    def describe(folder: Path) -> None:
        write_model_card(folder)
        run.history.save_rows(folder)
        if not (plan.export and plan.export.hub):
            # Prompts are the user's data: they don't leave for a hub.
            run.history.save_samples(folder)

    facts = ProvenanceFacts(
        plan=plan, source=run.trainer.source, proofs=run.trainer.proofs,
        progress=recorder.progress, started=recorder.started_at,
    )  # fmt: skip
    attest = partial(write_provenance, facts)
    folder = export_model(
        plan, run.target, run.trainer.source, run.trainer.write_model,
        describe=describe, attest=attest, report_bytes=lambda _: recorder.record_event(),
    )  # fmt: skip
    where = "spec.export keeps no model"
    if folder:
        where = _deliver_export(plan, run.target, folder, recorder, clock)
    rendezvous.leave_gang()
    return f"trained {step} steps; {where}{run.prompts.dropped_message}"


def _trained_model(plan: TrainingPlan, run: Run, recorder: Recorder) -> TrainedModel:
    """The facts about the model for its card. If an attempt finds all steps done, the last step's
    numbers come from the checkpoint."""
    state = run.trainer.state
    steps = [logs for logs in state.log_history if "loss" in logs]
    translated = translate_logs(steps[-1]) if steps else {}
    # A key with a slash is of one reward function, which no key of training_metrics.py names.
    metrics = {key: translated[key] for key in translated if key in OUTCOME_KEYS or "/" in key}
    hub = plan.export.hub if plan.export else None
    return TrainedModel(
        plan=plan, steps=state.global_step, metrics=metrics,
        revisions=recorder.progress.revisions, address=hub.repository if hub else HERE,
    )  # fmt: skip


def _deliver_export(
    plan: TrainingPlan,
    target: CheckpointTarget | None,
    folder: Path,
    recorder: Recorder,
    clock: Clock,
) -> str:
    """Send an exported model on to where the plan wants it; says where it is. A collective."""
    url = target.send_export(folder) if target else None
    local_copy = str(folder) if target else ""
    durable_copy = url or local_copy
    hub, address = plan.export.hub if plan.export else None, ""
    if hub:
        message = f"GRPO of {plan.model.name}, {recorder.step} steps"
        push = partial(
            push_folder, folder, hub, message, lambda _: recorder.record_event(),
            is_only_copy=not durable_copy, clock=clock,
            on_wait=partial(recorder.record_wait, "Hub"),
        )  # fmt: skip
        try:
            commit = ranks.run_on_rank0(push)
        except (BadInput, HubUnavailable) as error:
            elsewhere = f"; the model is in {durable_copy}" if durable_copy else ""
            raise type(error)(f"{error}{elsewhere}") from error
        address = f"hf://{hub.repository}@{commit}"
    if recorder.place.is_main:
        recorder.export = describe_export(folder, url)
        if hub:
            at_hub = {"to": "Hub", "path": address}
            recorder.export = recorder.export.model_copy(update=at_hub)
    return "the model is in " + " and in ".join(filter(None, (address, durable_copy)))
