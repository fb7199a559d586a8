"""When steps were, as rank 0 tells it to who asks: from the end of the one before, checkpoint
included."""

import urllib.request
from collections.abc import Sequence

import pytest

from grpo_api.report.report import MAX_STEPS, Progress, StepTime
from grpo_api.text.contract import PROGRESS_BIND_ENV, TRACE_QUERY
from grpo_api.text.timing import Clock
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import KEPT_STEP_TIMES, Recorder
from grpo_trainer.telemetry.progress_server import limits_of, serve
from harness.controlplane import free_port
from tests.stepped_clock import SteppedClock
from tests.trainer.test_process import PLAN

pytestmark = pytest.mark.realtime


@pytest.fixture
def clock() -> SteppedClock:
    """The run's clock, which a test moves."""
    return SteppedClock()


def trained(clock: SteppedClock, first: int, steps: int, save: Sequence[int] = ()) -> Recorder:
    """A recorder after so many steps of 3 s of generating, 1 s of scoring and 2 s of training, then
    one has begun."""
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0, clock.now)
    clock.advance(10)
    recorder.begin_training(first - 1, 10_000)
    for step in range(first, first + steps):
        for phase, lasts in (("generate", 3), ("reward", 1), (None, 0), ("forward", 2), (None, 0)):
            recorder.enter_phase(phase)
            clock.advance(lasts)
        recorder.record_step(step, None, 6.0)
        if step in save:
            recorder.enter_stage("Saving")
            clock.advance(4)
            recorder.enter_stage("Training")
        recorder.enter_phase(None)
    return recorder


def test_a_step_is_over_when_the_next_works_or_the_run_exports(clock: SteppedClock) -> None:
    recorder = trained(clock, first=1, steps=2, save=(2,))
    assert [one.step for one in recorder.step_times(1)] == [1]
    recorder.enter_phase("generate")
    ready, after = Clock(loading=10), Clock(loading=10, generating=3, scoring=1, training=2)
    saved = Clock(loading=10, generating=6, scoring=2, training=4, saving=4)
    assert recorder.step_times(1) == [
        StepTime(step=1, began=ready, ended=after),
        StepTime(step=2, began=after, ended=saved),
    ]
    clock.advance(5)
    recorder.record_step(3, None, 5.0)
    recorder.enter_stage("Exporting")
    assert [one.step for one in recorder.step_times(1)] == [1, 2, 3]


def test_steps_touch_each_other_and_add_up_to_the_run(clock: SteppedClock) -> None:
    recorder = trained(clock, first=41, steps=1 + MAX_STEPS, save=(42, 44))
    recorder.enter_phase("generate")
    steps = recorder.step_times(1)
    assert [one.step for one in steps] == list(range(41, 42 + MAX_STEPS))
    assert [one.began for one in steps[1:]] == [one.ended for one in steps[:-1]]
    assert steps[-1].ended == recorder.clock()


def test_the_first_and_the_newest_of_every_nth_are_told(clock: SteppedClock) -> None:
    recorder = trained(clock, first=5, steps=KEPT_STEP_TIMES + 100)
    assert [one.step for one in recorder.step_times(1)][:2] == [
        5,
        KEPT_STEP_TIMES + 103 - MAX_STEPS + 1,
    ]
    assert len(recorder.step_times(1)) == MAX_STEPS + 1
    assert [one.step for one in recorder.step_times(100)] == [5, 300, 400, 500, 600]
    assert [one.step for one in recorder.step_times(200)] == [5, 200, 400, 600]
    assert [one.step for one in recorder.step_times(10_000)] == [5]
    assert Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0).step_times(1) == []


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("", []),
        (f"?{TRACE_QUERY}=3", [1, 3, 6]),
        *(
            (f"?{TRACE_QUERY}={text}", [])
            for text in ("", "0", "-1", "x", "1.5", "9" * 5000, "%D9%A3")
        ),
        (f"?other=1&{TRACE_QUERY}=1&{TRACE_QUERY}=4", [1, 4]),
    ],
)
def test_steps_are_told_to_who_asks_for_so_many(
    query: str, told: list[int], clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(PROGRESS_BIND_ENV, f"127.0.0.1:{port}")
    serve(limits_of(PLAN), trained(clock, first=1, steps=7))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress{query}", timeout=60) as answer:
        progress = Progress.model_validate_json(answer.read())
    assert [one.step for one in progress.steps] == told
