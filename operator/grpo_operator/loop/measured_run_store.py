"""Keeps the runs that were measured on this cluster in one ConfigMap, for the plans of other jobs.

A finished job adds a row, and the ConfigMap is written at most once a minute. It holds at most
MOST_ROWS rows, the newest of each setting. Nothing is lost with this process: jobs that finished
after the newest stored row add theirs when an operator begins to lead.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.client import Client
from grpo_kube.objects.errors import AlreadyExists, ClusterError, Conflict, NotFound
from grpo_kube.objects.json_reader import MAX_OBJECT, JsonObject
from grpo_kube.objects.resources import CONFIG_MAPS, Object, ObjectKey
from grpo_kube.objects.times import seconds
from grpo_kube.pacing import yield_often
from grpo_planner.replan.measured_step import finished_run
from grpo_planner.time.measured_runs import (
    NO_RUNS,
    MeasuredRow,
    MeasuredRuns,
    read_rows,
    written_rows,
)

from ..records.names import LABEL_MANAGED_BY, MANAGER
from ..records.records import GRPOJobRecord

log = logging.getLogger(__name__)

DATA_KEY = "runs.json"
"""What `grpo plan --calibration` takes."""
WRITE_PAUSE = 60.0
"""Seconds from one write to the next: each makes waiting jobs of those models plan again."""


class MeasuredRunStore:
    """The rows of the ConfigMap, and those that are still to be written."""

    def __init__(
        self,
        cluster: Client,
        key: ObjectKey,
        jobs: Iterable[GRPOJobRecord],
        changed: Callable[[MeasuredRuns], None],
    ) -> None:
        """`key` names the ConfigMap; `jobs` are all GRPOJobs; `changed` hears the stored rows."""
        self._cluster = cluster
        self._key = key
        self._jobs = jobs
        self._changed = changed
        self._runs = NO_RUNS
        self._new: list[MeasuredRow] = []
        self._is_due = asyncio.Event()

    def record(self, job: GRPOJobRecord, status: GRPOJobStatus) -> None:
        """Add the row of a job whose status has just been written, if it has finished."""
        if status.completion_time is None or job.status.completion_time is not None:
            return
        if row := _row(job, status):
            self._add([row])
            self._is_due.set()

    def _add(self, rows: Iterable[MeasuredRow]) -> None:
        # As many at most as are stored, where the API server takes none.
        self._new = list(MeasuredRuns.newest([*self._new, *rows]).rows)

    async def run(self) -> None:
        """Read the ConfigMap, then write new rows into it, until cancelled."""
        while True:
            try:
                version = await self._load_rows()
                await self._add_missed_jobs()
                newest = MeasuredRuns.newest((*self._runs.rows, *self._new))
                if newest.rows != self._runs.rows:
                    await self._write(version)
            except Conflict:
                # Somebody has edited it: what is there now is read first.
                log.info("%s: changed meanwhile; trying again", self._key)
                self._is_due.set()
            except ClusterError as error:
                log.warning("%s: measured runs can't be stored: %s", self._key, error)
                self._is_due.set()
            await asyncio.sleep(WRITE_PAUSE)
            await self._is_due.wait()
            self._is_due.clear()

    async def _load_rows(self) -> str | None:
        """Take the rows that are stored; return the ConfigMap's version, None without one."""
        try:
            stored = JsonObject(await self._cluster.get(CONFIG_MAPS, *self._key))
        except NotFound:
            self._replace_runs([])
            return None
        try:
            # Unreadable is a ValueError, too.
            document = json.loads(stored.part("data").text(DATA_KEY, MAX_OBJECT))
        except (ValueError, RecursionError):
            document = None
        rows, problems = read_rows(document)
        if problems:
            log.warning("%s: %s rows can't be read: %s", self._key, len(problems), problems[0])
        self._replace_runs(rows)
        return stored.part("metadata").text("resourceVersion")

    def _replace_runs(self, rows: Iterable[MeasuredRow]) -> None:
        runs = MeasuredRuns.newest(rows)
        if runs.rows != self._runs.rows:
            self._runs = runs
            self._changed(runs)

    async def _add_missed_jobs(self) -> None:
        """Add the rows of jobs that have finished since the newest row, under a former leader."""
        newest = seconds(self._runs.rows[0].date) if self._runs.rows else None
        # A cluster keeps ten thousand ended jobs: only those are unpacked that may add a row.
        ended = [job for job in self._jobs if job.completed > (newest or 0.0)]
        rows = [_row(job, job.status) async for job in yield_often(ended)]
        self._add(filter(None, rows))

    async def _write(self, version: str | None) -> None:
        """Store the known rows and the new ones; Conflict if they have changed since."""
        stored_runs = MeasuredRuns.newest((*self._runs.rows, *self._new))
        text = json.dumps({"runs": written_rows(stored_runs.rows)}, separators=(",", ":"))
        data: Object = {"data": {DATA_KEY: text}}
        if version is None:
            labels = {LABEL_MANAGED_BY: MANAGER}
            metadata = {"name": self._key.name, "namespace": self._key.namespace, "labels": labels}
            try:
                await self._cluster.create(
                    CONFIG_MAPS, self._key.namespace, {"metadata": metadata, **data}
                )
            except AlreadyExists as error:
                raise Conflict(str(error)) from error
        else:
            body = {"metadata": {"resourceVersion": version}, **data}
            await self._cluster.patch(CONFIG_MAPS, *self._key, body)
        # Others may have come while the write was under way.
        self._new = [row for row in self._new if row not in stored_runs.rows]
        self._replace_runs(stored_runs.rows)


def _row(job: GRPOJobRecord, status: GRPOJobStatus) -> MeasuredRow | None:
    """The row of a finished job; None where no step of it was measured."""
    return finished_run(job.spec, status, str(job.key)) if job.spec else None
