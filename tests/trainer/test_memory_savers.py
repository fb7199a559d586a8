"""The plan's memory savers in the live trainer: 8-bit AdamW, gradient checkpointing, generation in sub-batches.

Exists because a saver that is asked for but not in force ends a run that the planner said would fit. ZeRO-3's own are
seen in test_reference_gang.py.
"""

from typing import Any

import pytest

from tests.trainer import demo_model, runs
from tests.trainer.saver_facts import STEPS, observed

SAVINGS = {"optimizer": "AdamW8bit", "gradientCheckpointing": True, "generationSubBatch": 3}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of a run with all savers and of one with none."""
    folder = tmp_path_factory.mktemp("savers")
    model = demo_model.save_policy(folder / "model")
    return {
        name: observed(runs.plan(model, execution=execution, training={"maxSteps": STEPS}), folder)
        for name, execution in {"off": {}, "on": SAVINGS}.items()
    }


def test_moments_are_kept_in_8_bits_but_for_embeddings_and_small_tensors(facts: dict[str, dict[str, Any]]) -> None:
    exact = {"embedding": ["torch.float32"], "small": ["torch.float32"]}
    assert facts["off"]["state_dtypes"] == exact | {"matrix": ["torch.float32"]}
    assert facts["on"]["state_dtypes"] == exact | {"matrix": ["torch.uint8"]}
    assert (facts["off"]["optimizer"], facts["on"]["optimizer"]) == ("torch", "bitsandbytes")


def test_checkpointed_layers_run_again_in_every_backward_pass(facts: dict[str, dict[str, Any]]) -> None:
    assert (facts["off"]["checkpointing"], facts["off"]["recomputed"]) == (False, [])
    assert (facts["on"]["checkpointing"], facts["on"]["recomputed"]) == (True, list(range(STEPS)))


def test_a_generation_is_cut_into_sub_batches(facts: dict[str, dict[str, Any]]) -> None:
    assert facts["off"]["generated_rows"] == [runs.BATCH] * STEPS
    assert facts["on"]["generated_rows"] == [3, 3, 2] * STEPS
