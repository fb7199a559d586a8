"""Makes the spans of each attempt from observations of its job, accepted status writes and rank 0's
reports.

The time of an event is that of the first observation that shows it, by the operator's own clock. A
new operator process continues from the times in the status. A span that it exports a second time
has the same ids as before.

Rank 0 reports durations by its own monotonic clock. The moment of the report puts them on the
operator's clock, and they are clipped to the time between the attempt's admission and that moment.
Pure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from grpo_api.report import traces
from grpo_api.report.report import Progress, Result, StepTime
from grpo_api.status.status import Condition, ConditionType, GRPOJobStatus
from grpo_api.text.timing import Clock
from grpo_kube.objects.json_reader import truncate
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import seconds

from ..decide.observation import Observation
from ..records.packed_job import is_under_way
from ..records.records import GRPOJobRecord
from ..usage.account import pull_time
from .spans import Span, Trace, Value


@dataclass(slots=True)
class Rank0Spans:
    """Which of one attempt's spans that rank 0 knows of have been made."""

    every: int
    """Every which step has a span."""
    _through: int = 0
    """Steps up to this one have theirs, or none."""
    _heard: int = 0
    """The last step in a former operator process's status; 0 for none."""
    _origin: float = float("inf")
    """When rank 0's clock began, by the operator's."""
    _loaded: bool = False
    _proven: bool = False
    _steps: int = 0

    def heard_of(self, step: int) -> None:
        """Record the step in a former operator process's status. Its span may be missing, so it is
        made again."""
        self._heard, self._through = step, max(0, step - 1)

    def report_spans(
        self, trace: Trace, progress: Progress, at: float, earliest: float
    ) -> Iterator[Span]:
        """Yield the spans that this report adds. `at` is its time; no span begins before `earliest`
        (unix seconds)."""
        if progress.account is None:
            return
        clock = progress.account.clock
        self._origin = min(self._origin, at - clock.total)
        timeline = _Timeline(trace, self._origin, earliest, at)
        if self._heard <= progress.resumed_from_step:
            yield from self._start(timeline, clock, progress)
        first = progress.resumed_from_step + 1
        every = traces.stride(self.every, progress.total_steps)
        for one in progress.steps:
            wanted = one.step == first or one.step % every == 0
            if one.step > self._through and wanted and self._steps < traces.MAX_STEPS:
                self._through, self._steps = one.step, self._steps + 1
                yield from timeline.step(
                    one, traces.FIRST_STEP if one.step == first else traces.STEP
                )

    def _start(self, timeline: "_Timeline", clock: Clock, progress: Progress) -> Iterator[Span]:
        after = clock.generating + clock.scoring + clock.training + clock.saving
        if not self._loaded and (clock.proving or after):
            self._loaded = True
            yield timeline.startup(traces.LOADED, 0.0, clock.loading, progress)
        if not self._proven and after:
            self._proven = True
            yield timeline.startup(
                traces.PROVEN, clock.loading, clock.loading + clock.proving, progress
            )


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Rank 0's clock on the operator's."""

    trace: Trace
    origin: float
    earliest: float
    latest: float

    def _at(self, spent: float) -> float:
        return max(self.earliest, min(self.origin + spent, self.latest))

    def startup(self, name: traces.SpanName, begin: float, end: float, progress: Progress) -> Span:
        """A part of the start between two readings of rank 0's clock."""
        known = progress.startup_seconds
        parts = ((one, known.get(one.key.rpartition(".")[2])) for one in traces.STARTUP[name.name])
        attributes = [(one, value) for one, value in parts if value is not None]
        return self.trace.span(name, self._at(begin), self._at(end), attributes=attributes)

    def step(self, step_time: StepTime, name: traces.SpanName) -> Iterator[Span]:
        """Yield the spans of a step and of its parts, one after the other: their real order is not
        reported."""
        begin = self._at(step_time.began.total)
        number = [(traces.STEP_NUMBER, step_time.step)]
        span = self.trace.span(
            name, begin, self._at(step_time.ended.total), number=step_time.step, attributes=number
        )
        yield span
        for part in traces.PARTS:
            spent = getattr(step_time.ended, part.name) - getattr(step_time.began, part.name)
            if spent > 0.0:
                end = min(begin + spent, span.end)
                yield self.trace.span(part, begin, end, number=step_time.step, parent=span.id)
                begin = end


C = ConditionType
MAX_MESSAGE = 1024
DELETED, SUSPENDED = "Deleted", "Suspended"
_FAILURES = frozenset(Result) - {Result.SUCCEEDED, Result.PREEMPTED}


@dataclass(slots=True)
class _Attempt:
    """One attempt in progress, and what of it has been told."""

    trace: Trace
    begin: float
    """When the job began to wait for it."""
    rank0: Rank0Spans
    model: str
    waits_since: float | None = None
    """Since when it waits to be admitted; None once it is."""
    admitted: float = 0.0
    admission: int = -1
    """Tells the admissions of one attempt apart."""
    bound: float | None = None
    started: float | None = None
    latest: float = 0.0
    """Latest end of its spans."""


class AttemptTraces:
    """The traces of all attempts in progress."""

    def __init__(self, put: Callable[[Span], None], *, every: int, version: str) -> None:
        """`put` gets each span once it has ended; every `every`th step has one; `version` is the
        operator's."""
        self._put = put
        self._every = every
        self._version = version
        self._attempts: dict[ObjectKey, _Attempt] = {}

    def record_observation(self, observation: Observation) -> None:
        """What a look shows of an attempt."""
        job = observation.job
        if not job.is_active:
            return
        attempt = self._of(job)
        number = attempt.admission
        if attempt.bound is None and observation.is_gang_bound:
            attempt.bound = max(attempt.admitted, observation.now)
            self._tell(
                attempt,
                attempt.trace.span(traces.BOUND, attempt.admitted, attempt.bound, number=number),
            )
        if attempt.started is None and attempt.bound is not None and observation.has_gang_started:
            attempt.started = max(attempt.bound, observation.now)
            self._tell(
                attempt,
                attempt.trace.span(traces.STARTED, attempt.bound, attempt.started, number=number),
            )
        at = pull_time(observation)
        if observation.pull and at is not None:
            for span in attempt.rank0.report_spans(
                attempt.trace, observation.pull.progress, at, attempt.admitted
            ):
                self._tell(attempt, span)

    def record_status(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        """The API server has taken this status of the job."""
        before = job.is_active
        after = is_under_way(new)
        if before and (not after or new.attempt != job.status.attempt):
            self._end(self._of(job), job, new, now)
        if not after:
            self._attempts.pop(job.key, None)
            return
        goes_on = before and new.attempt == job.status.attempt
        attempt = self._of(job) if goes_on else self._begun(job, new, now)
        admitted = new.condition(C.ADMITTED)
        self._admit(attempt, int(_since(admitted)), now)

    def end_job(self, key: ObjectKey, now: float) -> None:
        """The job was deleted, or is another controller's."""
        attempt = self._attempts.pop(key, None)
        if attempt:
            self._tell_root(attempt, {traces.RESULT.key: DELETED}, now)

    def _of(self, job: GRPOJobRecord) -> _Attempt:
        """The job's attempt; as its status has it, if this process doesn't know it."""
        known = self._attempts.get(job.key)
        if known and (known.trace.job_uid, known.trace.attempt) == (job.uid, job.status.attempt):
            return known
        found = self._attempts[job.key] = self._found(job)
        return found

    def _fresh(self, job: GRPOJobRecord, number: int, begin: float) -> _Attempt:
        trace = Trace.of_attempt(job, number, self._version)
        return _Attempt(
            trace, begin, Rank0Spans(self._every), job.spec.model.name if job.spec else ""
        )

    def _begun(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> _Attempt:
        """An attempt that this write begins."""
        begin = now
        if not job.is_active and not job.is_true(C.SUSPENDED):
            begin = min(now, _waiting_since(job.created, job.status))
        fresh = self._fresh(job, new.attempt, begin)
        fresh.waits_since = begin
        self._attempts[job.key] = fresh
        return fresh

    def _found(self, job: GRPOJobRecord) -> _Attempt:
        """An attempt that a former operator has begun."""
        status, admitted = job.status, job.condition(C.ADMITTED)
        started = seconds(status.attempt_start_time)
        since = seconds(admitted.last_transition_time) if admitted else None
        at = started or since or job.created
        begin = min(at, since or at, _waiting_since(job.created, status))
        found = self._fresh(job, status.attempt, begin)
        found.admitted, found.admission = at, int(since or 0.0)
        if job.is_true(C.SCHEDULED):
            found.bound = max(at, _since(job.condition(C.SCHEDULED)))
        if job.is_true(C.RUNNING):
            found.started = max(at, _since(job.condition(C.RUNNING)))
        if status.progress and status.progress.attempt == status.attempt:
            found.rank0.heard_of(status.progress.step)
        return found

    def _admit(self, attempt: _Attempt, moment: int, now: float) -> None:
        if attempt.waits_since is None:
            return
        attempt.admission = max(attempt.admission + 1, moment)
        attempt.admitted = max(attempt.waits_since, now)
        self._tell(
            attempt,
            attempt.trace.span(
                traces.QUEUED, attempt.waits_since, attempt.admitted, number=attempt.admission
            ),
        )
        attempt.waits_since = None

    def _end(self, attempt: _Attempt, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        plan, progress = job.status.plan, new.progress
        found: dict[str, Value] = {traces.MODEL.key: attempt.model}
        if plan:
            found |= {
                traces.STRATEGY.key: plan.strategy,
                traces.NODES.key: plan.nodes,
                traces.GPUS.key: plan.gpus,
            }
        if progress and progress.attempt == attempt.trace.attempt:
            found[traces.STEP_NUMBER.key] = progress.step
        result, failed, message = _how(job.status.attempt, new)
        found[traces.RESULT.key] = result
        if failed:
            found[traces.ERROR.key] = result
        self._tell_root(attempt, found, now, message if failed else None)

    def _tell_root(
        self,
        attempt: _Attempt,
        attributes: dict[str, Value],
        now: float,
        failure: str | None = None,
    ) -> None:
        end = max(now, attempt.latest)
        root = attempt.trace.span(traces.ATTEMPT, attempt.begin, end, parent="")
        why = truncate(failure or "", MAX_MESSAGE)
        self._put(replace(root, attributes=attributes, failed=failure is not None, message=why))

    def _tell(self, attempt: _Attempt, span: Span) -> None:
        attempt.latest = max(attempt.latest, span.end)
        self._put(span)


def _waiting_since(created: float, status: GRPOJobStatus) -> float:
    """When a job began to wait for its next attempt: its creation, its last end, or when it was
    resumed or retried."""
    begin = created
    if status.ends:
        begin = max(begin, seconds(status.ends[-1].end_time) or 0.0)
    for kind in (C.SUSPENDED, C.FAILED):
        rest = status.condition(kind)
        if rest and rest.status == "False" and _was_true(rest, status):
            begin = max(begin, _since(rest))
    return begin


def _was_true(rest: Condition, status: GRPOJobStatus) -> bool:
    """True if the condition was once true: the first attempt's commit says that it isn't, in the
    same second."""
    return status.attempt > 1 or rest.last_transition_time != status.start_time


def _how(attempt: int, new: GRPOJobStatus) -> tuple[str, bool, str]:
    """Return how an attempt ended that this status ends: the reason, whether it failed, and the
    message."""
    end = next((one for one in reversed(new.ends) if one.attempt == attempt), None)
    final = _final_condition(new)
    failed = final is not None and final.type == C.FAILED
    message = final.message if final else ""
    if end is None:
        return (final.reason if final else SUSPENDED), failed, message
    if new.outcome and new.outcome.attempt == attempt:
        message = new.outcome.message or message
    return end.reason, failed or end.reason in _FAILURES, message


def _final_condition(status: GRPOJobStatus) -> Condition | None:
    """Return the condition by which the job has succeeded or failed; None before that."""
    for condition in status.conditions:
        if condition.type in (C.SUCCEEDED, C.FAILED) and condition.status == "True":
            return condition
    return None


def _since(condition: Condition | None) -> float:
    """Return the unix time of a condition's last transition; 0 if it is not known."""
    if condition is None:
        return 0.0
    return seconds(condition.last_transition_time) or 0.0
