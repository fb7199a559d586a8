"""Records what a run knows about itself, behind one lock: stage, step, start-up times, metrics
and memory.

The trainer's callbacks write it; the HTTP server, the watchdog and the outcome read it, and none of
them knows the others. There is one per process, made before torch is imported.

RunClock divides the time of the process among the parts of its run. It only switches between parts,
so that their sum is always the time since it began. StepTimes keeps the times of the newest steps.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

from grpo_api.report.artifacts import Checkpoint, Export
from grpo_api.report.report import (
    MAX_PROBLEM,
    MAX_STEPS,
    Finding,
    MemoryShortage,
    Outcome,
    Progress,
    Stage,
    StepTime,
    TrackerReport,
    Wait,
    WaitTarget,
)
from grpo_api.report.training_metrics import (
    CHECKPOINT_FAILURES,
    CHECKPOINT_SECONDS,
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    CHECKPOINTS,
    FROM_ZERO,
    NONFINITE_STEPS,
)
from grpo_api.spec.model import Architecture
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.timing import Account, Beginning, Clock, RunPart

from ..gang.placement import Placement
from ..runtime.clock import SYSTEM_CLOCK, unix_time
from .step_counters import StepCounters

_OF_STAGE: dict[Stage, RunPart] = {
    "Proving": "proving",
    "Compiling": "proving",
    "Training": "training",
    "Saving": "saving",
    "Exporting": "saving",
    "Evaluating": "generating",
}
"""Parts of the stages; those before them are loading."""
_STAGE_OF_PHASE: dict[str | None, Stage] = {"generate": "Generating", "reward": "Scoring"}
_MAY_FETCH = ("Loading", "Proving")
"""Stages in which a run reads what it needs of the hub, before its first step."""
FETCH_SAMPLES = 16
"""Measurements of a download, one every POLL_SECONDS, over which its speed is taken."""
FETCH_PAUSE_SECONDS = 10.0
"""Nothing is being downloaded any more when nothing has arrived for so long."""
_OF_PHASE: dict[str | None, RunPart] = {"generate": "generating", "reward": "scoring"}
"""Phases of a step with a part of their own; the others, and what lies between them, are
training."""


class RunClock:
    """Adds up the seconds of each part of a run. Not thread-safe: callers that share it hold a
    lock."""

    def __init__(self, now: Callable[[], float] = SYSTEM_CLOCK.now) -> None:
        """Start with the part `loading`; `now` is a monotonic clock in seconds."""
        self._now = now
        self._seconds: dict[RunPart, float] = dict.fromkeys(get_args(RunPart), 0.0)
        self._part: RunPart = "loading"
        self._since = now()

    def enter_stage(self, name: Stage) -> None:
        """Note that the run enters a stage."""
        self._switch(_OF_STAGE.get(name, "loading"))

    def enter_phase(self, name: str | None) -> None:
        """Note that a step enters a phase, or none."""
        self._switch(_OF_PHASE.get(name, "training"))

    def read(self) -> Clock:
        """The seconds of each part until now, rounded to milliseconds."""
        self._switch(self._part)
        return Clock(**{part: round(seconds, 3) for part, seconds in self._seconds.items()})

    def _switch(self, part: RunPart) -> None:
        now = self._now()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now


KEPT_STEP_TIMES = 512
"""Newest steps that are kept: more than a run makes between two requests."""


class StepTimes:
    """Begin and end of the first and the newest steps. Not thread-safe: callers that share it hold
    a lock."""

    def __init__(self) -> None:
        """No step has begun."""
        self._began = Clock()
        self._open: tuple[int, Clock] | None = None
        """The step that is finished, and when it was; what follows until the next one works belongs
        to it."""
        self._first: StepTime | None = None
        self._newest: deque[StepTime] = deque(maxlen=KEPT_STEP_TIMES)

    def begin(self, clock: Clock) -> None:
        """Note that training begins."""
        self._began = clock

    @property
    def is_open(self) -> bool:
        """Whether the newest finished step still lasts: the next one has not begun to work."""
        return self._open is not None

    def finish_step(self, step: int, clock: Clock) -> None:
        """Note that this optimizer step is finished; it lasts until the next one begins to work."""
        if self._open:
            self.close_step(self._open[1])
        self._open = step, clock

    def close_step(self, clock: Clock) -> None:
        """Note that the finished step is over. Does nothing without such a step."""
        if self._open is None:
            return
        step_time = StepTime(step=self._open[0], began=self._began, ended=clock)
        self._first = self._first or step_time
        self._newest.append(step_time)
        self._began, self._open = clock, None

    def every_nth(self, interval: int) -> list[StepTime]:
        """The first step and the newest of every Nth, oldest first."""
        if self._first is None:
            return []
        later = [step_time for step_time in self._newest if step_time.step > self._first.step]
        every_nth = [step_time for step_time in later if step_time.step % interval == 0]
        return [self._first, *every_nth[-MAX_STEPS:]]


RECENT_STEPS = 20
"""Steps that seconds_per_step is the mean of."""


class Recorder:
    """Thread-safe state of one process's run."""

    def __init__(
        self,
        attempt: int,
        place: Placement,
        started_at: float,
        now: Callable[[], float] = SYSTEM_CLOCK.now,
    ) -> None:
        """`now` is a clock that never goes back, in seconds."""
        self._now = now
        self._lock = threading.RLock()
        """Held over whatever is derived from the state that it replaces: several threads write."""
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._progress = Progress(attempt=attempt)
        self._clock = RunClock(now)
        self._steps = StepTimes()
        self._waits: dict[WaitTarget, tuple[float, str]] = {}
        """Since when, by the clock, and for what reason there has been no answer."""
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=FETCH_SAMPLES)
        """Times and sizes of a download."""
        self._account = Account()
        """Its `clock` is read when it is asked for."""
        self.started_at = started_at
        """Unix time of the process's start, in seconds."""
        self._made_at = now()
        self._last_event = self._last_heard = now()
        self._stage_since = self._phase_since = self._fetch_since = self._last_event
        self._phase: Stage = "Training"
        self._last_sign = self._last_event
        self._own_events = 0
        self._not_finite_step: int | None = None
        self.place, self.counters = place, StepCounters()
        self.got_sigterm = False
        """Whether SIGTERM has come since the watchdog listens."""
        self.shortage: MemoryShortage | None = None
        """What there was no memory for, once there was none."""
        self.checkpoint_step: int | None = None
        """Step of the run's newest complete checkpoint, 0 for none; None before that is known."""
        self.export: Export | None = None
        """The exported model, once it is there."""
        self.trackers: dict[str, TrackerReport] = {}
        """By name. No events: a tracker that works must not hide that training hangs."""

    def _update(self, stage: Stage | None = None, **changes: object) -> None:
        with self._lock:
            self._own_events += 1
            self._last_event = self._last_sign = self._now()
            if stage:
                if stage != self._progress.stage:
                    self._stage_since = self._last_event
                    self._set_phase("Training")
                changes["stage"] = stage
                self._clock.enter_stage(stage)
            changes["events"] = self._progress.events + 1
            self._progress = self._progress.model_copy(update=changes)

    def _set_phase(self, phase: Stage) -> None:
        if phase != self._phase:
            self._phase, self._phase_since = phase, self._now()

    def enter_phase(self, name: str | None) -> None:
        """Note that this rank has entered another phase of its step.

        It is no progress, but it shows which ranks hang and which have come as far as the others.
        """
        with self._lock:
            self._last_sign = self._now()
            if self._progress.stage == "Training":
                if name and self._steps.is_open:
                    self._steps.close_step(self._clock.read())
                self._clock.enter_phase(name)
                self._set_phase(_STAGE_OF_PHASE.get(name, "Training"))

    def record_event(self) -> None:
        """A part of long work is done: bytes of a download, a file, a batch of rows. It puts off
        the verdict Hang."""
        self._update()

    def record_peer_events(self, events: int) -> None:
        """Count events of other ranks: a rank that waits for a working peer does not hang."""
        with self._lock:
            events += self._progress.events
            self._progress = self._progress.model_copy(update={"events": events})
            self._last_heard = self._now()

    @property
    def progress(self) -> Progress:
        """The latest state, whole and frozen, with the time until now."""
        with self._lock:
            stage, since = self._shown_stage()
            shown = {
                "account": self._account.model_copy(update={"clock": self._clock.read()}),
                "stage": stage,
                "trackers": list(self.trackers.values()),
                "stage_seconds": self._now() - since,
                "waiting": self._longest_wait(),
                "fetched_bytes_per_second": self._fetch_speed() if stage == "Downloading" else 0,
            }
            return self._progress.model_copy(update=shown)

    def _shown_stage(self) -> tuple[Stage | str, float]:
        """The stage with what it is about now, and since when it is: a phase of the step, a
        download, a wait for the hub."""
        stage = self._progress.stage
        if stage == "Training":
            return self._phase, max(self._phase_since, self._stage_since)
        if stage in _MAY_FETCH and "Hub" in self._waits:
            return "WaitingForHub", self._waits["Hub"][0]
        is_downloading = len(self._arrivals) > 1
        if stage in _MAY_FETCH and is_downloading:
            pause = self._now() - self._arrivals[-1][0]
            if pause < FETCH_PAUSE_SECONDS:
                return "Downloading", self._fetch_since
        return stage, self._stage_since

    def _fetch_speed(self) -> int:
        """Bytes per second over the last measurements."""
        (begin, before), (end, after) = self._arrivals[0], self._arrivals[-1]
        return max(0, int((after - before) / (end - begin))) if end > begin else 0

    def _longest_wait(self) -> Wait | None:
        """The longest wait."""
        if not self._waits:
            return None
        target, (since, why) = min(self._waits.items(), key=lambda wait: wait[1][0])
        return Wait(target=target, seconds=max(0.0, self._now() - since), why=why)

    def clock(self) -> Clock:
        """The seconds of each part of the run of this process, until now."""
        with self._lock:
            return self._clock.read()

    def step_times(self, interval: int) -> list[StepTime]:
        """When the attempt's first step was, and the newest of every Nth, as far as they are
        over."""
        with self._lock:
            return self._steps.every_nth(interval)

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        with self._lock:
            return self._progress.step

    @property
    def current_stage(self) -> str:
        """The present stage, whatever phase of it: what the watchdog's patience depends on."""
        with self._lock:
            return self._progress.stage

    @property
    def own_events(self) -> int:
        """Events of this rank so far."""
        with self._lock:
            return self._own_events

    @property
    def seconds_since_event(self) -> float:
        """Time since this rank's last finished step, change of stage or part of its work, in
        seconds."""
        with self._lock:
            return self._now() - self._last_event

    @property
    def silent_seconds(self) -> float:
        """Time since the last sign of life of this rank."""
        with self._lock:
            return self._now() - self._last_sign

    @property
    def seconds_since_any_event(self) -> float:
        """Seconds since the last event of any rank that this rank knows of."""
        with self._lock:
            return self._now() - max(self._last_event, self._last_heard)

    def enter_stage(self, name: Stage) -> None:
        """Enter a stage."""
        with self._lock:
            if name == "Exporting":
                self._steps.close_step(self._clock.read())
            self._update(stage=name)

    @contextmanager
    def measure_part(self, name: str) -> Iterator[None]:
        """Measure one part of the start-up."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record_startup(name, time.perf_counter() - begin)

    def record_startup(self, name: str, seconds: float) -> None:
        """Publish the time of one part of the start-up."""
        with self._lock:
            startup = {**self._progress.startup_seconds, name: round(seconds, 3)}
            self._update(startup_seconds=startup)

    def record_startup_point(self, name: str) -> None:
        """Publish how long after the recorder was made the start-up came to this point."""
        self.record_startup(name, self._now() - self._made_at)

    def record_fetched_bytes(self, num_bytes: int) -> None:
        """Something is being fetched of the hub; `num_bytes` bytes of it are there."""
        with self._lock:
            now = self._now()
            last_at, last_bytes = self._arrivals[-1] if self._arrivals else (now, -1)
            if now - last_at >= FETCH_PAUSE_SECONDS:
                self._arrivals.clear()
            if not self._arrivals:
                self._fetch_since = now
            if num_bytes != last_bytes or not self._arrivals:
                self._arrivals.append((now, num_bytes))
            self._update(fetched_bytes=min(num_bytes, MAX_COUNT))

    def record_expected_bytes(self, num_bytes: int) -> None:
        """Record the size of what is fetched next, in bytes; 0 if it is not known. No event."""
        with self._lock:
            expected = min(num_bytes, MAX_COUNT)
            self._progress = self._progress.model_copy(update={"expected_bytes": expected})

    def record_wait(self, target: WaitTarget, why: str) -> None:
        """Who is asked does not answer, for this reason; it has answered, where that is empty."""
        with self._lock:
            if why:
                since, _ = self._waits.get(target, (self._now(), ""))
                self._waits[target] = since, why[:MAX_PROBLEM]
            else:
                self._waits.pop(target, None)

    def record_store_answer(self, problem: str) -> None:
        """The object store has answered (empty), or is asked again for this reason. Both put off
        the verdict Hang."""
        self.record_wait("Store", problem)
        self.record_event()

    def record_rdma_problem(self, problem: str) -> None:
        """The gang's data goes by RDMA as the job asks (empty), or does not, for this reason."""
        self._update(rdma_problem=problem[:MAX_PROBLEM])

    def record_findings(self, findings: list[Finding]) -> None:
        """Record the findings that hold at the last step."""
        self._update(findings=findings)

    def record_revisions(self, revisions: dict[str, str]) -> None:
        """Record the commits and the data that are trained."""
        self._update(revisions=revisions)

    def record_architecture(self, architecture: Architecture | None) -> None:
        """Record the shape of the loaded policy."""
        self._update(architecture=architecture)

    def record_resume(
        self,
        step: int,
        sealed_at: float,
        began_at: Beginning,
        own_checkpoint: Checkpoint | None = None,
    ) -> None:
        """The run continues from a checkpoint of this step that was sealed then, in unix seconds;
        step 0 for none.

        `own_checkpoint` is that checkpoint if it is one of this job.
        """
        with self._lock:
            self._account = self._account.model_copy(update={"began_at": began_at})
            self._update(resumed_from_step=step, step=step, checkpoint=own_checkpoint)
        if step:
            self.record_metrics({CHECKPOINT_STEP.key: float(step), CHECKPOINT_TIME.key: sealed_at})

    def adopt_outcome(self, earlier: Outcome) -> None:
        """An earlier attempt had reached the end: its numbers are the run's, and nothing of its
        time is lost."""
        with self._lock:
            clock = earlier.account.clock if earlier.account else Clock()
            self._account = Account(began_at=Beginning(attempt=earlier.attempt, clock=clock))
        self.export = earlier.export
        self._update(
            step=earlier.step,
            total_steps=earlier.total_steps,
            metrics=earlier.metrics,
            checkpoint=earlier.checkpoint,
        )

    def record_checkpoint(self, checkpoint: Checkpoint, seconds: float) -> None:
        """A checkpoint is complete, and training stood still for `seconds`."""
        self.checkpoint_step = checkpoint.step
        with self._lock:
            self._account = self._account.model_copy(update={"sealed": self._clock.read()})
        self.add_to_counter(CHECKPOINTS.key)
        times = {CHECKPOINT_SECONDS.key: seconds, CHECKPOINT_TIME.key: checkpoint.time}
        self.record_metrics({CHECKPOINT_STEP.key: float(checkpoint.step), **times})
        self._update(checkpoint_problem="", checkpoint=checkpoint)

    def record_checkpoint_failure(self, problem: str) -> None:
        """A checkpoint could not be written, for this reason."""
        self.add_to_counter(CHECKPOINT_FAILURES.key)
        self._update(checkpoint_problem=problem[:MAX_PROBLEM])

    def begin_training(self, step: int, total_steps: int) -> None:
        """Training starts after `step` finished steps of `total_steps`."""
        with self._lock:
            self._update(step=step, total_steps=total_steps, stage="Training")
            self._steps.begin(self._clock.read())
        self.record_metrics({metric.key: 0.0 for metric in FROM_ZERO})

    def record_step(self, step: int, epoch: float | None, seconds: float) -> None:
        """An optimizer step finished after `seconds`."""
        if "total" not in self._progress.startup_seconds:
            self.record_startup_point("total")
        self._durations.append(seconds)
        mean = sum(self._durations) / len(self._durations)
        with self._lock:
            self._steps.finish_step(step, self._clock.read())
            self._update(step=step, epoch=epoch, last_step_time=unix_time(), seconds_per_step=mean)

    def record_metrics(self, metrics: dict[str, float]) -> None:
        """Merge the values of a step: keys that it didn't log keep their last value. NaN and
        infinity are values, too: the last finite one in their place would hide them."""
        with self._lock:
            self._update(metrics={**self._progress.metrics, **metrics})

    def add_to_counter(self, key: str) -> None:
        """Add 1 to the counter `key`, which starts at 0 with the attempt."""
        with self._lock:
            self.record_metrics({key: self._progress.metrics.get(key, 0.0) + 1.0})

    def record_nonfinite_step(self, step: int) -> None:
        """Count a step with a number that is not finite, once however often it is called."""
        with self._lock:
            if step != self._not_finite_step:
                self._not_finite_step = step
                self.add_to_counter(NONFINITE_STEPS.key)

    def record_memory_peaks(self, peaks: dict[str, int]) -> None:
        """Peak bytes per phase, largest of all ranks."""
        with self._lock:
            self._update(memory={**self._progress.memory, **peaks})
