"""Trackers beside a live training: whatever becomes of them, training is the same to the last
digit. That a restart goes on in the same run is in test_worker.py.

The gate has transformers' own callback in real processes, with a writer that fails on demand
(tensorboardX.py). The trackers themselves are in test_trackers.py.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import Progress, Result, TrackerReport
from grpo_api.spec.tracking import TensorboardTracking, TrackingSpec
from grpo_api.text.contract import DATA_MOUNT_ENV, TRACKERS_ENV
from grpo_trainer.hub.repositories import Hub
from grpo_trainer.preflight.findings import POD, Findings, Preflight
from grpo_trainer.preflight.tracking_checks import check_tracking
from grpo_trainer.runtime.clock import SYSTEM_CLOCK
from grpo_trainer.telemetry.progress_server import ProgressCollector
from grpo_trainer.tracking.tracker_feed import TrackerFeed
from grpo_trainer.tracking.tracking import TrackedJob, TrackerProcess, Tracking
from tests.stepped_clock import SteppedClock
from tests.support.facts.resume_cases import Case, Story, plan, train, write_data
from tests.support.ranks import demo_model

pytestmark = pytest.mark.realtime

STEPS = 4
ROWS = STEPS + 1
"""The last one is transformers' summary of the run."""
CASE = Case(rows=8, steps=STEPS, save=2, kill=2)
FAULTS = ("killed", "full", "hangs")
PATIENCE = 60.0
"""Seconds of real time for processes to start and take their rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a model and data."""
    folder = tmp_path_factory.mktemp("tracked")
    demo_model.save_policy(folder / "model")
    write_data(CASE, folder)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(DATA_MOUNT_ENV, str(folder))
        environment.setenv(TRACKERS_ENV, str(Path(__file__).parent))
        yield folder


class Trackers:
    """Event files in a folder for each fault; `well` has none."""

    def __init__(self, folder: Path, faults: tuple[str, ...]) -> None:
        self._folder = folder
        self._plan = plan(CASE, folder, 1)
        self._clock = SteppedClock(self._wait_for_answers)
        self.feeds = {fault: self._feed(fault) for fault in faults}
        self.tracking = Tracking(tuple(self.feeds.values()), self._clock)

    def _feed(self, fault: str) -> TrackerFeed:
        return TrackerFeed("tensorboard", partial(self._open, fault), lambda _: None, self._clock)

    def _open(self, fault: str, step: int, _: float) -> TrackerProcess:
        job = TrackedJob(self._plan.job, "a run", None, {})
        request = job.request("tensorboard", TensorboardTracking(), step)
        return TrackerProcess(
            "tensorboard", request | {"folder": str(self._folder / "logs" / fault)}, PATIENCE
        )

    def _wait_for_answers(self) -> None:
        """The half minute at the end passes once all trackers that answer have ended: a busy
        machine is slow to do so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for fault, thread in zip(self.feeds, self.tracking._threads, strict=True):
            if fault != "hangs":
                thread.join(PATIENCE)

    def _is_done(self, fault: str) -> bool:
        if fault == "full":
            return self.feeds[fault].report.lost_rows == ROWS
        return fault == "hangs" or bool(self.losses(fault, STEPS))

    def rows(self, fault: str) -> list[dict[str, Any]]:
        """What was written."""
        path = self._folder / "logs" / fault / "rows"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, fault: str, step: int) -> list[float]:
        """The losses that were written of a step."""
        return [
            row["value"]
            for row in self.rows(fault)
            if row.get("name") == "train/loss" and row["step"] == step
        ]

    def end(self) -> dict[str, TrackerReport]:
        """End all, once each tracker that answers has all its rows; what each reports."""
        for _ in range(int(PATIENCE / 0.05)):
            if all(self._is_done(fault) for fault in self.feeds):
                break
            SYSTEM_CLOCK.sleep(0.05)
        self.tracking.end(Result.SUCCEEDED)
        return {fault: feed.report for fault, feed in self.feeds.items()}


def preflight_report(tmp_path: Path, **trackers: Any) -> PreflightReport:
    """What the preflight finds about these trackers."""
    job = plan(CASE, tmp_path, 1)
    tracking = TrackingSpec.model_validate(trackers)
    findings = Findings()
    job = job.model_copy(update={"tracking": tracking})
    check_tracking(Preflight(job, POD, Hub({}), findings))
    return findings.report()


def test_the_preflight_names_a_missing_package_and_secret_and_fails_nobody_for_a_silent_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACKERS_ENV, str(Path(__file__).parent))
    secret = {"name": "mine", "key": "token"}
    report = preflight_report(
        tmp_path,
        trackio={"url": "http://127.0.0.1:1", "project": "p", "tokenSecretRef": secret},
        tensorboard={"directory": "/logs"},
    )
    package, token = report.problems
    assert package.path == "spec.tracking.trackio"
    assert "build it with TRACKERS=trackio" in package.message
    assert token.path == "spec.tracking.trackio.tokenSecretRef"
    assert "Secret 'mine' with key 'token' is not there" in token.message
    (away,) = report.skipped
    assert away.message.startswith("http://127.0.0.1:1 does not answer ([Errno 111]")


def same(one: Story, other: Story) -> bool:
    """Whether two attempts did the same to the last digit."""
    return (one.logged, one.weights, one.last) == (other.logged, other.weights, other.last)


def test_faulty_trackers_change_no_digit_of_a_training(folder: Path) -> None:
    without = train(CASE, folder, 1)
    shutil.rmtree(folder / "runs")
    trackers = Trackers(folder, ("well", *FAULTS))
    tracked = train(CASE, folder, 1, tracking=trackers.tracking)
    reports = trackers.end()
    assert same(tracked, without)
    steps = range(1, STEPS + 1)
    logged = {step: without.logged[step]["loss"] for step in steps}
    assert {step: trackers.losses("well", step) for step in steps} == {
        step: [loss] for step, loss in logged.items()
    }
    assert reports["well"] == TrackerReport(
        name="tensorboard", run_id=str(folder / "logs" / "well")
    )
    # A tracker that opens at low priority on busy cores opens too late for an early preemption.
    opened, *delivered = [row["nice"] for row in trackers.rows("well") if "nice" in row]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert (opened, set(delivered)) == (priority, {min(19, priority + 10)})
    assert [len(trackers.losses("killed", step)) for step in steps] == [1, 0, 1, 1]
    assert reports["killed"].lost_rows == 1
    assert reports["full"].problem == "OSError: [Errno 28] No space left on device"
    assert (reports["full"].lost_rows, reports["hangs"].lost_rows) == (ROWS, ROWS)


def test_lost_rows_are_a_metric_of_each_tracker() -> None:
    reports = [TrackerReport(name="wandb", lost_rows=3), TrackerReport(name="mlflow")]
    collector = ProgressCollector(lambda: Progress(attempt=1, trackers=reports), {})
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in collector.collect()
        for sample in family.samples
        if family.name == "grpo_training_tracking_lost_rows"
    ]
    assert samples == [
        ("grpo_training_tracking_lost_rows_total", {"tracker": "wandb"}, 3.0),
        ("grpo_training_tracking_lost_rows_total", {"tracker": "mlflow"}, 0.0),
    ]
