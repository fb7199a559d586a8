"""One training process: joins the other ranks while the libraries load, then trains.

SIGTERM, /progress and the wait for late peers don't wait for imports. All of that needs torch at
most, while TRL and what it pulls in take four times as long to load.
"""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.report.report import Outcome
from grpo_api.report.training_metrics import ALLREDUCE

from ..checkpoints.checkpoint_target import open_target
from ..gang import rendezvous
from ..gang.placement import Placement
from ..process.heartbeat import Heartbeat
from ..process.recorder import Recorder
from ..process.watchdog import Watchdog
from ..runtime.logs import adopt_library_logs
from ..telemetry.progress_server import limits_of, serve
from ..tracking.tracking import NO_TRACKING, Tracking


def train(
    plan: TrainingPlan,
    place: Placement,
    recorder: Recorder,
    abort: Callable[[Outcome, str], None],
    tracking: Tracking = NO_TRACKING,
) -> str:
    """Run the plan to its end; returns the sentence for the Outcome. The caller ends `tracking`,
    unless the watchdog ends the process by `abort`.

    Raises:
        TrainingError: any of its kinds; other exceptions are bugs, or failures of the machine.
    """
    if place.is_main:
        serve(limits_of(plan), recorder)
    watchdog = Watchdog(plan.guard, plan.execution, plan.grace_period_seconds, recorder, abort)
    watchdog.start()
    _join_and_import(plan, place, recorder)
    target = open_target(plan, on_answer=recorder.record_store_answer)
    if target:
        target.claim()
    earlier = target.find_success() if target else None
    if earlier is not None:
        recorder.adopt_outcome(earlier)
        return f"attempt {earlier.attempt} had finished already: {earlier.message}"
    from .training_run import run

    return run(plan, recorder, watchdog, tracking=tracking)


def _join_and_import(plan: TrainingPlan, place: Placement, recorder: Recorder) -> None:
    """Join the other ranks while the libraries load. The rendezvous stays in the main thread, whose
    CUDA device it sets."""
    with ThreadPoolExecutor(1, "imports") as pool:
        libraries = pool.submit(_import_libraries, plan.execution)
        libraries.add_done_callback(lambda _: recorder.record_startup_point("imports"))
        with recorder.measure_part("rendezvous"):
            network = rendezvous.join_gang(
                plan.rendezvous,
                plan.guard,
                plan.execution,
                place,
                on_connecting=lambda: recorder.enter_stage("Connecting"),
                rdma_devices=plan.rdma_devices or (),
            )
        recorder.enter_stage("Loading")
        if network is not None:
            recorder.record_metrics({ALLREDUCE.key: network.bytes_per_second})
            recorder.record_rdma_problem(network.rdma_problem)
        Heartbeat(recorder, rendezvous.store_client(plan.rendezvous)).start()
        libraries.result()


def _import_libraries(execution: ExecutionPlan) -> None:
    """Imports without the garbage collector, which takes a quarter of the time to find that
    everything stays; what is there by then, half a million objects, is never walked through again
    in training either."""
    gc.disable()
    try:
        import_module(f"{__package__}.training_run")
        if execution.zero_stage > 0:
            import_module("deepspeed")
        adopt_library_logs()
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
