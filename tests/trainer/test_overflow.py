"""A KL that overflows does not poison the run, in one process; test_reference_gang.py has the same
on two ranks.

TRL issue 3015: one such step makes every parameter NaN and is logged as loss 0.0.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from grpo_api.report.training_metrics import TRAINING
from grpo_trainer.runtime.errors import Diverged
from grpo_trainer.training import finite_loss
from tests.support.facts.reference_facts import whole
from tests.support.facts.step_facts import overflowed, poison, saved_model
from tests.support.ranks import runs


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    runs.reset()


def test_an_overflow_is_limited_counted_and_does_not_spread(tmp_path: Path) -> None:
    facts = overflowed(tmp_path, ["1 process"])["1 process"]
    rows = facts["rows"]
    assert [row[finite_loss.KL_OVERFLOW_METRIC] for row in rows] == [0.0, 1.0, 0.0, 0.0]
    assert all(row["finite"] for row in rows)
    assert rows[1]["kl"] > 1e6  # exp(20) over 64 tokens, logged as it is
    assert (
        rows[1]["grad_norm"] < 10
    )  # the gradient of the corrected term is the log-ratio, now 20 at most
    assert "step 2" in facts["ended"]


def test_a_loss_that_is_computed_again_moves_the_entropy_coefficient_once(tmp_path: Path) -> None:
    training = {"maxSteps": 3, "useAdaptiveEntropy": True, "entropyTarget": 100.0}
    logs = runs.Logs()
    trainer = runs.build(
        runs.plan(saved_model(tmp_path), training=training),
        logs,
        output_dir=str(tmp_path / "output"),
    )
    poison(trainer, 120.0)
    trainer.train()
    assert logs.rows[2][finite_loss.KL_OVERFLOW_METRIC] == 1.0
    coefficients = [logs.rows[step]["entropy_coef"] for step in (1, 2, 3)]
    assert coefficients == pytest.approx([0.005, 0.01, 0.015])


@pytest.mark.slow
def test_without_the_guard_trl_makes_every_parameter_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_compute_loss", "_get_grad_norm"):
        monkeypatch.setattr(
            f"grpo_trainer.training.reference_trainer.ReferenceGRPOTrainer.{name}",
            getattr(GRPOTrainer, name),
        )
    trainer = runs.build(
        runs.plan(saved_model(tmp_path), training={"maxSteps": 2}),
        output_dir=str(tmp_path / "output"),
    )
    poison(trainer, 120.0)
    trainer.train()
    assert all(torch.isnan(tensor).all() for tensor in whole(trainer.model).values())


def test_other_steps_are_trls_to_every_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = runs.plan(saved_model(tmp_path))
    ours, trls = runs.Logs(), runs.Logs()
    runs.build(job, ours, output_dir=str(tmp_path / "output")).train()
    runs.reset()
    monkeypatch.setattr(
        "grpo_trainer.training.reference_trainer.ReferenceGRPOTrainer._compute_loss",
        GRPOTrainer._compute_loss,
    )
    runs.build(job, trls, output_dir=str(tmp_path / "output")).train()
    assert ours.numbers(1, 6) == trls.numbers(1, 6)


def test_a_kl_that_cannot_be_limited_ends_the_run_before_the_optimizer_steps(
    tmp_path: Path,
) -> None:
    trainer = runs.build(runs.plan(saved_model(tmp_path)), output_dir=str(tmp_path / "output"))
    poison(trainer, float("nan"))
    with pytest.raises(Diverged, match="not finite"):
        trainer.train()
    assert all(torch.isfinite(tensor).all() for tensor in whole(trainer.model).values())


def test_the_count_is_a_declared_metric() -> None:
    assert finite_loss.KL_OVERFLOW_METRIC in [metric.trl for metric in TRAINING]
