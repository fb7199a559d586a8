"""Counters of steps: what they add up is exact, never falls, and says what each group taught."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from grpo_api.report import training_metrics
from grpo_api.report.metrics import GENERATION_TOKENS, RUNNING
from grpo_api.report.report import STEP_PHASES
from grpo_trainer.engine_pod.engine_metrics import EngineMetrics
from grpo_trainer.process.step_counters import StepCounters

NAN = math.nan
NAMES = ("accuracy", "format")
SIZE = 4
REWARD = st.one_of(st.floats(-1e6, 1e6), st.just(NAN), st.just(math.inf), st.sampled_from([0, 1]))
GENERATION = st.integers(1, 4).flatmap(
    lambda groups: st.lists(
        st.tuples(REWARD, REWARD), min_size=groups * SIZE, max_size=groups * SIZE
    )
)


def samples(counters: StepCounters) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    registry = CollectorRegistry()
    registry.register(counters)
    return {
        (sample.name.removeprefix("grpo_training_"), *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


@given(st.lists(GENERATION, min_size=1, max_size=4))
def test_sums_and_counts_are_those_of_the_finite_rewards_and_each_group_is_counted_once(
    generations: list[list[tuple[float, float]]],
) -> None:
    counters = StepCounters()
    before: dict[tuple[str, ...], float] = {}
    for rewards in generations:
        counters.add_rewards(rewards, NAMES, (1.0, 0.5), SIZE)
        found = samples(counters)
        assert all(found[name] >= value for name, value in before.items())
        before = found
    for column, name in enumerate(NAMES):
        given = [row[column] for rewards in generations for row in rewards]
        finite = [reward for reward in given if math.isfinite(reward)]
        gains, losses = (found["reward_sum_total", name, sign] for sign in ("positive", "negative"))
        assert found["rewards_total", name] == len(finite)
        assert gains - losses == pytest.approx(math.fsum(finite), abs=1e-3)
    groups = sum(value for name, value in found.items() if name[0] == "groups_total")
    assert groups == sum(map(len, generations)) / SIZE


@pytest.mark.parametrize(
    ("groups", "signals"),
    [
        ([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], {"mixed": 1, "solved": 1, "too_hard": 1}),
        ([[1.0, 1.0]], {"solved": 1}),
        ([[0.0, 0.0]], {"too_hard": 1}),
        ([[-1.0, -1.0], [-5.0, -2.0]], {"solved": 1, "mixed": 1}),
        ([[NAN, NAN], [NAN, 0.0]], {"unscored": 1, "too_hard": 1}),
        ([[2.0, 2.0 + 1e-9], [0.0, 3.0]], {"too_hard": 1, "mixed": 1}),
    ],
)
def test_a_group_without_a_difference_is_solved_or_too_hard(
    groups: list[list[float]], signals: dict[str, int]
) -> None:
    counters = StepCounters()
    rewards = [[reward] for group in groups for reward in group]
    counters.add_rewards(rewards, ["task"], [1.0], group_size=2)
    found = samples(counters)
    told = {name[1]: value for name, value in found.items() if name[0] == "groups_total"}
    assert told == signals


def test_a_high_reward_is_one_of_those_that_the_attempt_has_seen() -> None:
    counters = StepCounters()
    counters.add_rewards([[0.0], [4.0]], ["task"], [1.0], group_size=2)
    counters.add_rewards([[1.0], [1.0]], ["task"], [1.0], group_size=2)
    assert samples(counters)["groups_total", "too_hard"] == 1


def test_steps_are_a_histogram_and_their_phases_add_up() -> None:
    counters = StepCounters()
    for seconds in (0.5, 30.0, 4000.0):
        counters.add_step(seconds, dict.fromkeys(STEP_PHASES, seconds / len(STEP_PHASES)))
    found = samples(counters)
    assert found["step_seconds_bucket", "40.0"] == 2
    assert (found["step_seconds_count",], found["step_seconds_sum",]) == (3, 4030.5)
    phases = [found["phase_seconds_total", phase] for phase in STEP_PHASES]
    assert sum(phases) == pytest.approx(4030.5)


@pytest.mark.parametrize(("totals", "counted"), [((250, 400), 400), ((1250, 1400), 400)])
def test_tokens_of_earlier_attempts_are_left_out(totals: Sequence[int], counted: int) -> None:
    counters = StepCounters()
    counters.begin_tokens(1000.0 if totals[0] > 1000 else 0.0)
    for total in totals:
        counters.record_tokens(float(total))
    assert samples(counters)["tokens_total",] == counted


def test_all_that_is_counted_is_declared() -> None:
    counters = StepCounters()
    registry = CollectorRegistry()
    registry.register(counters)
    declared = {metric.name.removesuffix("_total") for metric in training_metrics.COUNTED}
    assert {family.name for family in registry.collect()} == declared


def test_of_a_process_with_an_engine_only_declared_families_of_vllm_are_exported() -> None:
    vllm = CollectorRegistry()
    Gauge(RUNNING.name, "x", RUNNING.labels, registry=vllm).labels("0", "/model").set(3)
    Gauge("vllm:lora_requests_info", "x", registry=vllm)
    Gauge("python_info", "x", registry=vllm)
    page = CollectorRegistry()
    page.register(EngineMetrics(vllm))
    text = generate_latest(page).decode()
    assert 'vllm:num_requests_running{engine="0",model_name="/model"} 3.0' in text
    assert "python_info" not in text
    assert "lora" not in text
    assert GENERATION_TOKENS.name not in text
