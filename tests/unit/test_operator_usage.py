"""What became of a job's GPUs is told within a hundredth of the truth, whatever befalls job, nodes
and operator. What happened without an operator and left no object can't be told."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.status.usage import AttemptUsage, GPUSeconds, PodTime, Usage
from grpo_api.text.timing import LAST_TIME, Beginning, Clock
from grpo_operator.usage.gpu_time import SUCCEEDED, divide_by_state, kept_clocks, sum_states
from tests.generated import cases
from tests.unit.operator_world import at
from tests.unit.usage_world import LOSSES, World


@pytest.mark.seeded
@pytest.mark.parametrize("losses", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_usage_is_the_truth_over_many_losses(chance: random.Random, losses: int) -> None:
    world, told = World(chance, losses), Usage(as_of=at(0))
    for told in world.live():
        again = sum_states(Usage.model_validate_json(told.model_dump_json(exclude_none=True)))
        assert again.model_dump_json() == told.model_dump_json(), "the records alone make the sums"
    started = [gang.attempt for gang in world.gangs]
    assert sorted([*started, *world.unstarted]) == list(range(1, started[-1] + 1))
    assert started[-1] > losses
    assert world.restarts > losses / 2
    assert {gang.loss for gang in world.gangs} == {*LOSSES, "succeeded"}
    truth = world.truth()
    allowed = 0.01 * truth.total + world.unseen
    assert told.held_gpu_seconds == pytest.approx(truth.total, abs=allowed)
    for state in GPUSeconds.model_fields:
        assert getattr(told.gpu_seconds, state) == pytest.approx(
            getattr(truth, state), abs=allowed
        ), state
    effective = truth.productive_seconds / truth.total
    assert float(told.effective) == pytest.approx(effective, rel=0.01, abs=allowed / truth.total)
    # since when a job waits is not known where its gang went with its Job while nobody looked
    assert world.queued - world.away - losses < told.queued_seconds < 1.01 * world.queued + losses
    assert told.waiting_since is None


@pytest.mark.slow
@pytest.mark.seeded
def test_usage_is_the_truth_and_never_falls_although_the_operators_clock_is_set(
    chance: random.Random,
) -> None:
    world, told = World(chance, 12, sets_clock=True), Usage(as_of=at(0))
    for now_told in world.live():
        assert now_told.held_gpu_seconds >= told.held_gpu_seconds - 0.1
        told = now_told
    truth = world.truth().total
    assert told.held_gpu_seconds == pytest.approx(truth, abs=0.02 * truth + world.unseen)


SECONDS = st.floats(0.0, LAST_TIME) | st.floats(0.0, 1e4)
CLOCKS = st.builds(Clock, **dict.fromkeys(Clock.model_fields, SECONDS))
RECORDS = st.builds(
    AttemptUsage,
    attempt=st.integers(1, 5),
    gpus=st.integers(1, 16),
    nodes=st.integers(1, 4),
    startTime=st.just(at(0)),
    ended=st.sampled_from(["", SUCCEEDED, "Preempted"]),
    pods=st.lists(
        st.builds(
            PodTime, name=st.text("ab", min_size=1), boundTime=st.just(at(5)), seconds=SECONDS
        )
    ),
    gone_seconds=st.floats(0.0, 1e6),
    lead_seconds=st.none() | SECONDS,
    clock=CLOCKS,
    sealed=CLOCKS,
    began_at=st.none() | st.builds(Beginning, attempt=st.integers(0, 5), clock=CLOCKS),
)


@settings(max_examples=cases(60))
@given(st.lists(RECORDS, max_size=4))
def test_whatever_a_trainer_says_of_its_time_it_divides_no_more_than_was_held(
    records: list[AttemptUsage],
) -> None:
    for record, kept in zip(records, kept_clocks(records), strict=True):
        part = divide_by_state(record, kept, at(100))
        held = (
            (record.gone_seconds + sum(pod.seconds or 0.0 for pod in record.pods))
            / record.nodes
            * record.gpus
        )
        assert part.total == pytest.approx(held, rel=1e-6, abs=0.1)
        assert min(part.model_dump().values()) >= 0.0


def record(attempt: int, **more: Any) -> AttemptUsage:
    """An attempt of one GPU that held it for 100 s, of which it trained for 60 after 20 of
    loading."""
    fields: dict[str, Any] = {
        "gpus": 1,
        "nodes": 1,
        "start_time": at(0),
        "gone_seconds": 100.0,
        "lead_seconds": 5.0,
    }
    fields["clock"] = Clock(loading=20, training=60, saving=10)
    return AttemptUsage(attempt=attempt, **{**fields, **more})


def test_what_a_rollback_goes_back_behind_is_lost_too() -> None:
    ends = {"ended": "Diverged", "sealed": Clock(loading=20, training=50, saving=10)}
    before = [record(1, **ends), record(2, **ends)]
    assert [clock.training for clock in kept_clocks(before)] == [50, 50]
    earlier = Beginning(attempt=1, clock=Clock(loading=20, training=30, saving=5))
    after = [*before, record(3, began_at=earlier)]
    assert [clock.training for clock in kept_clocks(after)] == [30, 0, 0]
    first = divide_by_state(after[0], kept_clocks(after)[0], at(200))
    # 30 s of training and 5 of saving are done again, and the 5 s after the last word are gone with
    # them
    assert (first.training, first.saving, first.lost, first.loading, first.other) == (
        30,
        5,
        40,
        20,
        5,
    )


def test_work_of_an_attempt_that_succeeded_is_kept_without_a_checkpoint() -> None:
    part = divide_by_state(record(1, ended=SUCCEEDED), Clock(), at(200))
    assert (part.training, part.lost, part.other) == (60, 0, 10)


def test_an_attempt_that_dies_while_it_loads_loses_no_training() -> None:
    part = divide_by_state(record(1, ended="Preempted", clock=Clock(loading=30)), Clock(), at(200))
    assert (part.loading, part.lost, part.other) == (95, 0, 5)
