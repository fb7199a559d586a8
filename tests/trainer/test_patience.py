"""What counts as a hang in which stage: long work that gets on is none, on this rank or another,
and silence is one."""

import signal
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stubs

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.plan.plan import STEP_ESTIMATES, TrainingPlan
from grpo_api.report.report import Result, Stage
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process import heartbeat
from grpo_trainer.process.heartbeat import LEAST_BYTES, Heartbeat
from grpo_trainer.process.preemption import GRACE_MARGIN_SECONDS
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.training.build_run import require_patience
from harness.programs.patience import wait_for_event
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.support.ranks import runs

PLAN = runs.plan(Path("/models/demo"))
LIMIT = PLAN.guard.hang_timeout_seconds
STAGES: list[Stage] = [
    "Importing", "Connecting", "Loading", "Proving", "Compiling", "Training", "Saving", "Exporting",
]  # fmt: skip


@pytest.fixture
def clock() -> SteppedClock:
    """A clock that stands still until the test moves it."""
    return SteppedClock()


def estimated(seconds: float | None) -> TrainingPlan:
    """The plan with another estimate of a step."""
    return PLAN.model_copy(
        update={"execution": PLAN.execution.model_copy(update={"estimated_step_seconds": seconds})}
    )


def watched(
    clock: SteppedClock, plan: TrainingPlan = PLAN, rank: int = 0
) -> tuple[Recorder, Watchdog]:
    """A recorder and the watchdog on it."""
    known = Recorder(plan.job.attempt, Placement(rank, 0, 1, 2), 0.0, clock.now)
    return known, Watchdog(
        plan.guard, plan.execution, plan.grace_period_seconds, known, lambda *_: None, now=clock.now
    )


def test_hours_of_fetching_are_no_hang(clock: SteppedClock) -> None:
    known, watchdog = watched(clock)
    known.enter_stage("Loading")
    for arrived in range(20):
        clock.advance(LIMIT - 1)
        assert watchdog.verdict() is None
        known.record_fetched_bytes(arrived)
    assert known.progress.fetched_bytes == 19


@pytest.mark.parametrize("stage", ["Loading", "Proving", "Compiling", "Exporting"])
def test_hours_of_loading_that_gets_on_are_no_hang(clock: SteppedClock, stage: Stage) -> None:
    known, watchdog = watched(clock)
    known.enter_stage(stage)
    for _ in range(20):
        clock.advance(LIMIT - 1)
        assert watchdog.verdict() is None
        known.record_event()
    clock.advance(LIMIT + 1)
    outcome = watchdog.verdict()
    assert outcome is not None
    assert outcome.result is Result.HANG
    assert f"no progress for {LIMIT + 1} s in stage {stage}" in outcome.message


def test_bytes_that_a_library_reads_without_a_word_are_progress(
    clock: SteppedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, watchdog = watched(clock)
    known.enter_stage("Loading")
    beat = Heartbeat(known, HashStore())
    (tmp_path / "weights").write_bytes(bytes(4 * LEAST_BYTES))
    clock.advance(LIMIT - 1)
    beat.beat()
    (tmp_path / "weights").read_bytes()
    beat.beat()
    clock.advance(2)
    assert watchdog.verdict() is None
    clock.advance(LIMIT)
    beat.beat()
    assert watchdog.verdict() is not None
    monkeypatch.setattr(heartbeat, "COUNTERS", tmp_path / "none")
    assert heartbeat.moved_bytes() >= 0


def test_who_waits_for_a_peer_that_works_does_not_hang(clock: SteppedClock) -> None:
    store = HashStore()
    (worker, _), (waiter, watchdog) = watched(clock, rank=0), watched(clock, rank=1)
    beats = [Heartbeat(known, store) for known in (worker, waiter)]
    for known in (worker, waiter):
        known.enter_stage("Exporting")
    before = waiter.progress.events
    for _ in range(20):
        clock.advance(LIMIT - 1)
        worker.record_event()
        for beat in beats:
            beat.beat()
        assert watchdog.verdict() is None
    assert waiter.progress.events - before >= 20
    assert waiter.seconds_since_event > 10 * LIMIT
    clock.advance(LIMIT + 1)
    for beat in beats:
        beat.beat()
    assert watchdog.verdict() is not None


def test_only_a_finished_step_counts_while_it_trains(clock: SteppedClock) -> None:
    known, watchdog = watched(clock)
    known.begin_training(3, 10)
    clock.advance(LIMIT + 1)
    known.record_peer_events(7)
    Heartbeat(known, HashStore()).beat()
    outcome = watchdog.verdict()
    assert outcome is not None
    assert "no step finished" in outcome.message
    known.record_step(4, None, 1.0)
    assert watchdog.verdict() is None


def test_a_lost_store_costs_only_what_others_say(
    clock: SteppedClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Lost(HashStore):
        def add(self, key: str, value: int) -> int:  # noqa: ARG002
            raise RuntimeError("Connection reset by peer")

    known, _ = watched(clock)
    beat = Heartbeat(known, Lost())
    beat.beat()
    beat.beat()
    assert caplog.text.count("can't be received any more") == 1


@pytest.mark.realtime
def test_the_pulse_beats_by_itself(clock: SteppedClock) -> None:
    known, _ = watched(clock)
    known.record_event()
    heard = threading.Event()

    class Heard(HashStore):
        def add(self, key: str, value: int) -> int:  # noqa: ARG002
            heard.set()
            return 0

    Heartbeat(known, Heard()).start()
    assert wait_for_event(heard, 60)


def test_a_slow_step_that_was_foreseen_is_no_hang(clock: SteppedClock) -> None:
    plan = estimated(LIMIT)
    known, watchdog = watched(clock, plan)
    known.begin_training(0, 10)
    clock.advance(STEP_ESTIMATES * LIMIT - 1)
    assert watchdog.verdict() is None
    require_patience(plan.guard, plan.execution, LIMIT + 1)
    with pytest.raises(BadInput, match=rf"for {LIMIT} s is ended as a hang"):
        require_patience(PLAN.guard, PLAN.execution, LIMIT + 1)
    clock.advance(2)
    assert watchdog.verdict() is not None


def receive_sigterm(watchdog: Watchdog) -> None:
    """Let the watchdog take in one SIGTERM, as the C handler writes it."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(bytes([signal.SIGTERM]))
        writer.shutdown(socket.SHUT_WR)
        watchdog._listen(reader, writer)


def test_a_second_sigterm_does_not_begin_the_grace_period_anew(clock: SteppedClock) -> None:
    _, watchdog = watched(clock)
    receive_sigterm(watchdog)
    clock.advance(20.0)
    receive_sigterm(watchdog)
    assert watchdog.seconds_since_sigterm == 20.0


def test_sigterm_during_a_save_ends_nothing_before_its_time_and_is_not_forgotten(
    clock: SteppedClock,
) -> None:
    known, watchdog = watched(clock)
    known.begin_training(3, 10)
    known.enter_stage("Saving")
    receive_sigterm(watchdog)
    assert watchdog.verdict() is None
    known.enter_stage("Training")
    assert watchdog.seconds_since_sigterm == 0.0
    clock.advance(PLAN.grace_period_seconds - GRACE_MARGIN_SECONDS + 1.0)
    known.record_step(4, None, 1.0)
    outcome = watchdog.verdict()
    assert outcome is not None
    assert outcome.result is Result.PREEMPTED


def test_a_network_that_does_not_come_about_is_no_hang_of_half_an_hour(clock: SteppedClock) -> None:
    known, watchdog = watched(clock)
    known.enter_stage("Connecting")
    clock.advance(61)
    outcome = watchdog.verdict()
    assert outcome is not None
    assert outcome.result is Result.RENDEZVOUS_TIMEOUT


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["stage", "event", "heard", "step"]),
        st.sampled_from(STAGES),
        st.floats(0, 1e5),
    ),
    max_size=20,
)


@settings(max_examples=cases(60))
@given(STEPS, st.none() | st.floats(0, 1e9))
@example([("stage", "Training", 0.0), ("heard", "Training", LIMIT + 1.0)], None)
@example([("stage", "Training", LIMIT), ("event", "Training", LIMIT - 0.5)], None)
def test_a_verdict_falls_exactly_when_nothing_happened_for_longer_than_the_patience(
    steps: list[tuple[str, Stage, float]], estimate: float | None
) -> None:
    clock, plan = SteppedClock(), estimated(estimate)
    known, watchdog = watched(clock, plan)
    own = others = clock.now()
    for kind, stage, pause in steps:
        if kind == "stage":
            known.enter_stage(stage)
        elif kind == "step":
            known.record_step(1, None, 1.0)
        elif kind == "event":
            known.record_event()
        else:
            known.record_peer_events(1)
        own, others = (own, clock.now()) if kind == "heard" else (clock.now(), others)
        clock.advance(pause)
        here = known.progress.stage
        idle = clock.now() - (own if here == "Training" else max(own, others))
        assert (watchdog.verdict() is not None) == (
            idle > hang_timeout_seconds(here, plan.guard, plan.execution)
        )
