"""A run that goes on with another split, as after running out of memory: the same samples, the loss
but for rounding.

Micro-batch and accumulation change with their product, and activations are recomputed. Trainers are
built anew from the plan, in one process.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.text.contract import DATA_MOUNT_ENV
from grpo_trainer.checkpoints.manifest import identity, trained_identity
from grpo_trainer.checkpoints.writing import recut_rollouts
from grpo_trainer.runtime.errors import BadInput
from tests.support.facts.resume_cases import Case, Story, killed, train
from tests.support.ranks import demo_model, runs

TOLERANCE = 1e-5
"""Of loss and gradient norm, in float32; ten times what was measured or more."""
SPLITS: dict[str, dict[str, Any]] = {
    "checkpointing": {"checkpointing": True},
    "half the micro-batch": {"micro_batch": 2, "accumulation": 4, "ahead": 4},
    "both, to the end": {"micro_batch": 1, "accumulation": 8, "ahead": 8, "checkpointing": True},
}
GATE = ("dapo", "both, to the end")
"""What the gate shows of all pairs of losses and splits."""
BEGUN = Case(rows=64, steps=4, save=3, kill=3, micro_batch=4, accumulation=2, ahead=2)
"""Three steps, a checkpoint, and the step that is compared; eight completions each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("replanned")
    demo_model.save_policy(folder / "model")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(DATA_MOUNT_ENV, str(folder))
        yield folder


def compare(undisturbed: Story, resumed: Story, step: int) -> None:
    """The step's samples are the same, and its loss and gradient norm but for rounding."""
    one, other = undisturbed.logged[step], resumed.logged[step]
    for key in ("reward", "reward_std", "completions/mean_length", "learning_rate", "num_tokens"):
        assert other.get(key) == one.get(key), (
            key
        )  # a step within a generation has no rewards of its own
    for key in ("loss", "grad_norm"):
        assert other[key] == pytest.approx(one[key], rel=TOLERANCE, abs=TOLERANCE), key
    assert one["grad_norm"] > 0


@pytest.mark.parametrize(
    ("loss", "split"),
    [
        pytest.param(loss, split, marks=() if (loss, split) == GATE else pytest.mark.slow)
        for loss in ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")
        for split in SPLITS
    ],
)
def test_the_next_step_is_the_same_with_another_split(folder: Path, loss: str, split: str) -> None:
    begun = replace(BEGUN, loss=loss)
    undisturbed, resumed = killed(begun, folder, replace(begun, **SPLITS[split]))
    compare(undisturbed, resumed, 4)
    assert resumed.last == undisturbed.last
    assert len(resumed.last["completion"]) == 8


@pytest.mark.parametrize(
    "split", ["half the micro-batch", pytest.param("both, to the end", marks=pytest.mark.slow)]
)
def test_a_generation_that_is_half_used_is_cut_anew(folder: Path, split: str) -> None:
    begun = replace(BEGUN, ahead=4, iterations=2, save=1, kill=1)  # four steps on one generation
    changed = replace(begun, **SPLITS[split])
    undisturbed, resumed = killed(begun, folder, replace(changed, ahead=2 * changed.ahead))
    assert resumed.last["completion"] == []
    for step in (2, 3, 4):
        compare(undisturbed, resumed, step)


def test_bnpo_normalises_in_a_micro_batch_and_keeps_it(folder: Path) -> None:
    begun = replace(BEGUN, loss="bnpo")
    killed(begun, folder, replace(begun, checkpointing=True))
    with pytest.raises(BadInput, match=r"plan\.micro_batch: checkpoint 4, now 2"):
        train(replace(begun, **SPLITS["half the micro-batch"]), folder, 3)


@pytest.mark.slow
def test_another_batch_is_another_run(folder: Path) -> None:
    killed(BEGUN, folder, BEGUN)
    with pytest.raises(BadInput, match=r"plan\.completions_per_step: checkpoint 8, now 4"):
        train(replace(BEGUN, micro_batch=2, ahead=4), folder, 3)


SPLITTABLE = [{"lossType": loss} for loss in ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")]
PER_MICRO_BATCH: list[dict[str, Any]] = [
    {"lossType": "bnpo"},
    {"topEntropyQuantile": 0.5},
    {"entropyCoef": 0.01},
    {"useAdaptiveEntropy": True},
]


@given(
    micro=st.integers(1, 8), accumulation=st.integers(1, 8), ahead=st.integers(1, 4),
    training=st.sampled_from([*SPLITTABLE, *PER_MICRO_BATCH]), factor=st.integers(1, 4),
)  # fmt: skip
def test_what_is_trained_knows_the_products_only(
    micro: int, accumulation: int, ahead: int, training: dict[str, Any], factor: int
) -> None:
    def of(micro: int, accumulation: int, per_generation: int) -> dict[str, str]:
        execution = {
            "microBatch": micro,
            "gradientAccumulation": accumulation,
            "stepsPerGeneration": per_generation,
        }
        plan = runs.plan(Path("/models/demo"), training=training, execution=execution)
        return trained_identity(identity(plan, "rows"))

    per_generation = accumulation * ahead
    whole = of(micro * factor, accumulation, per_generation)
    cut = of(micro, accumulation * factor, per_generation * factor)
    assert (whole == cut) == (training in SPLITTABLE or factor == 1)
    assert of(micro, accumulation + 1, per_generation) != of(micro, accumulation, per_generation)
    assert of(micro, accumulation, per_generation + 1) != of(micro, accumulation, per_generation)


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_cutting_anew_keeps_every_completion_in_its_place(before: int, after: int) -> None:
    tokens, count = torch.arange(24).reshape(12, 2), torch.tensor(7.0)
    found = recut_rollouts(
        [{"tokens": part, "count": count} for part in tokens.chunk(before)], after
    )
    assert len(found) == after
    assert torch.equal(torch.cat([batch["tokens"] for batch in found]), tokens)
    assert {batch["tokens"].shape[0] for batch in found} == {12 // after}
    assert all(batch["count"] == count for batch in found)
