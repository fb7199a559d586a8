"""One training process from rendezvous to the last step: build, prove, train, export.

Exists as the place where the parts meet; each part is a module of its own. Called by `__main__`, which imports it late:
this module pulls in torch and TRL.
"""

import os

from grpo_api.plan import TrainingPlan
from grpo_api.report import Outcome

from . import rendezvous
from .building import Run, build
from .errors import Preempted
from .export import export_model
from .outcome import announce, finished_attempt, keep
from .placement import Placement
from .recorder import Recorder
from .resuming import claim_folder
from .server import serve
from .telemetry import announce_start
from .watchdog import Watchdog


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
    announce_start(plan, recorder, run.checkpoint)
    try:
        run.trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
    finally:
        run.rewards.close()
    return _finish(plan, run, recorder)


def _end(plan: TrainingPlan, place: Placement, outcome: Outcome) -> None:
    """The watchdog's way out, past a main thread that may be stuck for good."""
    keep(plan, outcome, place)
    os._exit(announce(outcome))


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
