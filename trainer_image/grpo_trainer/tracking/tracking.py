"""The trackers of a run, as rank 0 has them: they open when training begins, get each logged step,
and end with the process.

Only rank 0 has any. The outcome is written before the trackers are waited for: what they lose at
the end costs no result.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import JobIdentity
from grpo_api.report.report import Result
from grpo_api.spec.tracking import (
    TABLE_TRACKERS,
    TensorboardTracking,
    Tracker,
    TrackerName,
    TrackingSpec,
)
from grpo_api.text.clock import Clock

from ..process.recorder import Recorder
from ..runtime.clock import SYSTEM_CLOCK
from .tracker_feed import End, Groups, TrackerFeed, TrackerRun, row_of, table_of
from .tracker_process import TrackerProcess

log = logging.getLogger(__name__)

SUCCESS_SECONDS = 30.0
"""Time for the trackers to take the last rows of a run that has succeeded."""
FAILURE_SECONDS = 10.0
"""The same of any other end: the next attempt waits for this pod's GPUs."""
_SLICE = 0.05
TOLD = {
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
    """The trackers of a job; none on other ranks than 0. `config` are the fields TOLD of its
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
