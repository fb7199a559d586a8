"""The spans of attempts: of a story told by heart, of worlds with the truth beside them, and of
anything at all."""

import random
from typing import Any

import pytest

from grpo_api.report import traces
from grpo_api.report.report import Progress, StepTime
from grpo_api.text.timing import Account, Clock
from grpo_kube.objects.times import Observed
from grpo_operator.decide.observation import Pull
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.tracing.attempt_trace import AttemptTraces, Rank0Spans
from grpo_operator.tracing.spans import Span, Trace
from tests.unit.operator_world import (
    KEY,
    NOW,
    UID,
    active_status,
    at,
    condition,
    make_child,
    make_job,
    make_pod,
    make_seen,
)
from tests.unit.trace_world import EVERY, by_attempt, lived, steps_of

PODS = (make_child(), make_pod(0), make_pod(1))
FAILURES = {
    "killed": True,
    "failed": True,
    "succeeded": False,
    "preempted": False,
    "suspended": False,
}
FAILURES |= {"unbound": False, "deleted": False, "node lost": False}
AGAIN = 2 + 5
"""Spans that a new process may tell again: the start, before a first step is heard of, or the last
step with parts."""


class Story:
    """One job's traces, with the seconds since NOW of what is told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another process of the operator."""
        self.traces = AttemptTraces(self.spans.append, every=10, version="1")

    def wrote(self, before: GRPOJobRecord, after: GRPOJobRecord, now: float) -> None:
        self.traces.record_status(before, after.status, NOW + now)

    def looked(
        self, job: GRPOJobRecord, *things: Any, now: float, pull: Progress | None = None
    ) -> None:
        heard = Pull(pull, Observed(NOW), Observed(NOW)) if pull else None  # just now
        self.traces.record_observation(make_seen(job, *things, pull=heard, now=NOW + now))

    def take(self) -> list[tuple[str, float, float]]:
        """What was told since: name, begin, end."""
        told, self.spans[:] = (
            [(one.name, round(one.begin - NOW, 3), round(one.end - NOW, 3)) for one in self.spans],
            [],
        )
        return told


def job(attempt: int = 1, **more: Any) -> GRPOJobRecord:
    fields: dict[str, Any] = {"startTime": at(-60), "attemptStartTime": at(-60)}
    fields["conditions"] = [
        condition("Admitted"),
        condition("Scheduled", "False"),
        condition("Running", "False"),
    ]
    return make_job(status=active_status(attempt, **fields | more), creationTimestamp=at(-100))


def clock(loading: float = 5, proving: float = 2, **more: float) -> Clock:
    return Clock(loading=loading, proving=proving, **more)


def told(step: int, spent: Clock, *steps: StepTime, **more: Any) -> Progress:
    return Progress(attempt=1, step=step, account=Account(clock=spent), steps=list(steps), **more)


FIRST = StepTime(step=1, began=clock(), ended=clock(generating=3, scoring=1, training=2))
TENTH = StepTime(
    step=10,
    began=clock(generating=30, training=20),
    ended=clock(generating=33, training=22, saving=4),
)


def test_an_attempt_s_spans_follow_each_other_and_lie_in_it() -> None:
    story, waiting = Story(), make_job(status={}, creationTimestamp=at(-100))
    story.wrote(waiting, job(), -59.5)
    assert story.take() == [("queued", -100.0, -59.5)]
    story.looked(job(), make_child(), make_pod(0), make_pod(1, node="", phase="Pending"), now=-59)
    assert story.take() == []
    story.looked(job(), make_child(), make_pod(0), make_pod(1, phase="Pending", state={}), now=-58)
    story.looked(job(), *PODS, now=-55)
    story.looked(job(), *PODS, now=-54)
    assert story.take() == [("bound", -59.5, -58.0), ("started", -58.0, -55.0)]
    story.looked(job(), *PODS, now=-50, pull=told(0, clock(4, 0)))
    assert story.take() == []
    story.looked(
        job(),
        *PODS,
        now=-45,
        pull=told(0, clock(), startup_seconds={"load": 3, "proof": 1, "total": 9}),
    )
    assert [one.attributes for one in story.spans] == [{"grpo.startup.load": 3.0}]
    assert story.take() == [("loaded", -54.0, -49.0)], "rank 0 had begun 4 s before its first word"
    story.looked(
        job(), *PODS, now=-40, pull=told(1, clock(generating=3, scoring=1, training=4), FIRST)
    )
    assert story.take() == [
        ("proven", -55.0 + 5.0, -55.0 + 7.0), ("first step", -48.0, -42.0), ("generating", -48.0,
        -45.0),
        ("scoring", -45.0, -44.0), ("training", -44.0, -42.0),
    ]  # fmt: skip
    story.looked(
        job(),
        *PODS,
        now=20,
        pull=told(10, clock(generating=40, training=22, saving=4), FIRST, TENTH),
    )
    root = Trace.of_attempt(job(), 1, "1").span_id(traces.ATTEMPT)
    assert [one.parent == root for one in story.spans] == [True, False, False, False]
    assert [name for name, *_ in story.take()] == ["step", "generating", "training", "saving"]


@pytest.mark.parametrize(
    ("status", "result", "failed"),
    [
        (
            {"ends": [{"attempt": 1, "reason": "Hang", "endTime": at(50)}], "attempt": 2},
            "Hang",
            True,
        ),
        (
            {"ends": [{"attempt": 1, "reason": "Preempted", "endTime": at(50)}], "attempt": 2},
            "Preempted",
            False,
        ),
        (
            {
                "ends": [{"attempt": 1, "reason": "SchedulingTimeout", "endTime": at(50)}],
                "conditions": [condition("Admitted", "False", "SchedulingTimeout")],
            },
            "SchedulingTimeout",
            False,
        ),
        (
            {"conditions": [condition("Admitted", "False"), condition("Suspended")]},
            "Suspended",
            False,
        ),
        (
            {"conditions": [condition("Admitted"), condition("Failed", reason="TooLong")]},
            "TooLong",
            True,
        ),
        (
            {
                "ends": [{"attempt": 1, "reason": "Succeeded", "endTime": at(50)}],
                "conditions": [condition("Admitted"), condition("Succeeded")],
            },
            "Succeeded",
            False,
        ),
    ],
)
def test_the_root_says_how_the_attempt_ended(
    status: dict[str, Any], result: str, failed: bool
) -> None:
    story, outcome = Story(), {"result": "Hang", "attempt": 1, "message": "stood still"}
    more: dict[str, Any] = {"progress": {"step": 7, "attempt": 1}, "outcome": outcome} | status
    story.wrote(make_job(creationTimestamp=at(-100)), job(), -60)
    story.wrote(job(), job(**more), 50.5)
    roots = [one for one in story.spans if one.name == "attempt"]
    assert [(one.begin, one.end, one.parent, one.failed) for one in roots] == [
        (NOW - 100, NOW + 50.5, "", failed)
    ]
    assert roots[0].attributes == {
        "grpo.model": "/models/tiny", "grpo.strategy": "Clone", "grpo.nodes": 2, "grpo.gpus": 0,
        "grpo.step": 7,
        "grpo.result": result, **({"error.type": result} if failed else {}),
    }  # fmt: skip
    assert ("stood still" in roots[0].message) == (result == "Hang")


def test_an_attempt_begins_to_be_waited_for_when_the_one_before_ends_or_the_job_is_resumed_or_retried() -> (  # noqa: E501
    None
):
    def queued(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, float, float]]:
        story = Story()
        story.wrote(make_job(status=before, creationTimestamp=at(-100)), job(**after), -10)
        return [one for one in story.take() if one[0] == "queued"]

    ended = {"ends": [{"attempt": 1, "reason": "Hang", "endTime": at(-30)}], "attempt": 1}
    rests = [condition("Admitted", "False"), condition("Suspended", "False", since=-20)]
    assert queued({"conditions": [condition("Admitted", "False")]} | ended, {"attempt": 2}) == [
        ("queued", -30, -10)
    ]
    assert queued({"conditions": rests} | ended, {"attempt": 2}) == [("queued", -20, -10)]
    retried = [condition("Admitted", "False"), condition("Failed", "False", since=-15)]
    assert queued({"conditions": retried, "attempt": 3}, {"attempt": 4}) == [("queued", -15, -10)]
    suspended = [condition("Admitted", "False"), condition("Suspended")]
    assert queued({"conditions": suspended, "attempt": 3}, {"attempt": 4}) == [("queued", -10, -10)]
    assert queued(active_status(), {**ended, "attempt": 2}) == [("queued", -10, -10)]


def test_a_new_operator_goes_on_where_the_status_says_that_the_old_one_was() -> None:
    story, conditions = Story(), [condition(kind) for kind in ("Admitted", "Scheduled", "Running")]
    known = job(conditions=conditions, progress={"attempt": 1, "step": 10})
    story.looked(known, *PODS, now=0, pull=told(10, clock(generating=40), FIRST, TENTH))
    assert [name for name, *_ in story.take()][:1] == ["step"], (
        "the tenth may not have been over then"
    )
    later = job(conditions=conditions, progress={"attempt": 1, "step": 11})
    story.begin_anew()
    story.looked(later, *PODS, now=0, pull=told(11, clock(generating=40), FIRST, TENTH))
    assert story.take() == []
    of_attempt_2 = job(2, conditions=conditions, progress={"attempt": 1, "step": 11})
    story.begin_anew()
    pull = Progress(
        attempt=2, step=11, resumed_from_step=10, account=Account(clock=clock(generating=1))
    )
    story.looked(of_attempt_2, make_child(2), make_pod(0, 2), make_pod(1, 2), now=0, pull=pull)
    assert [name for name, *_ in story.take()] == ["loaded", "proven"], (
        "those numbers were the first attempt's"
    )
    story.traces.end_job(KEY, NOW + 1)
    assert [(one.name, one.attributes) for one in story.spans] == [
        ("attempt", {"grpo.result": "Deleted"})
    ]


@pytest.mark.seeded
def test_traces_tell_the_truth_over_losses_and_restarts_of_the_operator(
    chance: random.Random,
) -> None:
    world = lived(chance, 12)
    assert world.restarts > 3
    everything = list(world.spans())
    for process in world.spans_by_process:
        assert len({one.id for one in process}) == len(process), "no process tells anything twice"
    same = {(one.id, one.name, one.parent, one.trace.id) for one in everything}
    once = {one.id: one for one in everything}
    assert len(same) == len(once)
    assert len(everything) - len(once) <= world.restarts * AGAIN
    attempts = by_attempt(list(once.values()))
    assert attempts.keys() == {gang.attempt for gang in world.gangs} | world.unstarted
    for gang in world.gangs:
        spans = attempts[gang.attempt]
        (root,) = [one for one in spans if not one.parent]
        assert root.failed == FAILURES[gang.loss], gang.loss
        assert all(root.begin <= one.begin <= one.end <= root.end for one in spans)
        names = {one.name for one in spans}
        if gang.attempt not in world.attempts_over_restarts:
            assert {"queued"} <= names
            assert gang.loss == "unbound" or {"bound", "started"} <= names
        if gang.run is None:
            continue
        truth = {one.step: one for one in steps_of(gang.run, gang.attempt)}
        start = NOW + gang.run.begin
        for one in spans:
            if one.name == "loaded":
                spent = gang.run.clock(gang.until).loading
                assert (one.begin, one.end) == pytest.approx((start, start + spent), abs=0.1)
            if one.name in ("step", "first step"):
                real = truth[int(one.attributes["grpo.step"])]
                assert one.name == "first step" or real.step % EVERY == 0
                times = (start + real.began.total, start + real.ended.total)
                assert (one.begin, one.end) == pytest.approx(times, abs=0.1)
                parts = [child for child in spans if child.parent == one.id]
                assert sum(child.end - child.begin for child in parts) == pytest.approx(
                    one.end - one.begin, abs=0.1
                )


def test_ids_follow_from_job_attempt_name_and_number_alone() -> None:
    def ids(
        uid: str = UID, attempt: int = 1, name: traces.SpanName = traces.STEP, number: int = 0
    ) -> tuple[str, str]:
        trace = Trace.of_attempt(make_job(uid=uid), attempt, "1")
        return trace.id, trace.span_id(name, number)

    other = [ids("other"), ids(attempt=2), ids(name=traces.QUEUED), ids(number=1)]
    assert len({ids(), *other}) == 5
    assert [one[0] == ids()[0] for one in other] == [False, False, True, True]
    assert (len(ids()[0]), len(ids()[1])) == (32, 16)
    assert ids() == ("2be0ce36654b2c4c78a0343f7dd3eec3", "ca10fc5c94b9d0f0"), (
        "they stay the same over versions"
    )


@pytest.mark.parametrize(
    ("every", "total"), [(1, 10**6), (10, 10**7), (7, 6999), (10, 0), (1, 2**53 - 1)]
)
def test_a_trace_has_so_many_steps_and_no_more(every: int, total: int) -> None:
    stride = traces.stride(every, total)
    assert stride % every == 0
    assert total // stride <= traces.MAX_STEPS
    assert stride == every or total // (stride - every) > traces.MAX_STEPS / 2
    liar, spans = Rank0Spans(every), 0
    for number in range(1, 2 * traces.MAX_STEPS):
        told_ = replace_step(TENTH, number * stride)
        spans += len(
            list(
                liar.report_spans(
                    Trace.of_attempt(make_job(), 1, "1"),
                    told(1, clock(generating=1), told_),
                    NOW,
                    NOW,
                )
            )
        )
    assert spans <= 2 + traces.MAX_STEPS * 5


def replace_step(one: StepTime, step: int) -> StepTime:
    return one.model_copy(update={"step": step})
