"""Feeds one tracker with the rows of a run, and counts those that it does not get.

Training only puts rows into a bounded queue, which takes microseconds and never waits. A thread
hands them to the tracker's process one by one. A process that fails, or does not answer, is ended
and started again after a pause. A row that was on its way then is lost, since it may be what the
tracker fails on; the rows behind it wait. A full queue loses its oldest row.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from grpo_api.report.report import MAX_TRACKER_PROBLEM, TrackerReport
from grpo_api.spec.tracking import TrackerName
from grpo_api.text.clock import Clock
from grpo_api.text.quantity import MAX_COUNT

log = logging.getLogger(__name__)

QUEUE_ROWS = 2000
"""Rows that wait for a tracker: five hours of steps of ten seconds, at 3 KB each."""
QUEUE_TABLES = 64
"""Rows behind which no table is queued: a table has up to a megabyte, and a tracker is to have less
than 64 MiB of rank 0's memory."""
MAX_TABLE_BYTES = 2**20
MAX_KEYS = 512
MAX_KEY = 256
OPEN_SECONDS = 120.0
"""Time for a tracker to open a run; W&B's own limit is 90 s."""
ROW_SECONDS = 60.0
"""Time for it to take a row: more means that its library or its disk is stuck."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds before a tracker's process is started again; each pause is twice the one before."""
_SLICE = 1.0
_MAX_PRINTED = 20

End = Literal["finished", "failed", "killed"]
"""How a run ended, in the trackers' words; a resumed run goes on after each of them."""


Groups = Sequence[Mapping[str, Any]]
"""Samples of a step, as RunHistory keeps them."""


class Row(NamedTuple):
    """What a step logged."""

    step: int
    values: dict[str, float]
    groups: Groups = ()
    """A table of completions, in a row of its own."""


class RowRefused(Exception):
    """The tracker raised on this row, and takes others."""


class TrackerFailed(Exception):
    """The tracker's process ended, did not answer in time, or could not open the run."""


class TrackerRun(Protocol):
    """A run that is open in a tracker's process."""

    run_id: str
    url: str | None

    def send(self, row: Row, seconds: float) -> None:
        """Hand over a row; raises RowRefused or TrackerFailed."""

    def finish(self, end: End, seconds: float) -> None:
        """End the run in the tracker and wait until it has everything; raises TrackerFailed."""

    def close(self) -> None:
        """End the process and all that it started. Harmless when called twice."""


OpenRun = Callable[[int, float], TrackerRun]
"""Opens the run for rows from this step on, within these seconds; raises TrackerFailed."""


def row_of(step: int, logs: Mapping[str, Any]) -> Row:
    """The numbers among a step's logs, NaN and infinity included, bounded in size."""
    values: dict[str, float] = {}
    for key, value in logs.items():
        if len(values) >= MAX_KEYS:
            break
        if not isinstance(key, str) or not isinstance(value, int | float):
            continue
        try:
            # A lone surrogate has no UTF-8, and a very long integer no float.
            values[key[:MAX_KEY].encode(errors="replace").decode()] = float(value)
        except OverflowError:
            continue
    return Row(step, values)


def table_of(step: int, groups: Groups) -> Row:
    """A table of these groups: as many as fit into MAX_TABLE_BYTES."""
    fitting = list(groups)
    while fitting and len(json.dumps(fitting)) > MAX_TABLE_BYTES:
        fitting.pop()
    return Row(step, {}, fitting)


class TrackerFeed:
    """The rows on their way to one tracker."""

    def __init__(
        self,
        name: TrackerName,
        open_run: OpenRun,
        on_report: Callable[[TrackerReport], None],
        clock: Clock,
    ) -> None:
        """`on_report` is given every change; `clock` is that of pauses and of the end."""
        self._name: TrackerName = name
        self._open_run = open_run
        self._on_report = on_report
        self._clock = clock
        self._changed = threading.Condition()
        """Held over the queue and the report: training writes both, too."""
        self._rows: deque[Row] = deque()
        """The first one is on its way until it is delivered or lost."""
        self._run: TrackerRun | None = None
        self._failures = 0
        self._end: End | None = None
        self._deadline = float("inf")
        self._printed: set[str] = set()
        self.report = TrackerReport(name=name)

    def put(self, row: Row) -> None:
        """Queue a row. Never waits."""
        with self._changed:
            if row.groups and len(self._rows) >= QUEUE_TABLES:
                self._record_loss(1, self.report.problem or "it takes rows too slowly")
                return
            if len(self._rows) >= QUEUE_ROWS:
                self._rows.popleft()
                self._record_loss(1, self.report.problem or "it takes rows too slowly")
            self._rows.append(row)
            self._changed.notify_all()

    def end(self, end: End, seconds: float) -> None:
        """Ask for the end of the run, once all rows are delivered or these seconds are over."""
        with self._changed:
            self._end = end
            self._deadline = self._clock.now() + seconds
            self._changed.notify_all()

    def run(self, first_step: int) -> None:
        """Deliver rows from that step on until the end was asked for; the thread's whole work."""
        self._require_run(first_step)
        while (row := self._next_row()) is not None:
            self._deliver(row)
        self._finish()

    def abandon(self) -> None:
        """Count all that is not delivered as lost, and end the process: the time is up."""
        with self._changed:
            queued = len(self._rows)
            self._rows.clear()
            if queued:
                self._record_loss(queued, self.report.problem or "its time at the end was up")
        if self._run:
            self._run.close()

    def _next_row(self) -> Row | None:
        """The oldest row, waiting for one; None at the end."""
        with self._changed:
            while not self._rows and self._end is None:
                self._changed.wait()
            if not self._rows or self._seconds_left() <= 0:
                return None
            return self._rows[0]

    def _take(self, row: Row) -> bool:
        """Remove the row from the queue. False if it was counted as lost meanwhile."""
        with self._changed:
            is_first = bool(self._rows) and self._rows[0] is row
            if is_first:
                self._rows.popleft()
            return is_first

    def _drop(self, row: Row, problem: str) -> None:
        """Count the row as lost, once."""
        self._record_loss(int(self._take(row)), problem)

    def _deliver(self, row: Row) -> None:
        run = self._require_run(row.step)
        if run is None:
            return
        try:
            run.send(row, min(ROW_SECONDS, self._seconds_left()))
        except RowRefused as refusal:
            self._drop(row, str(refusal))
        # Whatever it is: the thread has to live, and the next try may work.
        except Exception as failure:
            self._drop(row, str(failure))
            self._record_failure()
        else:
            self._take(row)
            self._failures = 0
            self._update(problem="")

    def _require_run(self, step: int) -> TrackerRun | None:
        """The open run, opened again where it is not; None if time is up before that works."""
        while self._run is None:
            self._pause()
            if self._seconds_left() <= 0:
                return None
            try:
                self._run = self._open_run(step, min(OPEN_SECONDS, self._seconds_left()))
            except Exception as failure:  # also of a node without memory for one more process
                self._update(problem=str(failure))
                self._record_failure()
                continue
            self._update(run_id=self._run.run_id, url=self._run.url, problem="")
        return self._run

    def _pause(self) -> None:
        """Wait before the next try. The end shortens the wait, since there is little time left."""
        if not self._failures:
            return
        began = self._clock.now()
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 16))
        while self._seconds_left() > 0:
            wanted = pause if self._end is None else FIRST_PAUSE
            seconds_left = wanted - (self._clock.now() - began)
            if seconds_left <= 0:
                return
            self._clock.sleep(min(_SLICE, seconds_left))

    def _finish(self) -> None:
        if self._run is None or self._end is None:
            return
        try:
            self._run.finish(self._end, max(0.0, self._seconds_left()))
        except TrackerFailed as failure:
            self._update(problem=f"it has not confirmed the end of the run: {failure}")
        self._run.close()

    def _record_failure(self) -> None:
        self._failures += 1
        if self._run:
            self._run.close()
            self._run = None

    def _seconds_left(self) -> float:
        return self._deadline - self._clock.now()

    def _record_loss(self, rows: int, problem: str) -> None:
        with self._changed:
            lost = min(self.report.lost_rows + rows, MAX_COUNT)
            self._update(lost_rows=lost, problem=problem)

    def _update(self, **changes: Any) -> None:
        """Publish a change; a new problem is printed, too."""
        problem = changes.get("problem", "")[:MAX_TRACKER_PROBLEM]
        if "problem" in changes:
            changes["problem"] = problem
        with self._changed:
            report = self.report.model_copy(update=changes)
            if report == self.report:
                return
            self.report = report
            self._on_report(report)
        if problem and problem not in self._printed and len(self._printed) < _MAX_PRINTED:
            self._printed.add(problem)
            log.warning(f"tracking: {self._name}: {problem}; training goes on")
