"""Runs the training processes of one pod and speaks for them with one Outcome.

A pod with M GPUs needs M processes, while the kubelet signals and hears only one. This one passes
SIGTERM on, and ends the survivors when one process fails. It also writes the Outcome of a process
that died without one (SIGKILL, the kernel's OOM killer).
"""

import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.report.report import EXIT_CODES, MemoryShortage, Outcome, Progress, Result
from grpo_api.report.root_cause import (
    LOST_PEER_MESSAGE,
    PERMANENT,
    CausePriority,
    attribute_hang,
    cause_priority,
    is_engine_start,
)
from grpo_api.text.contract import TERMINATION_LOG_ENV

from ..gang.placement import LOCAL_RANK_ENV, Placement
from ..runtime.clock import SYSTEM_CLOCK
from .outcome import announce_outcome, keep_outcome, make_outcome, write_in_time
from .watchdog import (
    PEER_FAILED,
    STACKS_ENV,
    WRITES_STACKS,
    add_standstill,
    crash_frames,
    read_stacks,
)

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""Time for the others after an end that is no fault of this pod's own, or that all of them run
into."""
SYMPTOM_SECONDS = 0.7
"""Time for the others after an end that may be a symptom: the process that caused it ends at the
same moment."""
LAST_WORDS_SECONDS = 1.0
"""Seconds between the notice that a peer failed and SIGKILL."""
CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
"""cgroup v2 counters of this container; `oom_kill` counts its processes that the kernel ended
(cgroup-v2.rst)."""
# An exit code alone is no reason to start nothing again: user code may end with any.
_RESULTS = {
    code: result
    for result, code in EXIT_CODES.items()
    if result is not Result.SUCCEEDED and result not in PERMANENT
}


@dataclass(slots=True)
class Worker:
    """One child process and the files in which it leaves its Outcome and, asked for, its stacks."""

    rank: int
    process: subprocess.Popen[bytes]
    outcome_file: Path
    stacks_file: Path
    descriptor: int = field(init=False)
    """A pidfd: readable once the process has ended, so that one selector waits for all of them, and
    with a time-out."""
    was_killed: bool = field(default=False, init=False)
    """Whether the supervisor has killed it, after another had failed."""
    got_sigterm: bool = field(default=False, init=False)
    """Whether SIGTERM was sent on to it while it lived."""

    def __post_init__(self) -> None:
        self.descriptor = os.pidfd_open(self.process.pid)

    def outcome(self) -> Outcome | None:
        """The Outcome that the worker wrote; None if it wrote none, or was killed while it
        wrote."""
        if not self.outcome_file.exists():
            return None
        try:
            return Outcome.model_validate_json(self.outcome_file.read_bytes())
        except ValidationError:
            return None

    def exit_result(self) -> Result:
        """What its exit status says, where it left no Outcome."""
        code = self.process.wait()
        # Before it listens, SIGTERM ends a process without a word.
        if self.was_killed or code == -signal.SIGTERM:
            return Result.PREEMPTED
        return _RESULTS.get(code, Result.ERROR)


@dataclass(frozen=True, slots=True)
class End:
    """The end of one process."""

    outcome: Outcome
    is_stored: bool
    """Whether the process had the time to write it to the volume itself."""
    stacks: str
    """What it has written of its stacks."""
    got_sigterm: bool
    """Whether SIGTERM came before it."""


class Countdown:
    """Decides, from the times at which processes of a pod ended badly, what is done to the others
    and when.

    The first deadline asks them for their last words, each later one kills them.
    """

    def __init__(self, last_words: float = LAST_WORDS_SECONDS) -> None:
        """`last_words`: seconds from the question to the kill."""
        self._last_words = last_words
        self._deadline = math.inf
        self._last_words_requested = False

    def record_failure(self, now: float, outcome: Outcome | None) -> None:
        """A process ended badly, with this outcome if it left one. It never puts a deadline off."""
        if not self._last_words_requested:
            self._deadline = min(self._deadline, now + patience_after(outcome))

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until something is due; None if nothing ever is."""
        return None if self._deadline == math.inf else max(0.0, self._deadline - now)

    def due_action(self, now: float) -> Callable[[list[Worker]], None] | None:
        """Return what is to be done to the processes that are left, once per deadline; None before
        it."""
        if now < self._deadline:
            return None
        action = kill_workers if self._last_words_requested else ask_for_last_words
        self._last_words_requested, self._deadline = True, now + self._last_words
        return action


def supervise(plan: TrainingPlan, place: Placement, last_words: float = LAST_WORDS_SECONDS) -> int:
    """Run the pod's workers to their end; returns the exit code of the pod's Outcome. `last_words`:
    as Countdown."""
    kills_before = oom_kills()
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="grpo-", ignore_cleanup_errors=True) as folder:
        with _forwarded_sigterm(workers) as signals:
            for local_rank in range(place.processes_per_node):
                workers.append(_start(place, local_rank, Path(folder)))
                # A signal that came while it was started went to those before it.
                if signals:
                    workers[-1].process.terminate()
            ended = _wait(workers, Countdown(last_words))
        ends = _ends(ended, plan.job.attempt, oom_kills() > kills_before)
    code = announce_outcome(root_cause([end.outcome for end in _without_symptoms(ends)]))

    def keep_missing() -> None:
        """Write the durable outcomes of those who could not."""
        for end in ends:
            if not end.is_stored:
                # It may have written one where its message could not be.
                keep_outcome(plan, end.outcome, end.stacks, replaces=False)

    write_in_time(keep_missing)
    return code


def should_supervise(execution: ExecutionPlan, place: Placement) -> bool:
    """True for a pod of several processes, and for one with vLLM or NCCL in its process: a signal
    may end that before it can say why."""
    engine = execution.engine
    has_engine_inside = engine is not None and engine.kind == "Colocated"
    has_nccl = execution.accelerator == "GPU" and place.nodes > 1
    return place.processes_per_node > 1 or has_engine_inside or has_nccl


def _start(place: Placement, local_rank: int, folder: Path) -> Worker:
    rank = place.node * place.processes_per_node + local_rank
    file, stacks = folder / f"outcome-{local_rank}.json", folder / f"stacks-{local_rank}.txt"
    environment = {**os.environ, LOCAL_RANK_ENV: str(local_rank), TERMINATION_LOG_ENV: str(file)}
    environment[STACKS_ENV] = str(stacks)
    process = subprocess.Popen([sys.executable, "-m", "grpo_trainer"], env=environment)
    return Worker(rank, process, file, stacks)


@contextmanager
def _forwarded_sigterm(workers: list[Worker]) -> Iterator[list[int]]:
    """Send SIGTERM on to the workers; gives the signals that have come. After their end this
    process ignores it, and says how they ended."""
    signals: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        for worker in workers:
            worker.got_sigterm |= worker.process.poll() is None
            worker.process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    try:
        yield signals
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            os.close(worker.descriptor)


def _wait(workers: list[Worker], countdown: Countdown) -> list[Worker]:
    """The workers in the order in which they ended; after a failure the others are ended by the
    countdown."""
    ended: list[Worker] = []
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.descriptor, selectors.EVENT_READ, worker)
        while len(ended) < len(workers):
            for key, _ in selector.select(countdown.seconds_left(SYSTEM_CLOCK.now())):
                selector.unregister(key.fileobj)
                ended.append(key.data)
                _record_end(key.data, countdown)
            if action := countdown.due_action(SYSTEM_CLOCK.now()):
                action([worker for worker in workers if worker.process.poll() is None])
    return ended


def _record_end(worker: Worker, countdown: Countdown) -> None:
    """Record the end of a process, if it is one that the others must not outlive for long."""
    now, outcome, code = SYSTEM_CLOCK.now(), worker.outcome(), worker.process.wait()
    # A full disk may have cost it its outcome; and user code may end a process with 0.
    is_no_fault = code == 0 or worker.exit_result() is Result.PREEMPTED
    if outcome is None and is_no_fault:
        countdown.record_failure(now, Outcome(result=Result.PREEMPTED))
    elif code:
        countdown.record_failure(now, outcome)


def patience_after(outcome: Outcome | None) -> float:
    """Seconds that the other processes of a pod get to end by themselves, after one failed with
    this outcome.

    They get none if the process left no outcome, or one that can't be the symptom of another
    process's failure: the cause is known, the gang can't go on, and all its GPUs wait for the next
    attempt. One that was killed after its success is no failure, and rank 0 may still export.
    """
    if outcome is not None and outcome.result is Result.SUCCEEDED:
        return math.inf
    if outcome is None or cause_priority(outcome.result) < CausePriority.HANG:
        return 0.0
    # All ranks reach the same limit within seconds, and a process that ends after SIGTERM has not
    # failed: no hurry.
    if outcome.result in (Result.HANG, Result.PREEMPTED):
        return PATIENCE_SECONDS
    return SYMPTOM_SECONDS


def ask_for_last_words(workers: list[Worker]) -> None:
    """Have them write their stacks, which always works, then say how far they are and end, which
    needs the GIL."""
    for worker in workers:
        if worker.stacks_file.exists():  # it listens; the signal's own effect is to end the process
            worker.process.send_signal(WRITES_STACKS)
            worker.process.send_signal(PEER_FAILED)


def kill_workers(workers: list[Worker]) -> None:
    """End them with SIGKILL."""
    for worker in workers:
        worker.was_killed = True
        worker.process.kill()


def _ends(workers: list[Worker], attempt: int, oom_killed: bool) -> list[End]:
    """What is known of each process's end, in the order in which they ended."""
    outcomes = {worker.rank: worker.outcome() for worker in workers}
    standstills = [outcome.standstill for outcome in outcomes.values() if outcome]
    silences = [standstill.silent_seconds for standstill in standstills if standstill]
    ends = []
    for worker in workers:
        outcome, stacks = outcomes[worker.rank], read_stacks(worker.stacks_file)
        if outcome is None:
            outcome = _exit_outcome(worker, attempt, oom_killed, stacks)
            # Amid a hang, a process that can't even say so has stood still at least as long.
            if silences and stacks:
                outcome = add_standstill(outcome, max(silences), stacks)
        was_killed = worker.process.wait() == -signal.SIGKILL
        is_stored = outcomes[worker.rank] is not None and not was_killed
        ends.append(End(outcome, is_stored, stacks, worker.got_sigterm))
    return ends


def _without_symptoms(ends: list[End]) -> list[End]:
    """The ends without errors after SIGTERM, where a process was ended by that: the others lose
    their connection to it, maybe before they have received the signal."""
    if all(end.outcome.result is not Result.PREEMPTED for end in ends):
        return ends
    return [
        end
        for end in ends
        if not end.got_sigterm or cause_priority(end.outcome.result) is not CausePriority.ERROR
    ]


def _exit_outcome(worker: Worker, attempt: int, oom_killed: bool, stacks: str) -> Outcome:
    """The outcome of a process that left none, by how it ended."""
    code, unknown = worker.process.wait(), Progress(attempt=attempt)
    # the counter is the container's: only together with this process's SIGKILL does it mean this
    # process
    if code == -signal.SIGKILL and oom_killed and not worker.was_killed:
        text = (
            f"rank {worker.rank} was ended by the kernel's OOM killer: the pod's memory limit "
            "is too low for it"
        )
        short = MemoryShortage(memory="Host")
        return make_outcome(worker.rank, Result.OUT_OF_MEMORY, text, unknown, shortage=short)
    end = f"ended with exit code {code}"
    if code < 0:
        end = f"was ended by {_signal_name(-code)}"
    if frames := crash_frames(stacks):
        log.error(f"what all threads of rank {worker.rank} did:\n{stacks}")
        end += f" in {frames[0]}"
    if is_engine_start(frames):
        text = (
            f"vLLM did not start: rank {worker.rank} {end} before its first completions. Do "
            "spec.image and the driver of the node's GPUs fit together?"
        )
        return make_outcome(
            worker.rank, Result.ENGINE_FAILED, text, unknown, engine_cause="NotStarted"
        )
    if worker.was_killed:
        end = "did not end after another process of the pod and was killed"
    text = f"rank {worker.rank} {end} without an outcome"
    if not frames and "Fatal Python error: Aborted" in stacks:
        # NCCL's own thread ends a process so (torch's ProcessGroupNCCL.cpp).
        text += f": it {LOST_PEER_MESSAGE}, or its GPU failed; its log says which"
    return make_outcome(worker.rank, worker.exit_result(), text, unknown)


def _signal_name(number: int) -> str:
    """A signal's name; real-time signals have none but the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """Processes of this container that the kernel ended for memory; 0 where the counter can't be
    read."""
    if not CGROUP_EVENTS.is_file():
        return 0
    counters = dict(line.split() for line in CGROUP_EVENTS.read_text(encoding="utf-8").splitlines())
    return int(counters.get("oom_kill", 0))


def root_cause(outcomes: list[Outcome]) -> Outcome:
    """The outcome that explains the others, given in the order in which the processes ended.

    Success counts where all succeeded, and is the first rank's, which knows most. That of rank 0
    counts alone, too: it says so once all ranks have trained and the model is exported. Of equals
    the first to end is blamed, of hangs the one that the others waited for.
    """
    first = min(outcomes, key=lambda outcome: outcome.rank)
    failed = [outcome for outcome in outcomes if outcome.result is not Result.SUCCEEDED]
    if not failed or (first.rank == 0 and first.result is Result.SUCCEEDED):
        return first
    cause = min(failed, key=lambda outcome: cause_priority(outcome.result, outcome.message))
    return attribute_hang(cause, outcomes) if cause.result is Result.HANG else cause
