"""No checkpoint is sealed after a number was not finite, wherever it strikes: which number, step,
rank and beta."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.report.report import EXIT_CODES, Outcome
from grpo_api.report.revisions import Generations
from grpo_api.text.contract import TERMINATION_LOG_ENV
from grpo_trainer.__main__ import run_worker
from grpo_trainer.gang.placement import Placement
from grpo_trainer.runtime.errors import Diverged, DivergedKL
from tests.generated import cases
from tests.support.facts.divergence_facts import MOMENTS, STEPS, Strike, struck
from tests.support.facts.step_facts import saved_model
from tests.support.ranks import runs
from tests.trainer.strikes import stopped_in_time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("divergence"))


@pytest.mark.parametrize("beta", [pytest.param(0.0, marks=pytest.mark.slow), 0.04])
def test_a_huge_reward_ends_the_run_and_what_was_saved_before_stays(
    tmp_path: Path, model: Path, beta: float
) -> None:
    facts = struck(tmp_path, model, Strike("reward", step=3, beta=beta))
    stopped_in_time(facts)
    assert facts["sealed"] == [2]
    assert "the gradient norm is nan at step 3 (reward inf" in facts["ended"]


STRIKES = st.builds(
    Strike,
    moment=st.sampled_from(MOMENTS),
    step=st.integers(1, STEPS - 1),
    beta=st.sampled_from([0.0, 0.04]),
)


@settings(max_examples=cases(4, gate=1))
@given(strike=STRIKES)
@example(strike=Strike("loss", step=2))
@example(strike=Strike("weights", step=2))
@example(strike=Strike("optimizer", step=2))
def test_wherever_it_strikes_nothing_is_sealed_after_it(
    tmp_path_factory: pytest.TempPathFactory, model: Path, strike: Strike
) -> None:
    stopped_in_time(struck(tmp_path_factory.mktemp("struck"), model, strike))


@pytest.mark.parametrize("error", [Diverged("nan", step=3), DivergedKL("far", step=3)])
def test_the_outcome_says_what_the_run_diverged_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Diverged
) -> None:
    error.diverged_on = Generations(first=2, last=3)

    def train(*_: Any) -> str:
        raise error

    monkeypatch.setattr("grpo_trainer.training.worker.train", train)
    monkeypatch.setattr("grpo_trainer.__main__.hide_unused_libraries", lambda _: None)
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    code = run_worker(runs.plan(tmp_path / "model"), Placement(0, 0, 1, 1), 0.0)
    said = Outcome.model_validate_json((tmp_path / "end").read_text())
    assert (said.result, said.diverged_on) == (error.result, error.diverged_on)
    assert code == EXIT_CODES[error.result]
