"""Ends a process that makes no progress, or that can't stop after SIGTERM.

A stuck collective blocks the main thread in C++ for as long as its time-out, where neither an exception nor a Python
signal handler can reach it. So a daemon thread watches, and ends the process from there.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from grpo_api.plan.hang_timeouts import patience
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome, Result

from ..clock import SYSTEM_CLOCK
from ..gang.interfaces import chosen
from .outcome import make_outcome
from .preemption import GRACE_MARGIN_SECONDS
from .recorder import Recorder
from .stacks import Stacks, stood_still

POLL_SECONDS = 1.0
PEER_FAILED = signal.SIGUSR2
"""By which a supervisor tells a process that another of the pod has failed: it says how far it is, and ends."""
LOCKED_SECONDS = 30.0
"""By how much a process outlives its patience whose watchdog can't run, since something holds the GIL for good."""
QUIET_SECONDS = 30.0
"""Who has had no progress for so long when it is ended says where it stood."""


class Watchdog:
    """Watches the recorder's last event and the arrival of signals."""

    def __init__(
        self,
        plan: TrainingPlan,
        recorder: Recorder,
        end: Callable[[Outcome, str], None],
        *,
        now: Callable[[], float] = SYSTEM_CLOCK.now,
        quiet: float = QUIET_SECONDS,
        locked: float = LOCKED_SECONDS,
    ) -> None:
        """`end` is given the outcome and the stacks of all threads; it doesn't return.

        `now` is the recorder's clock; `quiet` and `locked` are in seconds, as QUIET_SECONDS and LOCKED_SECONDS say.
        """
        self._plan = plan
        self._recorder = recorder
        self._end = end
        self._now = now
        self._quiet = quiet
        self._locked = locked
        self._stacks = Stacks()
        self._terminated_at: float | None = None
        self._peer_failed = False
        self._signalled = threading.Event()

    def start(self) -> None:
        """Listen for signals and start watching. Call it in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Python runs signal handlers between bytecodes of the main thread; the wake-up descriptor is written by the C
        # handler at once, so that the thread below hears a signal even while the main thread is stuck in a collective.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, PEER_FAILED):
            signal.signal(number, lambda _number, _frame: None)
        self._stacks.listen()
        threading.Thread(target=self._listen, args=(reader, writer), name="signals", daemon=True).start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

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
            # a thread in C, for the case that none in Python runs any more; the next round puts it off
            faulthandler.dump_traceback_later(self._waits()[2] + self._locked, exit=True)
            self._signalled.wait(POLL_SECONDS)
            self._signalled.clear()
            outcome = self.verdict()
            if outcome is not None:
                faulthandler.cancel_dump_traceback_later()
                stacks = self._stacks.take()
                print(stacks, file=sys.stderr, flush=True)
                self._end(self._with_place(outcome, stacks), stacks)

    def verdict(self) -> Outcome | None:
        """How the run has to end now; None while it may go on."""
        stage, idle, limit = self._waits()
        if idle > limit:
            return self._outcome(*self._stuck(stage, idle, limit))
        waited = self.seconds_since_sigterm
        if waited is not None and (stage not in ("Training", "Saving") or waited > self._grace()):
            return self._outcome(Result.PREEMPTED, f"SIGTERM during stage {stage}; the last periodic checkpoint stands")
        if self._peer_failed:
            return self._outcome(
                Result.PREEMPTED, f"another process of the pod failed during stage {stage} of this one"
            )
        return None

    def _waits(self) -> tuple[str, float, float]:
        """The stage, for how long it has had no progress, and how long it may."""
        recorder, stage = self._recorder, self._recorder.current_stage
        idle = recorder.seconds_since_event if stage == "Training" else recorder.seconds_since_any
        return stage, idle, patience(stage, self._plan.guard, self._plan.execution)

    def _stuck(self, stage: str, idle: float, limit: float) -> tuple[Result, str]:
        """The result and the sentence of a stage that took longer than its patience."""
        if stage == "Connecting":
            return Result.RENDEZVOUS_TIMEOUT, (
                f"the process group and its first all-reduce did not come about in {limit:.0f} s, although every pod "
                f"reached every other by TCP ({chosen(os.environ)}): NCCL_DEBUG=INFO in spec.env tells what it tries"
            )
        done = "step finished" if stage == "Training" else "progress"
        return Result.HANG, (
            f"no {done} for {idle:.0f} s in stage {stage} after step {self._recorder.step}; {limit:.0f} s are allowed "
            f"(guard.hangTimeoutSeconds = {self._plan.guard.hang_timeout_seconds}). Every thread's stack is in the log"
        )

    def _with_place(self, outcome: Outcome, stacks: str) -> Outcome:
        """The outcome with the place where the process stood still.

        Its silence counts up to the moment when the limit was reached, so that ranks can be compared although their
        watchdogs looked at different times.
        """
        _, idle, limit = self._waits()
        if idle < self._quiet:
            return outcome
        return stood_still(outcome, self._recorder.silent_seconds - max(0.0, idle - limit), stacks)

    def _grace(self) -> float:
        return max(0.0, self._plan.grace_period_seconds - GRACE_MARGIN_SECONDS)

    def _outcome(self, result: Result, message: str) -> Outcome:
        return make_outcome(self._recorder.place.rank, result, message, self._recorder.progress)
