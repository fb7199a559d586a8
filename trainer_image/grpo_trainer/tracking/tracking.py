"""The trackers of a run, as rank 0 has them: they open when training begins, get each logged step,
and end with the process.

Only rank 0 has any. The outcome is written before the trackers are waited for: what they lose at
the end costs no result.

Each tracker runs in a process of its own (tracker_child.py). Each request to it has one answer and
its own time limit, so that a process which hangs is noticed and ended. Its environment has no
secret but the tracker's own, and no GPU.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import JobIdentity
from grpo_api.report.report import MAX_URL, Result, TrackerReport
from grpo_api.spec.tracking import (
    TABLE_TRACKERS,
    TensorboardTracking,
    Tracker,
    TrackerName,
    TrackingSpec,
)
from grpo_api.text.clock import Clock
from grpo_api.text.contract import ENV_PREFIX, TRACKERS_ENV, tracking_token_env

from ..process.recorder import Recorder
from ..runtime.child_process import ChildProcess
from ..runtime.clock import SYSTEM_CLOCK
from .tracker_feed import (
    End,
    Groups,
    Row,
    RowRefused,
    TrackerFailed,
    TrackerFeed,
    TrackerRun,
    row_of,
    table_of,
)

log = logging.getLogger(__name__)

SUCCESS_SECONDS = 30.0
"""Time for the trackers to take the last rows of a run that has succeeded."""
FAILURE_SECONDS = 10.0
"""The same of any other end: the next attempt waits for this pod's GPUs."""
_SLICE = 0.05
_MAX_ANSWER = 2**16
CONFIG_FIELDS = {
    "job", "model", "dataset", "rewards", "training", "generation", "reference", "adapter",
    "checkpoint", "guard", "export", "execution",
}  # fmt: skip
"""Fields of the plan that a tracker receives: spec and plan. Of secrets they have names alone."""


class Tracking:
    """All trackers of one process."""

    def __init__(
        self,
        feeds: tuple[TrackerFeed, ...] = (),
        clock: Clock = SYSTEM_CLOCK,
        *,
        sends_samples: bool = False,
    ) -> None:
        """Without feeds it does nothing."""
        self._feeds = feeds
        self._sends_samples = sends_samples
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._ending = threading.Lock()

    def begin(self, step: int) -> None:
        """Training begins after this step: open the runs."""
        for feed in self._feeds:
            thread = threading.Thread(
                target=feed.run, args=(step + 1,), name=f"tracking-{feed.report.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Pass on what a step logged. Takes microseconds, whatever the trackers do."""
        if not self._feeds:
            return
        row = row_of(step, logs)
        for feed in self._feeds:
            feed.put(row)

    def send_samples(self, step: int, groups: Groups) -> None:
        """Pass on the samples that were kept of a step, if the job wants that."""
        feeds = [feed for feed in self._feeds if feed.report.name in TABLE_TRACKERS]
        if not feeds or not self._sends_samples:
            return
        table = table_of(step, groups)
        for feed in feeds if table.groups else ():
            feed.put(table)

    def end(self, result: Result) -> None:
        """End the runs, and wait for the trackers for a bounded time. A second call does nothing:
        the watchdog may be the other caller."""
        if not self._threads or not self._ending.acquire(blocking=False):
            return
        seconds = SUCCESS_SECONDS if result is Result.SUCCEEDED else FAILURE_SECONDS
        deadline = self._clock.now() + seconds
        for feed in self._feeds:
            feed.end(end_of(result), seconds)
        while self._clock.now() < deadline and any(thread.is_alive() for thread in self._threads):
            self._clock.sleep(_SLICE)
        for feed in self._feeds:
            feed.abandon()
            report = feed.report
            if report.lost_rows or report.problem:
                log.warning(
                    f"tracking: {report.name}: {report.lost_rows} rows of this attempt were lost: "
                    f"{report.problem}"
                )


NO_TRACKING = Tracking()


def end_of(result: Result) -> End:
    """How the trackers call an end; a suspension is a SIGTERM, too."""
    if result is Result.SUCCEEDED:
        return "finished"
    return "killed" if result is Result.PREEMPTED else "failed"


def child_environment(environment: Mapping[str, str], tracker: TrackerName) -> dict[str, str]:
    """What a tracker's process inherits: all but the secrets of others and the GPUs."""
    inherited = {
        name: value
        for name, value in environment.items()
        if name != "HF_TOKEN" and not name.startswith(ENV_PREFIX)
    }
    for name in (tracking_token_env(tracker), TRACKERS_ENV):
        if name in environment:
            inherited[name] = environment[name]
    # One thread: the cores belong to training.
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class TrackerProcess:
    """A run that is open in a process of its own."""

    def __init__(self, tracker: TrackerName, request: dict[str, Any], seconds: float) -> None:
        """Start the process and open the run, as the request says, within these seconds.

        Raises:
            TrackerFailed: the process ended, did not answer, or could not open the run.
        """
        program = [sys.executable, "-P", "-m", f"{__package__}.tracker_child"]
        self._child = ChildProcess(program, child_environment(os.environ, tracker))
        try:
            # It reads only once it has imported: a request that is not read could block here.
            self._receive(seconds)
            answer = self._ask(request, seconds)
        except TrackerFailed:
            self.close()
            raise
        self.run_id = str(answer["run_id"])[:256]
        self.url = shown_url(answer.get("url"))

    def send(self, row: Row, seconds: float) -> None:
        """Hand over a row.

        Raises:
            RowRefused: the tracker raised on it.
            TrackerFailed: the process ended or did not answer.
        """
        message = {"step": row.step, "groups": row.groups, "logs": row.values}
        answer = self._ask(message, seconds)
        if "refused" in answer:
            raise RowRefused(answer["refused"])

    def finish(self, end: End, seconds: float) -> None:
        """End the run.

        Raises:
            TrackerFailed: the tracker did not confirm it.
        """
        self._ask({"end": end}, seconds)

    def close(self) -> None:
        """End the process and all that it started. Harmless when called twice."""
        self._child.close()

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            self._child.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise TrackerFailed(self._end_message()) from error
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            TrackerFailed: none came, or it says why the run could not be opened.
        """
        try:
            if not self._child.connection.poll(max(0.0, seconds)):
                raise TrackerFailed(f"it did not answer in time ({seconds:.0f} s)")
            answer: dict[str, Any] = json.loads(self._child.connection.recv_bytes(_MAX_ANSWER))
        except (EOFError, OSError) as error:
            raise TrackerFailed(self._end_message()) from error
        if "problem" in answer:
            raise TrackerFailed(answer["problem"])
        return answer

    def _end_message(self) -> str:
        return f"its process ended with status {self._child.status()}"


def shown_url(url: Any) -> str | None:
    """A run's page as the status may show it, without its query; None for anything else."""
    text = str(url or "").partition("?")[0][: MAX_URL + 1]
    try:
        return TrackerReport(name="url", url=text or None).url
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class TrackedJob:
    """The job as its trackers see it."""

    identity: JobIdentity
    run_name: str
    checkpoint_directory: str | None
    config: Mapping[str, Any]
    """Spec and plan."""

    def request(self, name: TrackerName, tracker: Tracker, first_step: int) -> dict[str, Any]:
        """What a tracker's process is asked to open (RunRequest)."""
        return {
            "tracker": name,
            "settings": tracker.model_dump(
                mode="json", by_alias=False, exclude={"token_secret_ref"}, exclude_none=True
            ),
            "uid": self.identity.uid,
            "name": self.run_name,
            "folder": self._folder(tracker),
            "first_step": first_step,
            "config": dict(self.config),
        }

    def _folder(self, tracker: Tracker) -> str:
        """TensorBoard's folder of the run; empty for other trackers."""
        if not isinstance(tracker, TensorboardTracking):
            return ""
        if tracker.directory:
            job = self.identity
            return str(Path(tracker.directory) / f"{job.namespace}-{job.name}-{job.uid[:8]}")
        return f"{self.checkpoint_directory}/tensorboard"


def tracking_of(
    tracking: TrackingSpec | None,
    identity: JobIdentity,
    checkpoint_directory: str | None,
    config: Mapping[str, Any],
    recorder: Recorder,
) -> Tracking:
    """The trackers of a job; none on other ranks than 0. `config` are the CONFIG_FIELDS of its
    plan."""
    if tracking is None or not recorder.place.is_main:
        return NO_TRACKING
    run_name = tracking.run_name or f"{identity.namespace}/{identity.name}"
    job = TrackedJob(identity, run_name, checkpoint_directory, config)
    feeds = []
    for name, tracker in tracking.trackers:
        open_run = partial(_open_run, job, name, tracker)
        on_report = partial(recorder.trackers.__setitem__, name)
        feeds.append(TrackerFeed(name, open_run, on_report, SYSTEM_CLOCK))
    return Tracking(tuple(feeds), SYSTEM_CLOCK, sends_samples=tracking.samples)


def _open_run(
    job: TrackedJob, name: TrackerName, tracker: Tracker, first_step: int, seconds: float
) -> TrackerRun:
    return TrackerProcess(name, job.request(name, tracker, first_step), seconds)
