"""Writes the status of GRPOJobs: at once for a commit, and otherwise as often as the throttle
allows.

Each write carries the resourceVersion that the decision was made on, so that no decision overwrites
what it has not seen. The API server may take a write whose answer is lost. The next look at the job
reports such a write, because its events would never be sent otherwise.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.cache import Cache, version_of
from grpo_kube.client import Client
from grpo_kube.objects.errors import ClusterError, Conflict, Denied, NotFound
from grpo_kube.objects.resources import Object, ObjectKey, merge_patch
from grpo_kube.objects.times import Observed

from ..decide.decisions import Decision
from ..decide.observation import Observation
from ..records.names import GRPOJOBS
from ..records.records import GRPOJobRecord
from ..report.status import build_status, with_unknown_fields

log = logging.getLogger(__name__)

MOST_UNCONFIRMED = 8
"""Statuses that are remembered of a job: a webhook may let all of its writes fail for days."""
Written = Callable[[GRPOJobRecord, GRPOJobStatus, float], None]
"""Takes the job before a status write, its new status, and the unix time in seconds."""
URGENT = frozenset(
    {"phase", "attempt", "outcome", "restarts", "completionTime", "observedGeneration"}
)
"""Fields whose change is written at once. Others wait a little for company: they move all the time,
and every write costs the API server."""
REPORTED = frozenset(
    {
        "progress",
        "metrics",
        "findings",
        "memory",
        "pods",
        "outcome",
        "revisions",
        "usage",
        "checkpoint",
        "export",
        "tracking",
        "preflight",
    }
)
"""Fields that pods report. Others follow from decisions, and are written without these."""
STARTING_INTERVALS = 2
"""Status intervals between two writes while a gang starts: there is little to report, and in a
burst each write delays the pods of other jobs."""
FETCH_FIELDS = {"fetchedBytes", "fetchedBytesPerSecond", "expectedBytes", "stageEnd"}
STAGE_FIELDS = {"stage", "stageSince"} | FETCH_FIELDS
FETCH_PAUSE = 60.0
"""Seconds between two writes that only say how far a download is."""


def _has_only(patch: Mapping[str, Any], dropped: Mapping[str, Any]) -> bool:
    """True if the patch has no field but those that were dropped, whatever their values."""
    for name, value in patch.items():
        if name not in dropped:
            return False
        before = dropped[name]
        if isinstance(value, dict) and isinstance(before, dict):
            if not _has_only(value, before):
                return False
        elif isinstance(value, dict | list) and value != before:
            return False
    return True


class StatusThrottle:
    """Says when each job's status may be written again."""

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two writes of a job's status that change nothing urgent."""
        self._interval = interval
        self._written_at: dict[ObjectKey, Observed] = {}
        self._dropped: dict[ObjectKey, Mapping[str, Any]] = {}

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone."""
        self._written_at.pop(key, None)
        self._dropped.pop(key, None)

    def is_known(self, key: ObjectKey, patch: Mapping[str, Any]) -> bool:
        """True if the patch has only what the API server dropped of the last write."""
        return _has_only(patch, self._dropped.get(key, {}))

    def seconds_left(self, observation: Observation, patch: Mapping[str, Any]) -> float:
        """Seconds until a patch of the status may be written; at most 0 if it may be now."""
        last = self._written_at.get(observation.job.key)
        if last is None or URGENT & patch.keys():
            return 0.0
        starting = observation.job.is_active and not observation.has_gang_started
        # A condition that changes is shown at once, except while the gang starts.
        if "conditions" in patch and not starting:
            return 0.0
        pause = self._interval * (STARTING_INTERVALS if starting else 1)
        changes = patch.get("progress", {}).keys()
        if changes and patch.keys() <= {"progress", "usage"}:
            if changes <= FETCH_FIELDS:
                pause = FETCH_PAUSE
            elif changes <= STAGE_FIELDS:
                pause = self._interval * STARTING_INTERVALS
        return pause - (observation.at - last)

    def record_write(self, key: ObjectKey, now: Observed, dropped: Mapping[str, Any]) -> None:
        """A status was written, of which the API server did not keep this: an older definition
        drops new fields.

        Written again and again, those would make a loop of writes.
        """
        self._written_at[key] = now
        if dropped and dropped != self._dropped.get(key):
            field_names = ", ".join(dropped)
            log.warning("%s: the API server did not keep %s of the status", key, field_names)
        if dropped:
            self._dropped[key] = dropped
        else:
            self._dropped.pop(key, None)


class StatusWriter:
    """Writes statuses, and keeps the cache of GRPOJobs up to date with the answers."""

    def __init__(
        self,
        cluster: Client,
        grpojobs: Cache[GRPOJobRecord],
        interval: float,
        on_write: Written,
    ) -> None:
        """`interval`: see StatusThrottle; `on_write` is called after each write."""
        self._cluster = cluster
        self._grpojobs = grpojobs
        self._throttle = StatusThrottle(interval)
        self._on_write = on_write
        self._unconfirmed: dict[ObjectKey, tuple[GRPOJobRecord, list[GRPOJobStatus]]] = {}
        """Of each job whose last writes failed: the job before them, and the statuses sent."""

    async def commit(self, observation: Observation, decision: Decision) -> None:
        """Write the status that the decision leads to, at once.

        Raises:
            Conflict: the GRPOJob changed meanwhile; the cache has been brought up to date.
            ClusterError: the API server refused or did not answer.
        """
        new, wanted = self._next_status(observation, decision)
        await self._write(observation, decision, new, wanted)

    async def publish(self, observation: Observation, decision: Decision) -> float | None:
        """Write the status if it differs. Return the seconds after which the throttle allows it;
        None if none is due.

        Raises:
            Conflict: the GRPOJob changed meanwhile; the cache has been brought up to date.
            ClusterError: the API server refused or did not answer.
        """
        new, wanted = self._next_status(observation, decision)
        patch = merge_patch(observation.job.raw_status, wanted)
        if self._throttle.is_known(observation.job.key, patch):
            return None
        seconds_left = self._throttle.seconds_left(observation, patch)
        if seconds_left > 0:
            return seconds_left
        await self._write(observation, decision, new, wanted)
        return None

    def confirm(self, observation: Observation) -> None:
        """Report a write that the API server took although it seemed to fail."""
        job = observation.job
        before, statuses = self._unconfirmed.get(job.key, (job, []))
        # The watch may be later than the next look.
        if (before.uid, before.version) == (job.uid, job.version):
            return
        del self._unconfirmed[job.key]
        accepted = [sent for sent in statuses if sent.conditions == job.status.conditions]
        if accepted and before.uid == job.uid and before.status.conditions != job.status.conditions:
            self._on_write(before, accepted[-1], observation.now)

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone."""
        self._throttle.forget(key)
        self._unconfirmed.pop(key, None)

    def _next_status(
        self, observation: Observation, decision: Decision
    ) -> tuple[GRPOJobStatus, Object]:
        """The status that the decision leads to, and the JSON that is to be stored."""
        self.confirm(observation)
        job, new = observation.job, build_status(observation, decision)
        return new, with_unknown_fields(job.raw_status, job.status, new)

    async def _write(
        self, observation: Observation, decision: Decision, new: GRPOJobStatus, wanted: Object
    ) -> None:
        """Send the patch that leads to the new status, then report it to `on_write`."""
        job = observation.job
        patch = merge_patch(job.raw_status, wanted)
        log.debug("%s: %s writes %s", job.key, decision.action, ", ".join(patch))
        try:
            answer, sent = await self._patch(job, patch)
        except (Conflict, NotFound) as error:
            # After a lost answer the client's own second try ends in a conflict with the first.
            self._record_unconfirmed(job, new)
            await self._read_again(job)
            raise Conflict(str(error), error.code) from error
        except ClusterError:
            self._record_unconfirmed(job, new)
            raise
        self._unconfirmed.pop(job.key, None)
        self._grpojobs.put(answer)
        missing = merge_patch(answer.get("status") or {}, wanted)
        # What was denied is sent again: its next value may be in order.
        dropped = {field: value for field, value in missing.items() if field in sent}
        self._throttle.record_write(job.key, observation.at, dropped)
        if new.phase != job.status.phase:
            explanation = " ".join(filter(None, (decision.reason, decision.message)))
            log.info(
                "%s: %s%s", job.key, new.phase, f": {explanation}" if explanation else "",
                extra={"attempt": new.attempt},
            )  # fmt: skip
        self._on_write(job, new, observation.now)

    def _record_unconfirmed(self, job: GRPOJobRecord, sent: GRPOJobStatus) -> None:
        _, statuses = self._unconfirmed.setdefault(job.key, (job, []))
        if all(earlier.conditions != sent.conditions for earlier in statuses):
            statuses.append(sent)
        del statuses[:-MOST_UNCONFIRMED]

    async def _read_again(self, job: GRPOJobRecord) -> None:
        """Bring the cache up to date with a job that is not as it was observed."""
        try:
            self._grpojobs.put(await self._cluster.get(GRPOJOBS, *job.key))
        except NotFound:
            # The event of its deletion may have been missed. The kind may be out of service for a
            # moment, too: then a LIST shows the job again.
            self._grpojobs.discard(job.key, job.uid, job.version)

    async def _patch(self, job: GRPOJobRecord, patch: Object) -> tuple[Object, Object]:
        """Patch the status; if denied, without those of the fields that pods report that are denied
        by themselves. Return the last answer and what was sent."""
        try:
            return await self._send(job, job.version, patch), patch
        except Denied as error:
            # A decision must not wait for a number that somebody's program made up.
            sent = {field: value for field, value in patch.items() if field not in REPORTED}
            if len(sent) == len(patch):
                raise
            log.warning("%s: not all that its pods reported is written: %s", job.key, error)
        answer = await self._send(job, job.version, sent)
        # Nor may the other fields: each is sent alone.
        for field, value in patch.items():
            if field in REPORTED:
                with contextlib.suppress(Denied):
                    answer = await self._send(job, version_of(answer)[1], {field: value})
                    sent[field] = value
        return answer, sent

    async def _send(self, job: GRPOJobRecord, version: int, patch: Object) -> Object:
        body = {"metadata": {"resourceVersion": str(version)}, "status": patch}
        return await self._cluster.patch(GRPOJOBS, *job.key, body, "status")
