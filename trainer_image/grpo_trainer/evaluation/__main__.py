"""`python -m grpo_trainer.evaluation`: what a job's exported model earns on held-out rows.

In a pod it is the command of a GRPOJob whose `resumeFrom` names the job that trains. It waits for
that job's model and ends with the Outcome that the operator waits for. Dataset, rewards and
sampling are those of its own spec, so that they are written, mounted and planned as for training.
Elsewhere GRPO_PLAN names a plan's file and --export the folder.
"""

import argparse
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.text.contract import EXPORT_FOLDER

from ..__main__ import exit_process
from ..gang.placement import placement
from ..process.outcome import announce_outcome, last_success
from ..process.recorder import Recorder
from ..runtime.clock import SYSTEM_CLOCK, unix_time
from ..runtime.errors import BadInput, Transient, classify_error
from ..runtime.logs import configure_logs
from ..runtime.plan_file import read_plan
from ..stores.run_store import StoredRun, export_key, source_run
from ..telemetry.progress_server import limits_of, serve
from .score import as_json, reported_reward, score_message

log = logging.getLogger("grpo_trainer")

POLL_SECONDS = 1.0
WAIT_SECONDS = 1500.0
"""Less than spec.guard.hangTimeoutSeconds, so that it is this process that says what it waited
for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, and say how it ended; returns the exit code."""
    attempt = 0
    configure_logs()

    def stop(*_: object) -> None:
        end = Outcome(result=Result.PREEMPTED, attempt=attempt)
        exit_process(announce_outcome(truncate_to_fit(end, "evaluation: SIGTERM")))

    # The first process of a container isn't ended by SIGTERM unless it says so.
    signal.signal(signal.SIGTERM, stop)
    try:
        plan = read_plan()
        configure_logs(plan.job)
        attempt = plan.job.attempt
        outcome = evaluate(plan, parse_options(arguments))
    except Exception as error:
        log.exception("ended by an error")
        result, message = classify_error(error)
        outcome = truncate_to_fit(Outcome(result=result), message)
    return announce_outcome(outcome.model_copy(update={"attempt": attempt}))


def evaluate(plan: TrainingPlan, options: argparse.Namespace) -> Outcome:
    """The Outcome of an evaluation, with the reward and its deviation as metrics.

    Raises:
        BadInput: there is nothing to evaluate, or the dataset or a reward can't be used.
        Transient: the model is not there in time.
        RewardError: a reward failed.
    """
    place = placement(plan.execution, os.environ)
    if not place.is_main:
        return Outcome(result=Result.SUCCEEDED, rank=place.rank, message="evaluated by rank 0")
    folder, job = options.export, None
    recorder = Recorder(plan.job.attempt, place, unix_time())
    if folder is None:
        serve(limits_of(plan), recorder)
        recorder.enter_stage("Loading")
        folder, job = await_export(plan.resume_from, plan.resume_store, options.wait)
    from .held_out import evaluate_held_out

    recorder.enter_stage("Evaluating")
    on_batch = recorder.record_event
    score = evaluate_held_out(plan, folder, options.completions, options.seed, on_batch)
    estimate = reported_reward(job, plan.training.prompts_per_step, score.spread) if job else None
    log.info("evaluated", extra=as_json(score, estimate))
    # The reward is what `kubectl get` shows of it.
    outcome = Outcome(result=Result.SUCCEEDED, metrics={"reward": score.reward.mean})
    return truncate_to_fit(outcome, score_message(score, estimate))


def await_export(
    resume_from: str | None, resume_store: ObjectStoreSpec | None, seconds: float
) -> tuple[Path, Outcome]:
    """Wait for the exported model of spec.resumeFrom; return its folder and the Outcome of its job.

    Raises:
        BadInput: the spec names no other job.
        Transient: the job has not succeeded within `seconds`.
    """
    if resume_from is None:
        raise BadInput(
            "spec.resumeFrom: nothing to evaluate; name the job that trains in grpoJob, or give "
            "--export"
        )
    root, end = Path(resume_from), SYSTEM_CLOCK.now() + seconds
    stored = source_run(resume_from, resume_store)
    where = stored.store.url if stored else root / EXPORT_FOLDER
    log.info(f"waiting for the model in {where}")
    while True:
        problem = "has its job succeeded?"
        try:
            outcome = _successful_outcome(root, stored)
        except OSError as error:
            if stored:
                raise
            # The volume may be back at the next look.
            outcome, problem = None, f"the volume can't be read: {error}"
        if outcome is not None:
            return root / EXPORT_FOLDER, outcome
        if SYSTEM_CLOCK.now() >= end:
            raise Transient(f"no finished model in {where} after {seconds:.0f} s: {problem}")
        SYSTEM_CLOCK.sleep(POLL_SECONDS)


def _successful_outcome(root: Path, stored: StoredRun | None) -> Outcome | None:
    """How the job ended whose model is in its folder by now; None before."""
    if stored is None:
        return last_success(root) if (root / EXPORT_FOLDER).is_dir() else None
    head = stored.head()
    if head is None or head.outcome is None or head.export is None:
        return None
    stored.store.bring(export_key(head.export), root / EXPORT_FOLDER)
    return head.outcome


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m grpo_trainer.evaluation", description=__doc__)
    parser.add_argument(
        "--export", type=Path, help="folder of the model; unset: that of spec.resumeFrom's job"
    )
    parser.add_argument(
        "--completions", type=int, help="completions per row; unset: spec.training.numGenerations"
    )
    parser.add_argument("--seed", type=int, help="of the sampling; unset: spec.training.seed")
    parser.add_argument(
        "--wait", type=float, default=WAIT_SECONDS, help="seconds to wait for the job to succeed"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        exit_process(main())
    except BaseException:
        log.exception("ended by an error")
        exit_process(EXIT_CODES[Result.ERROR])
