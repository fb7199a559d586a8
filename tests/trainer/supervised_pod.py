"""A pod of several processes through the real entry point: the real watchdog and supervisor around
an act per rank."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from grpo_api.report.report import Outcome
from grpo_api.spec.run_policy import GuardSpec
from grpo_api.text.contract import PLAN_ENV, TERMINATION_LOG_ENV
from harness.programs.patience import run_to_end
from tests.support.ranks import runs
from tests.support.ranks.fork_servers import ISOLATED
from tests.support.ranks.launch import UNCHECKED, tracer

HANG_SECONDS = 10
"""The shortest guard.hangTimeoutSeconds."""
# Takes the place of grpo_trainer.training.worker in the workers: the real watchdog around an act
# per rank.
STAND_IN = """
import ctypes, faulthandler, os, sys, threading, time, types

armed, arm = threading.Event(), faulthandler.dump_traceback_later

def arm_and_tell(*arguments, **options):
    arm(*arguments, **options)
    armed.set()

faulthandler.dump_traceback_later = arm_and_tell

def train(plan, place, recorder, abort, tracking):
    from grpo_trainer.runtime import errors
    from grpo_trainer.process.watchdog import Watchdog
    # with another process in the pod it is that one's watchdog that finds who holds the GIL
    locked = 5.0 if place.world_size == 1 else 600.0
    recorder.begin_training(3, 9)
    limits = plan.guard, plan.execution, plan.grace_period_seconds
    Watchdog(*limits, recorder, abort, quiet_seconds=0.0, locked_seconds=locked).start()
    acts = {acts}
    return globals()[acts[place.rank]](recorder, errors)

def begun():
    return os.path.exists(os.environ["BEGUN_FILE"])

def begin():
    open(os.environ["BEGUN_FILE"], "w").close()

def after_the_other_began():
    while not begun():
        time.sleep(0.05)

def fails(recorder, errors):
    after_the_other_began()
    raise errors.RewardError("the service is gone")

def loses_a_peer(recorder, errors):
    after_the_other_began()
    raise RuntimeError("Connection closed by peer [10.0.0.1]:1")

def is_killed_while_it_speaks(recorder, errors):
    import signal
    from grpo_trainer.process.outcome import write_termination_message
    after_the_other_began()
    write_termination_message('{{"result": "Succ')
    os.kill(os.getpid(), signal.SIGKILL)

def crashes_in_its_engine(recorder, errors):
    import signal
    from grpo_trainer.engine_pod.engine_start import start_engine
    start_engine(lambda: signal.raise_signal(signal.SIGILL))

def is_given_up_by_a_library(recorder, errors):
    library, thread = ctypes.CDLL(None), ctypes.c_ulong()
    after_the_other_began()
    library.pthread_create(ctypes.byref(thread), None, library.abort, None)
    threading.Event().wait()

def is_busy(recorder, errors):
    begin()
    threading.Event().wait()

def waits_in_a_collective(recorder, errors):
    after_the_other_began()
    recorder.record_event()
    exec(compile("import time; time.sleep(3600)", "/site-packages/torch/distributed/c10d.py", "exec"))

def holds_the_gil(recorder, errors):
    armed.wait()  # before it the watchdog has not begun
    begin()
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # PyDLL, unlike CDLL, keeps the GIL
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, and no signal ends it

module = types.ModuleType("grpo_trainer.training.worker")
module.train = train
sys.modules["grpo_trainer.training.worker"] = module
"""  # noqa: E501
POD = """
import os, sys
from grpo_trainer.gang.placement import placement
from grpo_trainer.runtime.plan_file import read_plan
from grpo_trainer.process.supervisor import supervise
plan = read_plan()
sys.exit(supervise(plan, placement(plan.execution, os.environ), float(sys.argv[1])))
"""
"""The entry point of a pod of several processes; its argument are the seconds for their last
words."""
LAST_WORDS = 60.0
"""A busy machine is slow to write them."""


def run(
    folder: Path,
    *acts: str,
    hang_seconds: int = 600,
    last_words: float = LAST_WORDS,
    **execution: Any,
) -> "subprocess.CompletedProcess[str]":
    """A pod's supervisor, or its only process, after its end."""
    processes = {"processesPerNode": len(acts)}
    plan = runs.plan(Path("/models/demo"), folder=folder / "run", execution=processes | execution)
    plan = plan.model_copy(update={"guard": GuardSpec(hang_timeout_seconds=hang_seconds)})
    attempt = folder / "run" / "attempt-1"
    attempt.mkdir(parents=True)
    (folder / "plan.json").write_text(plan.model_dump_json())
    (folder / "sitecustomize.py").write_text(UNCHECKED + STAND_IN.format(acts=acts))
    environment = ISOLATED | {
        PLAN_ENV: str(folder / "plan.json"),
        TERMINATION_LOG_ENV: str(folder / "end"),
    }
    environment |= tracer() | {
        "PYTHONPATH": f"{folder}:{ISOLATED['PYTHONPATH']}",
        "BEGUN_FILE": str(folder / "begun"),
    }
    command = [
        sys.executable,
        *(("-c", POD, str(last_words)) if len(acts) > 1 else ("-m", "grpo_trainer")),
    ]
    return run_to_end(command, 300, env=environment)


def supervised(folder: Path, *acts: str, **settings: Any) -> tuple[Outcome, dict[int, Outcome]]:
    """The pod's outcome, and the durable outcomes of its ranks; `settings` are those of `run`."""
    run(folder, *acts, **settings)
    attempt = folder / "run" / "attempt-1"
    kept = {int(path.stem.rpartition("-")[2]): path for path in attempt.glob("outcome-rank-*.json")}
    outcomes = {rank: Outcome.model_validate_json(path.read_text()) for rank, path in kept.items()}
    return Outcome.model_validate_json((folder / "end").read_text()), outcomes
