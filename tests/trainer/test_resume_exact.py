"""Resume at any step of any epoch: what follows is the undisturbed run's to the last digit, in all
that TRL logs.

Generated: how much data, how many passes, where checkpoints are and where the kill strikes, how a
step is cut into micro-batches and generations, whether the reference moves. Trainers are built anew
from the plan, in one process.
"""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.text.contract import DATA_MOUNT_ENV
from tests.generated import cases, gated
from tests.support.facts.resume_cases import (
    ADAPTIVE,
    Case,
    Story,
    bare,
    differences,
    killed,
    train,
    write_data,
)
from tests.support.ranks import demo_model

MOST_STEPS = 9
SYNCED = ("Clone", "Offload")
LOSSES: list[dict[str, Any]] = [
    {"lossType": "luspo", "importanceSamplingLevel": "sequence", "delta": 1.5, **ADAPTIVE},
    {"lossType": "vespo", "importanceSampling": {"level": "token"}, "vespoKPos": 1.5},
    {"lossType": "cispo", "epsilonHigh": 5.0, "multiObjectiveAggregation": "normalize_then_sum"},
    {"lossType": "sapo", "sapoTemperatureNeg": 1.2, "offPolicyMaskThreshold": 1e-4},
    {"lossType": "grpo", "entropyCoef": 0.1, "useBiasCorrectionKl": False},
    {"lossType": "bnpo", "topEntropyQuantile": 0.3},
    {"lossType": "dr_grpo", "scaleRewards": "none", "delta": 1.01},
    {
        "lossType": "dapo",
        "lrSchedulerType": "warmup_stable_decay",
        "lrSchedulerKwargs": {"num_decay_steps": 4},
    },
]
"""Each loss of TRL, with the fields that it uses."""


@st.composite
def drawn(draw: st.DrawFn) -> Case:
    """A run of one to three passes, whole or broken off, killed anywhere."""
    ahead, accumulation, iterations = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    generations = draw(st.integers(1, 3))
    steps = draw(st.integers(2, MOST_STEPS))
    in_pass = -(-generations * ahead * iterations // accumulation)
    length = {"steps": steps} if draw(st.booleans()) else {"epochs": steps / in_pass}
    strategy = draw(st.sampled_from(["Clone", "Offload", "Adapter", "None"]))
    return Case(
        rows=generations * ahead + draw(st.integers(0, ahead - 1)),
        save=draw(st.integers(1, steps)),
        kill=draw(st.integers(1, steps)),
        accumulation=accumulation,
        ahead=ahead,
        iterations=iterations,
        shuffle=draw(st.sampled_from([True, True, False])),
        sync=draw(st.integers(0, 3)) if strategy in SYNCED else 0,
        strategy=strategy,
        **length,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a model; and what is imported is put out of the garbage collector's way, as the worker
    does."""
    folder = tmp_path_factory.mktemp("exact")
    demo_model.save_policy(folder / "model")
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(DATA_MOUNT_ENV, str(folder))
        yield folder
    gc.unfreeze()


@given(case=drawn())
@settings(max_examples=cases(20, gate=1))
@example(
    case=Case(rows=8, epochs=3.0, save=3, kill=7, accumulation=2)
)  # the third pass, in the first one's order
@example(
    case=Case(rows=8, steps=6, save=6, kill=6, accumulation=2)
)  # killed after its last step: took one more
@example(
    case=Case(rows=9, epochs=3.0, save=4, kill=5, accumulation=2, ahead=3)
)  # a pass ends within a step
@example(
    case=Case(rows=8, steps=9, save=5, kill=6, ahead=4, iterations=2, sync=2)
)  # amid a generation
@example(case=Case(rows=8, steps=6, save=3, kill=4, sync=2, strategy="Offload"))
@example(case=Case(rows=8, steps=6, save=2, kill=4, accumulation=2, training=ADAPTIVE))
def test_a_resumed_run_is_the_undisturbed_one(folder: Path, case: Case) -> None:
    assert differences(case, folder) == []


def test_three_passes_are_bare_trls_to_the_last_digit(folder: Path) -> None:
    case = Case(rows=9, epochs=3.0, save=100, kill=1, accumulation=2, ahead=4, iterations=2, sync=3)
    ours = fresh(case, folder).logged
    theirs = bare(case, folder)
    assert len(theirs) == 24
    for step, values in theirs.items():
        assert ours[step].items() >= values.items(), step


@pytest.mark.parametrize("training", gated(LOSSES, 3), ids=lambda training: training["lossType"])
def test_ten_steps_of_each_loss_are_bare_trls_to_the_last_digit(
    folder: Path, training: dict[str, Any]
) -> None:
    case = Case(
        rows=8, steps=10, save=100, kill=1, accumulation=2, ahead=4, iterations=2, training=training
    )
    ours = fresh(case, folder).logged
    theirs = bare(case, folder)
    assert sorted(theirs) == list(range(1, 11))
    for step, values in theirs.items():
        assert ours[step].items() >= values.items(), step


def test_an_adaptive_entropy_coefficient_goes_on_from_its_checkpoint(folder: Path) -> None:
    case = Case(rows=8, steps=4, save=2, kill=2, training=ADAPTIVE)
    undisturbed, resumed = killed(case, folder, case)
    coefficients = [undisturbed.logged[step]["entropy_coef"] for step in (1, 2, 3, 4)]
    assert coefficients[1] != ADAPTIVE["entropyCoef"], "it is state by now"
    assert [resumed.logged[step]["entropy_coef"] for step in (3, 4)] == coefficients[2:]


def test_a_run_that_goes_further_has_its_own_interval_and_schedule(folder: Path) -> None:
    short = Case(rows=8, steps=4, save=3, kill=4, accumulation=2)
    further = replace(short, steps=7, save=2)
    whole = fresh(further, folder).logged
    fresh(short, folder)
    source = (folder / "runs").rename(folder / "short")
    continued = train(further, folder, 1, start=source).logged
    assert {path.name for path in folder.glob("runs/*/checkpoint-*")} == {
        "checkpoint-6",
        "checkpoint-7",
    }
    for step in (5, 6, 7):
        assert continued[step]["learning_rate"] == whole[step]["learning_rate"] > 0


def fresh(case: Case, folder: Path) -> Story:
    """The case's run with no checkpoint to go on from."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    write_data(case, folder)
    return train(case, folder, 1)
