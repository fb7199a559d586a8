"""Runs several training processes in one pod and speaks for them with one Outcome.

A pod with M GPUs needs M processes, while the kubelet signals and hears only one. This one passes SIGTERM on, ends the
survivors when one process fails, and finds the words for a process that died without any (SIGKILL, the kernel's OOM
killer).
"""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from grpo_api.causes import tier
from grpo_api.contract import TERMINATION_LOG_ENV
from grpo_api.plan import TrainingPlan
from grpo_api.report import Outcome, Progress, Result

from ..gang.placement import LOCAL_RANK_ENV, Placement
from .outcome import announce, make_outcome

SURVIVOR_SECONDS = 10.0
"""Time in which the others may notice a failed peer by themselves and say so; then they are ended."""
CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
"""cgroup v2 counters of this container; `oom_kill` counts its processes that the kernel ended (cgroup-v2.rst)."""


@dataclass(slots=True)
class Worker:
    """One child process and the file in which it leaves its Outcome."""

    rank: int
    process: subprocess.Popen[bytes]
    outcome_file: Path
    descriptor: int = field(init=False)
    """A pidfd: readable once the process has ended, so that one selector waits for all of them, and with a time-out."""

    def __post_init__(self) -> None:
        self.descriptor = os.pidfd_open(self.process.pid)

    def outcome(self) -> Outcome | None:
        """What the worker said, if it said anything."""
        if not self.outcome_file.exists() or not self.outcome_file.stat().st_size:
            return None
        return Outcome.model_validate_json(self.outcome_file.read_text(encoding="utf-8"))


def supervise(plan: TrainingPlan, place: Placement) -> int:
    """Run the pod's workers to their end; returns the exit code of the pod's Outcome."""
    kills_before = oom_kills()
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        workers = [_start(place, local, Path(folder)) for local in range(place.processes_per_node)]
        with _forwarded_sigterm(workers):
            ended = _wait(workers)
        outcomes = [_outcome_of(worker, plan, oom_kills() > kills_before) for worker in ended]
    return announce(root_cause(outcomes))


def _start(place: Placement, local_rank: int, folder: Path) -> Worker:
    rank = place.node * place.processes_per_node + local_rank
    file = folder / f"outcome-{local_rank}.json"
    environment = {**os.environ, LOCAL_RANK_ENV: str(local_rank), TERMINATION_LOG_ENV: str(file)}
    return Worker(rank, subprocess.Popen([sys.executable, "-m", "grpo_trainer"], env=environment), file)


@contextmanager
def _forwarded_sigterm(workers: list[Worker]) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        for worker in workers:
            worker.process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            os.close(worker.descriptor)


def _wait(workers: list[Worker]) -> list[Worker]:
    """The workers in the order in which they ended; after the first failure the others get SURVIVOR_SECONDS, then
    SIGTERM, then as long again, then SIGKILL."""
    ended: list[Worker] = []
    signals = iter((signal.SIGTERM, signal.SIGKILL))
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.descriptor, selectors.EVENT_READ, worker)
        while len(ended) < len(workers):
            for key, _ in selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                selector.unregister(key.fileobj)
                ended.append(key.data)
            # no hurry after the first failure: a peer that finds out by itself says what it lost and how far it was and
            # keeps its outcome; one that is stuck is told, and then made, to end
            failed = any(worker.process.poll() not in (None, 0) for worker in ended)
            if failed and deadline is None:
                deadline = time.monotonic() + SURVIVOR_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                _signal_rest(workers, next(signals, signal.SIGKILL))
                deadline = time.monotonic() + SURVIVOR_SECONDS
    return ended


def _signal_rest(workers: list[Worker], number: signal.Signals) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(number)


def _outcome_of(worker: Worker, plan: TrainingPlan, oom_killed: bool) -> Outcome:
    said = worker.outcome()
    if said is not None:
        return said
    code, unknown = worker.process.wait(), Progress(attempt=plan.job.attempt)
    # the counter is the container's: only together with this process's SIGKILL does it mean this process
    if code == -signal.SIGKILL and oom_killed:
        text = f"rank {worker.rank} was ended by the kernel's OOM killer: the pod's memory limit is too low for it"
        return make_outcome(worker.rank, Result.OUT_OF_MEMORY, text, unknown)
    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return make_outcome(worker.rank, Result.ERROR, f"rank {worker.rank} {end} without an outcome", unknown)


def oom_kills() -> int:
    """Processes of this container that the kernel ended for memory; 0 where the counter can't be read."""
    if not CGROUP_EVENTS.is_file():
        return 0
    counters = dict(line.split() for line in CGROUP_EVENTS.read_text(encoding="utf-8").splitlines())
    return int(counters.get("oom_kill", 0))


def root_cause(outcomes: list[Outcome]) -> Outcome:
    """The outcome that explains the others, given in the order in which the processes ended.

    Success stands only where all succeeded; of equals the first to end is blamed.
    """
    failed = [outcome for outcome in outcomes if outcome.result is not Result.SUCCEEDED]
    return min(failed or outcomes, key=lambda outcome: tier(outcome.result))
