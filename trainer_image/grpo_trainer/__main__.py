"""`python -m grpo_trainer`: the entry point of a training pod.

It reads and validates the plan before anything heavy is imported. Then it runs one worker in this
process, or its workers under a supervisor. Every end becomes an Outcome and its exit code, so no
process ends without a reason.
"""

from .runtime.first_sigterm import end_on_sigterm

if __name__ == "__main__":
    end_on_sigterm()

import logging
import os
import sys

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.text.contract import THREADS_ENV

from .gang.placement import LOCAL_RANK_ENV, Placement, launch_environment, placement
from .preflight.rank0 import require_passed
from .process.compile_cache import CompileCache
from .process.outcome import ProcessEnd, announce_outcome, make_outcome
from .process.process_setup import hide_unused_libraries, set_defaults, threads_per_process
from .process.recorder import Recorder
from .process.supervisor import should_supervise, supervise
from .runtime.clock import unix_time
from .runtime.errors import BadInput, Diverged, classify_error, engine_cause, is_lost_peer
from .runtime.logs import configure_logs
from .runtime.plan_file import read_plan
from .tracking.tracking import CONFIG_FIELDS, tracking_of

log = logging.getLogger("grpo_trainer")


def run_worker(plan: TrainingPlan, place: Placement, started_at: float) -> int:
    """Run this process's worker to its end; returns the exit code of its Outcome."""
    recorder = Recorder(plan.job.attempt, place, started_at)
    config = plan.model_dump(mode="json", by_alias=True, exclude_none=True, include=CONFIG_FIELDS)
    tracking = tracking_of(plan.tracking, plan.job, plan.checkpoint_directory, config, recorder)
    end = ProcessEnd(plan, tracking.end)
    try:
        hide_unused_libraries(plan.execution)
        from .training.worker import train

        message = train(plan, place, recorder, end.abort, tracking)
        outcome = make_outcome(
            place.rank, Result.SUCCEEDED, message, recorder.progress, export=recorder.export
        )
    except BaseException as error:
        log.exception("ended by an error")
        result, message = classify_error(error)
        # Peers that end after SIGTERM close their connections, which is no failure of this one.
        if recorder.got_sigterm and result is Result.ERROR and is_lost_peer(error):
            result = Result.PREEMPTED
        diverged_on = error.diverged_on if isinstance(error, Diverged) else None
        text = f"{recorder.current_stage}: {message}"
        outcome = make_outcome(
            place.rank, result, text, recorder.progress, diverged_on=diverged_on,
            shortage=recorder.shortage, engine_cause=engine_cause(error),
            checkpoint_step=recorder.checkpoint_step,
        )  # fmt: skip
    return end.finish(outcome)


def main() -> int:
    """Run this pod's part of the plan; returns the exit code."""
    started = unix_time()
    attempt = rank = 0
    configure_logs()
    try:
        plan = read_plan()
        place = placement(plan.execution, os.environ)
        attempt, rank = plan.job.attempt, place.rank
        configure_logs(plan.job, rank=rank)
        end_on_sigterm(attempt, rank)
        if place.is_main and LOCAL_RANK_ENV not in os.environ:
            require_passed(plan, is_supervisor=should_supervise(plan.execution, place))
        if LOCAL_RANK_ENV not in os.environ:  # once per pod
            cache = CompileCache.of_pod(plan.model, plan.execution, place.node)
            cache.restore()
            set_defaults(os.environ, cache.variables)
            if should_supervise(plan.execution, place):
                return supervise(plan, place)
    except Exception as error:
        if not isinstance(error, BadInput):
            log.exception("ended by an error")
        result, message = classify_error(error)
        outcome = Outcome(result=result, attempt=attempt, rank=rank)
        return announce_outcome(truncate_to_fit(outcome, message))
    os.environ.update(launch_environment(plan.rendezvous, place))
    os.environ.setdefault(THREADS_ENV, str(threads_per_process(place.processes_per_node)))
    return run_worker(plan, place, started)


def exit_process(code: int) -> None:
    """End without interpreter teardown: C++ threads of collectives can abort there after a success
    (SIGABRT)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        exit_process(main())
    except BaseException:
        log.exception("ended by an error")
        exit_process(EXIT_CODES[Result.ERROR])
