"""The time of a process belongs to one part at each moment, and what it says of it is what a
restart can count on."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from grpo_api.report.artifacts import Checkpoint
from grpo_api.report.report import Outcome, Progress, Result
from grpo_api.report.training_metrics import CHECKPOINTS
from grpo_api.text.timing import Account, Beginning, Clock
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.outcome import make_outcome
from grpo_trainer.process.recorder import Recorder
from tests.stepped_clock import SteppedClock
from tests.trainer.test_process import PLAN


@pytest.fixture
def clock() -> SteppedClock:
    """The run's clock, which a test moves."""
    return SteppedClock()


def test_each_moment_belongs_to_one_part(clock: SteppedClock) -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0, clock.now)
    story: tuple[tuple[float, Callable[[], None]], ...] = (
        (10, lambda: recorder.enter_stage("Loading")),
        (20, lambda: recorder.enter_stage("Proving")),
        (3, lambda: recorder.record_resume(8, 0.0, Beginning(attempt=2, clock=Clock(training=4)))),
        (2, lambda: recorder.begin_training(8, 20)),
        (1, lambda: recorder.enter_phase("generate")),
        (7, lambda: recorder.enter_phase("reward")),
        (4, lambda: recorder.enter_phase("forward")),
        (6, lambda: recorder.enter_phase(None)),
        (1, lambda: recorder.enter_stage("Saving")),
        (5, lambda: recorder.enter_phase("forward")),
        (
            2,
            lambda: recorder.record_checkpoint(
                Checkpoint(step=9, time=1.7e9, bytes=5, where="/checkpoints/run"), 7.0
            ),
        ),
        (1, lambda: recorder.enter_stage("Training")),
        (9, lambda: recorder.enter_stage("Exporting")),
        (8, recorder.record_event),
    )
    for seconds, then in story:
        clock.advance(seconds)
        then()
    told = recorder.progress.account
    spent = Clock(loading=30, proving=5, generating=7, scoring=4, training=17, saving=16)
    assert told == Account(
        clock=spent,
        sealed=spent.model_copy(update={"training": 8.0, "saving": 7.0}),
        began_at=Beginning(attempt=2, clock=Clock(training=4)),
    )
    assert told is not None
    assert told.clock.total == clock.now()
    assert make_outcome(0, Result.SUCCEEDED, "done", recorder.progress).account == told


def test_an_attempt_that_finds_the_work_done_counts_all_of_it(clock: SteppedClock) -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0, clock.now)
    clock.advance(3)
    done = Account(clock=Clock(loading=10, training=50))
    recorder.adopt_outcome(Outcome(result=Result.SUCCEEDED, attempt=4, account=done))
    assert recorder.progress.account == Account(
        clock=Clock(loading=3), began_at=Beginning(attempt=4, clock=done.clock)
    )


@pytest.mark.parametrize("first", ["event", "counted"])
def test_an_update_that_comes_during_another_is_kept(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0)
    other = threading.Thread(target=recorder.add_to_counter, args=(CHECKPOINTS.key,))
    copy, here = Progress.model_copy, threading.current_thread()

    def interrupted(progress: Progress, **options: Any) -> Progress:
        """Copy a state, and let the other thread run before the copy takes its place."""
        made = copy(progress, **options)
        # A thread of an earlier test's recorder may copy its own progress meanwhile.
        if other.ident is None and threading.current_thread() is here:
            other.start()
            other.join(0.2)  # it waits for the lock, unless there is none
        return made

    monkeypatch.setattr(Progress, "model_copy", interrupted)
    if first == "event":
        recorder.record_event()
    else:
        recorder.add_to_counter(CHECKPOINTS.key)
    other.join()
    assert recorder.progress.metrics[CHECKPOINTS.key] == (1.0 if first == "event" else 2.0)
    assert recorder.own_events == recorder.progress.events == 2
