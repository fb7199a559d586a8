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
    _last_step: int = 0
    """Steps up to this one have theirs, or none."""
    _known_step: int = 0
    """The last step in a former operator process's status; 0 for none."""
    _origin: float = float("inf")
    """When rank 0's clock began, by the operator's."""
    _has_loading_span: bool = False
    _has_proof_span: bool = False
    _step_count: int = 0

    def heard_of(self, step: int) -> None:
        """Record a former operator's step. Its span may be missing, so it is made again."""
        self._known_step = step
        self._last_step = max(0, step - 1)

    def report_spans(
        self, trace: Trace, progress: Progress, at: float, earliest: float
    ) -> Iterator[Span]:
        """Yield the spans that this report of `at` adds, from `earliest` on (unix seconds)."""
        if progress.account is None:
            return
        clock = progress.account.clock
        self._origin = min(self._origin, at - clock.total)
        timeline = _Timeline(trace, self._origin, earliest, at)
        if self._known_step <= progress.resumed_from_step:
            yield from self._start(timeline, clock, progress)
        first_step = progress.resumed_from_step + 1
        every = traces.stride(self.every, progress.total_steps)
        for step_time in progress.steps:
            step = step_time.step
            is_first = step == first_step
            has_span = is_first or step % every == 0
            if step > self._last_step and has_span and self._step_count < traces.MAX_STEPS:
                self._last_step = step
                self._step_count += 1
                name = traces.FIRST_STEP if is_first else traces.STEP
                yield from timeline.step(step_time, name)

    def _start(self, timeline: "_Timeline", clock: Clock, progress: Progress) -> Iterator[Span]:
        loading_end = clock.loading
        proving_end = clock.loading + clock.proving
        step_seconds = clock.generating + clock.scoring + clock.training + clock.saving
        if not self._has_loading_span and (clock.proving or step_seconds):
            self._has_loading_span = True
            yield timeline.startup(traces.LOADED, 0.0, loading_end, progress)
        if not self._has_proof_span and step_seconds:
            self._has_proof_span = True
            yield timeline.startup(traces.PROVEN, loading_end, proving_end, progress)


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Rank 0's clock on the operator's."""

    trace: Trace
    origin: float
    earliest: float
    latest: float

    def _unix_time(self, spent: float) -> float:
        unix = self.origin + spent
        return max(self.earliest, min(unix, self.latest))

    def startup(self, name: traces.SpanName, begin: float, end: float, progress: Progress) -> Span:
        """A part of the start between two readings of rank 0's clock."""
        attributes: dict[str, Value] = {}
        for attribute in traces.STARTUP[name.name]:
            part = attribute.key.rpartition(".")[2]
            spent = progress.startup_seconds.get(part)
            if spent is not None:
                attributes[attribute.key] = spent
        begin = self._unix_time(begin)
        end = self._unix_time(end)
        return self.trace.span(name, begin, end, attributes=attributes)

    def step(self, step_time: StepTime, name: traces.SpanName) -> Iterator[Span]:
        """Yield the spans of a step and its parts in a row: their real order is not reported."""
        step = step_time.step
        begin = self._unix_time(step_time.began.total)
        end = self._unix_time(step_time.ended.total)
        attributes: dict[str, Value] = {traces.STEP_NUMBER.key: step}
        span = self.trace.span(name, begin, end, number=step, attributes=attributes)
        yield span
        for part in traces.PARTS:
            clock_before = getattr(step_time.began, part.name)
            clock_after = getattr(step_time.ended, part.name)
            spent = clock_after - clock_before
            if spent > 0.0:
                end = min(begin + spent, span.end)
                yield self.trace.span(part, begin, end, number=step, parent=span.id)
                begin = end


C = ConditionType
MAX_MESSAGE = 1024
DELETED, SUSPENDED = "Deleted", "Suspended"
_FAILURES = frozenset(Result) - {Result.SUCCEEDED, Result.PREEMPTED}


@dataclass(slots=True)
class _Attempt:
    """One attempt in progress, and which of its spans have been sent."""

    trace: Trace
    begin: float
    """When the job began to wait for it."""
    rank0: Rank0Spans
    model: str
    waits_since: float | None = None
    """Since when it waits to be admitted; None once it is."""
    admitted_at: float = 0.0
    admission: int = -1
    """Distinguishes the admissions of one attempt."""
    bound_at: float | None = None
    started_at: float | None = None
    latest: float = 0.0
    """Latest end of its spans."""


class AttemptTraces:
    """The traces of all attempts in progress."""

    def __init__(self, put: Callable[[Span], None], *, every: int, version: str) -> None:
        """`put` gets each ended span; every `every`th step has one; `version`: the operator's."""
        self._put = put
        self._every = every
        self._version = version
        self._attempts: dict[ObjectKey, _Attempt] = {}

    def record_observation(self, observation: Observation) -> None:
        """What a look shows of an attempt."""
        job = observation.job
        if not job.is_active:
            return
        attempt = self._attempt_of_job(job)
        trace = attempt.trace
        number = attempt.admission
        if attempt.bound_at is None and observation.is_gang_bound:
            attempt.bound_at = max(attempt.admitted_at, observation.now)
            span = trace.span(traces.BOUND, attempt.admitted_at, attempt.bound_at, number=number)
            self._send_span(attempt, span)
        if (
            attempt.started_at is None
            and attempt.bound_at is not None
            and observation.has_gang_started
        ):
            attempt.started_at = max(attempt.bound_at, observation.now)
            span = trace.span(traces.STARTED, attempt.bound_at, attempt.started_at, number=number)
            self._send_span(attempt, span)
        pulled_at = pull_time(observation)
        if observation.pull and pulled_at is not None:
            progress = observation.pull.progress
            spans = attempt.rank0.report_spans(trace, progress, pulled_at, attempt.admitted_at)
            for span in spans:
                self._send_span(attempt, span)

    def record_status(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        """The API server has taken this status of the job."""
        is_under_way_now = is_under_way(new)
        same_attempt = new.attempt == job.status.attempt
        goes_on = job.is_active and is_under_way_now and same_attempt
        if job.is_active and not goes_on:
            self._end(self._attempt_of_job(job), job, new, now)
        if not is_under_way_now:
            self._attempts.pop(job.key, None)
            return
        attempt = self._attempt_of_job(job) if goes_on else self._begin(job, new, now)
        admitted_at = _transition_time(new.condition(C.ADMITTED))
        self._admit(attempt, int(admitted_at), now)

    def end_job(self, key: ObjectKey, now: float) -> None:
        """The job was deleted, or is another controller's."""
        attempt = self._attempts.pop(key, None)
        if attempt:
            self._tell_root(attempt, {traces.RESULT.key: DELETED}, now)

    def _attempt_of_job(self, job: GRPOJobRecord) -> _Attempt:
        """The job's attempt; as its status has it, if this process doesn't know it."""
        attempt = self._attempts.get(job.key)
        is_current = (
            attempt is not None
            and attempt.trace.job_uid == job.uid
            and attempt.trace.attempt == job.status.attempt
        )
        if attempt is None or not is_current:
            attempt = self._attempt_of_status(job)
            self._attempts[job.key] = attempt
        return attempt

    def _new_attempt(self, job: GRPOJobRecord, number: int, begin: float) -> _Attempt:
        trace = Trace.of_attempt(job, number, self._version)
        model = job.spec.model.name if job.spec else ""
        return _Attempt(trace, begin, Rank0Spans(self._every), model)

    def _begin(self, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> _Attempt:
        """An attempt that this write begins."""
        begin = now
        if not job.is_active and not job.is_true(C.SUSPENDED):
            waiting_since = _waiting_since(job.created, job.status)
            begin = min(now, waiting_since)
        attempt = self._new_attempt(job, new.attempt, begin)
        attempt.waits_since = begin
        self._attempts[job.key] = attempt
        return attempt

    def _attempt_of_status(self, job: GRPOJobRecord) -> _Attempt:
        """An attempt that a former operator has begun."""
        status = job.status
        admitted_since = _transition_time(job.condition(C.ADMITTED))
        admitted_at = seconds(status.attempt_start_time) or admitted_since or job.created
        waiting_since = _waiting_since(job.created, status)
        begin = min(admitted_at, admitted_since or admitted_at, waiting_since)
        attempt = self._new_attempt(job, status.attempt, begin)
        attempt.admitted_at = admitted_at
        attempt.admission = int(admitted_since)
        if job.is_true(C.SCHEDULED):
            scheduled_since = _transition_time(job.condition(C.SCHEDULED))
            attempt.bound_at = max(admitted_at, scheduled_since)
        if job.is_true(C.RUNNING):
            running_since = _transition_time(job.condition(C.RUNNING))
            attempt.started_at = max(admitted_at, running_since)
        if status.progress and status.progress.attempt == status.attempt:
            attempt.rank0.heard_of(status.progress.step)
        return attempt

    def _admit(self, attempt: _Attempt, moment: int, now: float) -> None:
        begin = attempt.waits_since
        if begin is None:
            return
        attempt.admission = max(attempt.admission + 1, moment)
        attempt.admitted_at = max(begin, now)
        attempt.waits_since = None
        span = attempt.trace.span(
            traces.QUEUED, begin, attempt.admitted_at, number=attempt.admission
        )
        self._send_span(attempt, span)

    def _end(self, attempt: _Attempt, job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> None:
        plan = job.status.plan
        progress = new.progress
        attributes: dict[str, Value] = {traces.MODEL.key: attempt.model}
        if plan:
            attributes[traces.STRATEGY.key] = plan.strategy
            attributes[traces.NODES.key] = plan.nodes
            attributes[traces.GPUS.key] = plan.gpus
        if progress and progress.attempt == attempt.trace.attempt:
            attributes[traces.STEP_NUMBER.key] = progress.step
        result, has_failed, message = _attempt_end(job.status.attempt, new)
        attributes[traces.RESULT.key] = result
        if has_failed:
            attributes[traces.ERROR.key] = result
        self._tell_root(attempt, attributes, now, message if has_failed else None)

    def _tell_root(
        self,
        attempt: _Attempt,
        attributes: dict[str, Value],
        now: float,
        failure: str | None = None,
    ) -> None:
        end = max(now, attempt.latest)
        root = attempt.trace.span(
            traces.ATTEMPT, attempt.begin, end, parent="", attributes=attributes
        )
        if failure is not None:
            root = replace(root, failed=True, message=truncate(failure, MAX_MESSAGE))
        self._put(root)

    def _send_span(self, attempt: _Attempt, span: Span) -> None:
        attempt.latest = max(attempt.latest, span.end)
        self._put(span)


def _waiting_since(created: float, status: GRPOJobStatus) -> float:
    """When a job began to wait for its next attempt: created, ended, resumed or retried."""
    begin = created
    if status.ends:
        last_end = seconds(status.ends[-1].end_time) or 0.0
        begin = max(begin, last_end)
    for kind in (C.SUSPENDED, C.FAILED):
        rest = status.condition(kind)
        if rest and rest.status == "False" and _was_true(rest, status):
            begin = max(begin, _transition_time(rest))
    return begin


def _was_true(rest: Condition, status: GRPOJobStatus) -> bool:
    """True if the condition was ever true: the first attempt's commit sets it False, too."""
    return status.attempt > 1 or rest.last_transition_time != status.start_time


def _attempt_end(attempt: int, new: GRPOJobStatus) -> tuple[str, bool, str]:
    """How an attempt ended that this status ends: reason, whether it failed, message."""
    end = next((end for end in reversed(new.ends) if end.attempt == attempt), None)
    ends = (new.condition(kind) for kind in (C.SUCCEEDED, C.FAILED))
    final = next(
        (condition for condition in ends if condition and condition.status == "True"), None
    )
    job_failed = final is not None and final.type == C.FAILED
    message = final.message if final else ""
    if end is None:
        reason = final.reason if final else SUSPENDED
        return reason, job_failed, message
    if new.outcome and new.outcome.attempt == attempt:
        message = new.outcome.message or message
    has_failed = job_failed or end.reason in _FAILURES
    return end.reason, has_failed, message


def _transition_time(condition: Condition | None) -> float:
    """Return the unix time of a condition's last transition; 0 if it is not known."""
    if condition is None:
        return 0.0
    return seconds(condition.last_transition_time) or 0.0
