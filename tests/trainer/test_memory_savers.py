"""The plan's memory savers in the live trainer: 8-bit AdamW, gradient checkpointing, generation in
sub-batches.

A saver that is asked for but not in force ends a run that the planner said would fit. ZeRO-3's own
are seen in test_reference_gang.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_planner.memory.setup import Setup
from grpo_planner.memory.states import optimizer_state
from tests.support.facts.saver_facts import STEPS, observed, resumed_states
from tests.support.ledger.config_shapes import from_config
from tests.support.ranks import demo_model, runs

RANK = 64
"""At this rank some of the demo model's adapter matrices are large enough for 8 bits and some are
not."""
EIGHT_BIT = "model.layers.1.mlp.down_proj.weight"
"""A matrix whose moments are kept in 8 bits."""
SAVINGS = {"optimizer": "AdamW8bit", "gradientCheckpointing": True, "generationSubBatch": 3}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of a run with all savers, of one with none, and of an adapter's with 8-bit moments."""
    folder = tmp_path_factory.mktemp("savers")
    model = demo_model.save_policy(folder / "model")
    plans = {
        name: runs.plan(model, execution=execution, training={"maxSteps": STEPS})
        for name, execution in {"off": {}, "on": SAVINGS}.items()
    }
    eight_bit = {"optimizer": "AdamW8bit"}
    plans["adapter"] = runs.plan(
        model, "Adapter", adapter={"rank": RANK}, execution=eight_bit, training={"maxSteps": STEPS}
    )  # fmt: skip
    return {name: observed(plan, folder) for name, plan in plans.items()}


def test_moments_are_kept_in_8_bits_but_for_embeddings_and_small_tensors(
    facts: dict[str, dict[str, Any]],
) -> None:
    exact = {"embedding": ["torch.float32"], "small": ["torch.float32"]}
    assert facts["off"]["state_dtypes"] == exact | {"matrix": ["torch.float32"]}
    assert facts["on"]["state_dtypes"] == exact | {"matrix": ["torch.uint8"]}
    assert (facts["off"]["optimizer"], facts["on"]["optimizer"]) == ("torch", "bitsandbytes")


@pytest.mark.slow
def test_8_bit_moments_and_their_scales_survive_a_resume_to_the_digit(tmp_path: Path) -> None:
    model = demo_model.save_policy(tmp_path / "model")
    job = runs.plan(model, execution={"optimizer": "AdamW8bit"}, training={"maxSteps": 4})
    saved, resumed, rows = resumed_states(job, tmp_path / "output", 2)
    assert rows["resumed"] == rows["uninterrupted"]
    assert saved.keys() == resumed.keys()
    assert all(torch.equal(saved[name], resumed[name]) for name in saved)
    kinds = {name.split()[0]: resumed[name].dtype for name in resumed if name.endswith(EIGHT_BIT)}
    assert kinds == {
        "state1": torch.uint8,
        "state2": torch.uint8,
        "absmax1": torch.float32,
        "absmax2": torch.float32,
    }


def test_the_plan_counts_the_optimizers_bytes(facts: dict[str, dict[str, Any]]) -> None:
    shape = from_config(demo_model.config().to_dict())
    plain = Setup(precision="float32", prompt=8, completion=8, micro_batch=1)
    eight_bit = replace(plain, eight_bit=True)
    for name, setup in {
        "off": plain,
        "on": eight_bit,
        "adapter": replace(eight_bit, lora_rank=RANK),
    }.items():
        assert facts[name]["state_bytes"] == optimizer_state(shape, setup)


def test_checkpointed_layers_run_again_in_every_backward_pass(
    facts: dict[str, dict[str, Any]],
) -> None:
    assert (facts["off"]["checkpointing"], facts["off"]["recomputed"]) == (False, [])
    assert (facts["on"]["checkpointing"], facts["on"]["recomputed"]) == (True, list(range(STEPS)))


def test_a_generation_is_cut_into_sub_batches(facts: dict[str, dict[str, Any]]) -> None:
    assert facts["off"]["generated_rows"] == [runs.BATCH] * STEPS
    assert facts["on"]["generated_rows"] == [3, 3, 2] * STEPS
