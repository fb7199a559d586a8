"""Ends a process that makes no progress, or that can't stop after SIGTERM, and says where its
threads stood.

A stuck collective blocks the main thread in C++ for as long as its time-out. Neither an exception
nor a Python signal handler can reach it there. So a daemon thread watches, and ends the process
from there.

faulthandler writes the stacks in C, on SIGUSR1, also while the GIL is held. Python code can't look
then, and a debugger would need ptrace, which restricted pods don't have. The watchdog takes the
stacks of its own process, and the supervisor those of a process that can't.
"""

import faulthandler
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import FRAME_CHARACTERS, MAX_FRAMES, Outcome, Result, Standstill
from grpo_api.report.root_cause import is_engine_start
from grpo_api.report.termination_message import truncate_to_fit, with_standstill
from grpo_api.spec.run_policy import GuardSpec

from ..gang.interfaces import interfaces_message
from ..runtime.clock import SYSTEM_CLOCK
from .outcome import make_outcome
from .preemption import GRACE_MARGIN_SECONDS
from .recorder import Recorder

log = logging.getLogger(__name__)

STACKS_ENV = "GRPO_STACKS"
"""File for this process's stacks, set by the supervisor; without it the file has no name."""
MAX_STACK_CHARACTERS = 256 * 1024
"""Characters of stacks that are kept: the last ones, for each request adds to the file."""
WRITES_STACKS = signal.SIGUSR1
OWN_CODE = ("grpo_trainer/", "trl/")
"""Code whose frames say most: what the run was doing, by the trainer's and TRL's names for it."""
WAITING_CODE = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/")
"""Code in which a rank waits for the others; in a backward pass it is torch's own threads that talk
to them."""
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SITE = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+|trainer_image|operator)/")


class Stacks:
    """This process's file of stacks."""

    def __init__(self) -> None:
        self._name = name = os.environ.get(STACKS_ENV)
        path = Path(name) if name else Path(f"/proc/self/fd/{os.memfd_create('stacks')}")
        self._file = path.open("a+", encoding="utf-8", errors="replace")
        self._file.write(f"main 0x{threading.main_thread().ident or 0:016x}\n")
        self._file.flush()

    def listen(self) -> None:
        """From now on SIGUSR1 adds the stacks of all threads to the file, and so does a signal that
        ends the process, such as SIGSEGV, if a supervisor reads it."""
        faulthandler.register(WRITES_STACKS, file=self._file, all_threads=True)
        if self._name:
            faulthandler.enable(self._file)

    def take(self) -> str:
        """The stacks of all threads now, and those that were asked for before."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        return self._file.read()[-MAX_STACK_CHARACTERS:]


def read_stacks(path: Path) -> str:
    """The stacks that another process has written; empty if it wrote none."""
    return (
        path.read_text(encoding="utf-8", errors="replace")[-MAX_STACK_CHARACTERS:]
        if path.is_file()
        else ""
    )


def add_standstill(outcome: Outcome, silent_seconds: float, stacks: str) -> Outcome:
    """The outcome with where its process stood, as much of it as a termination message has room
    for."""
    frames = main_frames(stacks)
    inner = next((at for at, frame in enumerate(frames) if frame.startswith(OWN_CODE)), len(frames))
    waiting = any(frame.startswith(WAITING_CODE) for frame in frames[:inner])
    standstill = Standstill(
        silent_seconds=max(0.0, silent_seconds),
        waiting=waiting,
        frames=select_frames(frames, MAX_FRAMES),
    )
    return with_standstill(outcome, standstill)


def blame_engine(outcome: Outcome, stage: str, stacks: str) -> Outcome:
    """The outcome; of a process that hung in its engine before that had sampled once, as the
    engine's.

    One that waits for another rank does not know what that one does.
    """
    standstill = outcome.standstill
    if outcome.result is not Result.HANG or standstill is None or standstill.waiting:
        return outcome
    if stage != "Compiling" and not is_engine_start(main_frames(stacks)):
        return outcome
    changes = {"result": Result.ENGINE_FAILED, "engine_cause": "NotStarted"}
    text = f"vLLM on rank {outcome.rank} hangs before its first completions: {outcome.message}"
    return truncate_to_fit(outcome.model_copy(update=changes), text)


def crash_frames(stacks: str) -> list[str]:
    """The main thread's frames at the signal that ended the process; empty where another thread of
    Python raised it, or a library's own thread gave up, as NCCL's does for a lost peer."""
    _, is_fatal, crash = stacks.rpartition("Fatal Python error: ")
    current = re.search(r"^Current thread (0x\w+)", crash, re.MULTILINE)
    is_main = stacks.startswith(f"main {current[1]}\n") if current else crash[:7] != "Aborted"
    return main_frames(stacks) if is_fatal and is_main else []


def main_frames(stacks: str) -> list[str]:
    """The main thread's frames as they were written last, innermost first; empty where the text has
    none.

    Each as `path:line in function`, the path from the package on. faulthandler names threads by
    number alone, so the number of the main thread is in the first line.
    """
    lines = stacks.splitlines()
    main = next(
        (line.removeprefix("main ") for line in lines if line.startswith("main 0x")), "none"
    )
    start = len(lines)
    for at, line in enumerate(lines):
        if main in line and line.endswith("(most recent call first):"):
            start = at + 1
    frames: list[str] = []
    for line in lines[start:]:
        frame = _FRAME.match(line)
        if frame is None:
            break
        frames.append(
            f"{_SITE.sub('', frame['path'])}:{frame['line']} in {frame['function']}"[
                :FRAME_CHARACTERS
            ]
        )
    return frames


def select_frames(frames: list[str], limit: int) -> list[str]:
    """At most `limit` of the frames, in their order: prefers the innermost, then those of our own
    and TRL's code."""
    order = sorted(
        range(len(frames)), key=lambda at: (at > 0, not frames[at].startswith(OWN_CODE), at)
    )
    return [frames[at] for at in sorted(order[:limit])]


POLL_SECONDS = 1.0
PEER_FAILED = signal.SIGUSR2
"""The signal of a supervisor to a process when another of the pod has failed: it says how far it
is, and ends."""
LOCKED_SECONDS = 30.0
"""By how much a process outlives its patience whose watchdog can't run, since something holds the
GIL for good."""
QUIET_SECONDS = 30.0
"""Who has had no progress for so long when it is ended says where it stood."""


class Watchdog:
    """Watches the recorder's last event and the arrival of signals."""

    def __init__(
        self,
        guard: GuardSpec,
        execution: ExecutionPlan,
        grace_period_seconds: float,
        recorder: Recorder,
        end_process: Callable[[Outcome, str], None],
        *,
        now: Callable[[], float] = SYSTEM_CLOCK.now,
        quiet_seconds: float = QUIET_SECONDS,
        locked_seconds: float = LOCKED_SECONDS,
    ) -> None:
        """`end_process` is given the outcome and the stacks of all threads; it doesn't return.

        `now` is the recorder's clock. `quiet_seconds` and `locked_seconds`: see QUIET_SECONDS and
        LOCKED_SECONDS.
        """
        self._guard = guard
        self._execution = execution
        self._grace_seconds = max(0.0, grace_period_seconds - GRACE_MARGIN_SECONDS)
        self._recorder = recorder
        self._end = end_process
        self._now = now
        self._quiet = quiet_seconds
        self._locked = locked_seconds
        self._stacks = Stacks()
        self._terminated_at: float | None = None
        self._peer_failed = False
        self._signalled = threading.Event()

    def start(self) -> None:
        """Listen for signals and start watching. Call it in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Python runs signal handlers between bytecodes of the main thread; the wake-up descriptor
        # is written by the C handler at once, so that the thread below hears a signal even while
        # the main thread is stuck in a collective.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, PEER_FAILED):
            signal.signal(number, self._record_signal)
        self._stacks.listen()
        threading.Thread(
            target=self._listen, args=(reader, writer), name="signals", daemon=True
        ).start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _record_signal(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread, before an error that it raises afterwards."""
        self._recorder.got_sigterm |= number == signal.SIGTERM

    @property
    def seconds_since_sigterm(self) -> float | None:
        """Time since SIGTERM in seconds; None if there was none."""
        return None if self._terminated_at is None else self._now() - self._terminated_at

    def _listen(self, reader: socket.socket, _writer: socket.socket) -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGTERM and self._terminated_at is None:
                self._terminated_at = self._now()
            self._peer_failed |= number[0] == PEER_FAILED
            self._signalled.set()

    def _watch(self) -> None:
        while True:
            # a thread in C, for the case that none in Python runs any more; the next round puts it
            # off
            faulthandler.dump_traceback_later(
                self._idle_time_and_limit()[2] + self._locked, exit=True
            )
            self._signalled.wait(POLL_SECONDS)
            self._signalled.clear()
            outcome = self.verdict()
            if outcome is not None:
                faulthandler.cancel_dump_traceback_later()
                stacks = self._stacks.take()
                log.error(f"what all threads do:\n{stacks}")
                placed = self._with_standstill(outcome, stacks)
                self._end(blame_engine(placed, self._recorder.current_stage, stacks), stacks)

    def verdict(self) -> Outcome | None:
        """How the run has to end now; None while it may go on."""
        stage, idle, limit = self._idle_time_and_limit()
        if idle > limit:
            return self._outcome(*self._hang_result(stage, idle, limit))
        waited = self.seconds_since_sigterm
        if waited is not None and (
            stage not in ("Training", "Saving") or waited > self._grace_seconds
        ):
            return self._outcome(
                Result.PREEMPTED,
                f"SIGTERM during stage {stage}; the last periodic checkpoint stands",
            )
        if self._peer_failed:
            return self._outcome(
                Result.PREEMPTED,
                f"another process of the pod failed during stage {stage} of this one",
            )
        return None

    def _idle_time_and_limit(self) -> tuple[str, float, float]:
        """The stage, for how long it has had no progress, and how long it may."""
        recorder, stage = self._recorder, self._recorder.current_stage
        idle = (
            recorder.seconds_since_event
            if stage == "Training"
            else recorder.seconds_since_any_event
        )
        return stage, idle, hang_timeout_seconds(stage, self._guard, self._execution)

    def _hang_result(self, stage: str, idle: float, limit: float) -> tuple[Result, str]:
        """The result and the sentence of a stage that took longer than its patience."""
        if stage == "Connecting":
            return Result.RENDEZVOUS_TIMEOUT, (
                f"the process group and its first all-reduce did not come about in {limit:.0f} s, "
                "although every pod reached every other by TCP "
                f"({interfaces_message(os.environ)}): NCCL_DEBUG=INFO in spec.env tells what it "
                "tries"
            )
        expected_event = "step finished" if stage == "Training" else "progress"
        return Result.HANG, (
            f"no {expected_event} for {idle:.0f} s in stage {stage} after step "
            f"{self._recorder.step}; {limit:.0f} s are allowed (guard.hangTimeoutSeconds = "
            f"{self._guard.hang_timeout_seconds}). Every thread's stack is in the log"
        )

    def _with_standstill(self, outcome: Outcome, stacks: str) -> Outcome:
        """The outcome with the place where the process stood still.

        Its silence counts up to the moment when the limit was reached, so that ranks can be
        compared although their watchdogs looked at different times.
        """
        _, idle, limit = self._idle_time_and_limit()
        if idle < self._quiet:
            return outcome
        return add_standstill(
            outcome, self._recorder.silent_seconds - max(0.0, idle - limit), stacks
        )

    def _outcome(self, result: Result, message: str) -> Outcome:
        return make_outcome(self._recorder.place.rank, result, message, self._recorder.progress)
