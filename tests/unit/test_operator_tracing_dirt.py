"""Spans of whatever statuses, progress and clocks there are: each once, in order, in its
attempt."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import MAX_STEPS, Progress, StepTime
from grpo_api.status.status import GRPOJobStatus
from grpo_api.text.timing import LAST_TIME, Account, Clock
from grpo_kube.objects.times import Observed
from grpo_operator.decide.observation import Pull
from grpo_operator.records.records import JobRecord, PodRecord
from grpo_operator.tracing.attempt_trace import AttemptTraces
from grpo_operator.tracing.spans import Span
from tests.generated import cases
from tests.unit.operator_world import KEY, NOW, PLAN, at, make_child, make_job, make_pod, make_seen

SECONDS = st.floats(0.0, LAST_TIME) | st.floats(0.0, 100.0)
CLOCKS = st.builds(Clock, **dict.fromkeys(Clock.model_fields, SECONDS))
STEPS = st.lists(
    st.builds(StepTime, step=st.integers(0, 40), began=CLOCKS, ended=CLOCKS), max_size=MAX_STEPS + 1
)
PROGRESS = st.builds(
    Progress,
    attempt=st.integers(1, 3),
    step=st.integers(0, 40),
    total_steps=st.integers(0, 2**53 - 1),
    resumed_from_step=st.integers(0, 40),
    account=st.none() | st.builds(Account, clock=CLOCKS),
    steps=STEPS,
    startup_seconds=st.dictionaries(st.sampled_from(["load", "proof", "x"]), SECONDS),
)
MOMENT = (
    st.integers(-10_000, 10_000).map(at)
    | st.just("9999-12-31T23:59:59Z")
    | st.just("1970-01-01T00:00:00Z")
)
CONDITION = st.builds(
    lambda kind, status, reason, when: {
        "type": kind,
        "status": status,
        "reason": reason,
        "lastTransitionTime": when,
    },
    st.sampled_from(["Scheduled", "Running", "Suspended", "Failed", "Succeeded"]),
    st.sampled_from(["True", "False", "Unknown"]),
    st.sampled_from(["WaitingForKueue", "Because"]),
    MOMENT,
)
ADMITTED = CONDITION.map(lambda one: one | {"type": "Admitted"})
STATUS = st.builds(
    lambda attempt, admitted, conditions, ends, begun, step: {
        **{
            "attempt": attempt,
            "conditions": [admitted, *{one["type"]: one for one in conditions}.values()],
        },
        **{"ends": ends, "plan": PLAN.model_dump(mode="json", by_alias=True, exclude_none=True)},
        **{
            "attemptStartTime": begun,
            "startTime": begun,
            "progress": {"attempt": attempt, "step": step},
        },
    },
    st.integers(1, 3),
    ADMITTED,
    st.lists(CONDITION, max_size=4),
    st.lists(
        st.builds(
            lambda n, when: {"attempt": n, "reason": "Hang", "endTime": when},
            st.integers(1, 3),
            MOMENT,
        ),
        max_size=2,
    ),
    MOMENT,
    st.integers(0, 40),
)
NEWS = st.tuples(
    st.floats(-3600, 3600),
    STATUS,
    PROGRESS,
    st.integers(0, 2),
    st.sampled_from(["look", "look", "write", "gone"]),
)


@settings(max_examples=cases(40))
@given(st.lists(NEWS, max_size=12))
def test_whatever_comes_spans_are_once_in_order_and_in_their_attempt(news: list[Any]) -> None:
    spans: list[Span] = []
    known, now, uid = make_job(), NOW, "uid-0"
    following = AttemptTraces(spans.append, every=10, version="1")
    for number, (passed, status, progress, pods, what) in enumerate(news):
        now += passed
        if what == "gone":
            following.end_job(KEY, now)
            uid = f"uid-{number}"
            known = make_job(uid=uid)
        elif what == "write":
            following.record_status(known, GRPOJobStatus.model_validate(status), now)
            known = make_job(status=status, uid=uid)
        else:
            n = known.status.attempt
            things: list[JobRecord | PodRecord] = [make_child(n, uid)] if n else []
            things += [make_pod(index, n, owner=uid) for index in range(pods)] if n else []
            pull = Pull(progress, Observed(NOW - 1), Observed(NOW - 1))
            following.record_observation(make_seen(known, *things, pull=pull, now=now))
    assert all(one.begin <= one.end for one in spans)
    told: dict[str, dict[str, Span]] = {}
    for one in spans:
        life = told.setdefault(one.trace.id, {})
        assert one.id not in life
        life[one.id] = one
        if not one.parent:  # only a status that nobody writes lets an attempt that has ended go on
            assert all(
                one.begin <= child.begin and child.end <= one.end
                for child in told.pop(one.trace.id).values()
            )
