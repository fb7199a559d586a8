"""adapter.learningRate reaches TRL and the optimizer wherever an adapter is trained, and nowhere
else."""

from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.checkpoints.manifest import identity
from tests.support.ranks import demo_model, runs

FULL, ADAPTER = 1e-3, 4e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.save_policy(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("strategy", "adapter", "rate"),
    [
        ("Adapter", {"learningRate": ADAPTER}, ADAPTER),
        ("Adapter", {}, FULL),
        ("Clone", {"learningRate": ADAPTER}, FULL),
    ],
)
def test_the_live_optimizer_has_the_rate_of_what_is_trained(
    model: Path, strategy: str, adapter: dict[str, Any], rate: float
) -> None:
    runs.reset()
    job = runs.plan(model, strategy, adapter=adapter, training={"lrSchedulerType": "linear"})
    trainer = runs.build(job)
    trainer.create_optimizer_and_scheduler(job.training.max_steps)
    assert trainer.args.learning_rate == rate
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {rate}
    assert set(trainer.lr_scheduler.base_lrs) == {rate}


def test_a_replan_from_all_parameters_to_an_adapter_takes_the_adapter_s_rate() -> None:
    full = runs.plan(Path("/model"), adapter={"learningRate": ADAPTER})
    replanned = full.execution.model_copy(update={"method": "LoRA", "strategy": "Adapter"})
    assert full.learning_rate == FULL
    assert full.model_copy(update={"execution": replanned}).learning_rate == ADAPTER


def test_the_rate_is_part_of_an_adapter_s_run_only_where_it_is_set() -> None:
    """Checkpoints of versions that did not know it are continued."""
    plain, rated = (
        runs.plan(Path("/model"), "Adapter", adapter=adapter)
        for adapter in ({}, {"learningRate": ADAPTER})
    )
    assert "learning" not in identity(plain, "rows")["adapter"]
    assert f'"learningRate":{ADAPTER}' in identity(rated, "rows")["adapter"]
