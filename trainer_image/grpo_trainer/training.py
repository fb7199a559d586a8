"""A run from its plan to its last step: build, prove, train, export.

The parts meet here; each is a module of its own. Importing this module imports torch, TRL and all that they need.
"""

from pathlib import Path

from grpo_api.plan import TrainingPlan
from grpo_api.timing import Beginning

from .building import Run, build
from .checkpoints.export import export_model
from .checkpoints.volume import read_manifest, sealed_at
from .errors import Diverged, DivergedKL, Preempted
from .gang import rendezvous
from .paths import number, run_folder
from .process.recorder import Recorder
from .process.watchdog import Watchdog
from .telemetry.logs import log_line
from .telemetry.observer import StepObserver
from .telemetry.shortage import shortage_of


def run(plan: TrainingPlan, recorder: Recorder, watchdog: Watchdog) -> str:
    """Train and export; returns the sentence for the Outcome. A collective.

    Raises:
        TrainingError: any of its kinds; other exceptions are bugs, or failures of the machine.
    """
    observer = StepObserver()
    try:
        return _run(plan, recorder, watchdog, observer)
    except Exception as error:
        recorder.shortage = shortage_of(error, observer.clock)
        raise


def _run(plan: TrainingPlan, recorder: Recorder, watchdog: Watchdog, observer: StepObserver) -> str:
    """Build, train and export."""
    built = build(plan, recorder, watchdog, observer)
    _announce_start(plan, recorder, built)
    checkpoint = built.beginning.checkpoint
    try:
        built.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        built.trainer.require_finite()  # what the last step made is exported, whether a checkpoint has it or not
    except Diverged as error:
        if not isinstance(error, DivergedKL):
            recorder.not_finite(error.step)
        raise _explained(error, built) from error
    finally:
        built.rewards.close()
    return _finish(plan, built, recorder)


def _announce_start(plan: TrainingPlan, recorder: Recorder, run: Run) -> None:
    """Say where this attempt begins and, in the log, what it leaves out."""
    checkpoint, adapter, skipped = run.beginning.checkpoint, run.beginning.adapter, run.trainer.skipped
    recorder.checkpoint_step = step = number(checkpoint) if checkpoint else 0
    if recorder.place.is_main:
        recorder.resumed(step, sealed_at(checkpoint) if checkpoint else 0.0, _began_at(plan, checkpoint))
        log_line(
            attempt=plan.job.attempt,
            resumedFromStep=step,
            checkpoint=checkpoint and str(checkpoint),
            adapter=adapter and str(adapter),
            skipped=[(one.first, one.last) for one in skipped] or None,
        )


def _began_at(plan: TrainingPlan, checkpoint: Path | None) -> Beginning:
    """Which attempt's time this one goes on from; another run's is no time of this job."""
    folder = run_folder(plan)
    if checkpoint is None or folder is None or not checkpoint.is_relative_to(folder):
        return Beginning()
    manifest = read_manifest(checkpoint)
    return Beginning(attempt=manifest.attempt, clock=manifest.clock)


def _explained(error: Diverged, run: Run) -> Diverged:
    """The same end with what a rollback needs: the last checkpoint, and what the run diverged on."""
    told = type(error)(f"{error}. {_last_good(run)}", error.step)
    if error.step:
        told.diverged_on = run.cadence.trained_on(error.step, run.trainer.skipped)
    return told


def _last_good(run: Run) -> str:
    """The checkpoint that a run which has diverged can go back to, as a sentence."""
    found = run.seal.last or run.beginning.checkpoint
    return f"The last good checkpoint is {found}" if found else "No checkpoint was saved before"


def _finish(plan: TrainingPlan, run: Run, recorder: Recorder) -> str:
    """Export a finished run; say how far a preempted one came."""
    state = run.trainer.state
    if run.step_exchange.verdict == "save" and run.seal.last and number(run.seal.last) == state.global_step:
        raise Preempted(f"SIGTERM; a checkpoint was saved at step {state.global_step}")
    if run.step_exchange.verdict == "save":
        problem = recorder.progress.checkpoint_problem
        raise Preempted(f"SIGTERM; stopped at step {state.global_step}, the checkpoint before stands, for {problem}")
    if run.step_exchange.verdict == "stop":
        raise Preempted(f"SIGTERM; stopped at step {state.global_step}, the last periodic checkpoint stands")
    recorder.stage("Exporting")
    folder = export_model(plan, run.trainer.source, run.trainer.write_model)
    rendezvous.leave_together()
    recorder.stage("Finished")
    where = f"; the model is in {folder}" if folder else "; no checkpoint volume, so no model was exported"
    return f"trained {state.global_step} steps{where}{run.prompts.left_out}"
