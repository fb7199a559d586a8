"""A run that diverged goes on without the batch that it diverged on, from the checkpoint before,
and exactly so.

One prompt's reward is so large that its step diverges. What the operator does in between, handing
the first attempt's word to the next one's plan, is in tests/integration/test_operator_rollback.py.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.revisions import Generations
from grpo_api.text.contract import DATA_MOUNT_ENV
from grpo_trainer.checkpoints.volume_checkpoints import complete, read_manifest
from grpo_trainer.data.order import PromptOrder
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.runtime.errors import Diverged
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.training.training_run import run
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder
from tests.trainer.poisonous_reward import POISON

pytestmark = pytest.mark.realtime

ROWS, STEPS, SAVED = 14, 5, 2
DIVERGES = 3
"""The generation with the poison: that of step 4, after the checkpoint of step 2."""
LEFT_OUT = {"first": DIVERGES, "last": DIVERGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model, and the prompts with a poisonous one where the order comes to it in generation
    DIVERGES."""
    folder = tmp_path_factory.mktemp("rollback")
    demo_model.save_policy(folder / "model")
    rows = [{"prompt": f"say {number}"} for number in range(ROWS)]
    rows[nth_generation(folder, DIVERGES)[0]] = {"prompt": POISON}
    write(folder, rows)
    yield folder
    runs.reset()


def write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def nth_generation(folder: Path, number: int) -> list[int]:
    """The rows of a generation of the first pass."""
    trainer: Any = runs.build(plan(folder), output_dir=str(folder / "unused"), max_steps=1)
    trainer.train_dataset = list(range(ROWS))
    order = list(
        PromptOrder(super(type(trainer), trainer)._get_train_sampler(trainer.train_dataset), ())
    )
    runs.reset()
    size = len(order) // (ROWS // 2)
    return sorted(set(order[number * size : (number + 1) * size]))


def plan(
    folder: Path, attempt: int = 1, *skipped: dict[str, int], kept: bool = True
) -> TrainingPlan:
    made = runs.plan(
        folder / "model",
        training={"maxSteps": STEPS, "scaleRewards": "none"},
        execution={"saveEverySteps": SAVED},
        folder=folder / "runs" if kept else None,
    ).model_dump(by_alias=True)
    made["job"]["attempt"] = attempt
    made["checkpoint"]["keep"] = 2
    made["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    made["rewards"] = [{"python": {"function": "tests.trainer.poisonous_reward:digits"}}]
    made["skipped"] = list(skipped)
    return TrainingPlan.model_validate(made)


@pytest.fixture
def train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator["Train"]:
    monkeypatch.setenv(DATA_MOUNT_ENV, str(folder))
    yield Train(folder, caplog)
    runs.reset()


class Train:
    """Takes an attempt to its end."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.folder = folder
        self._log = caplog

    def __call__(
        self, attempt: int, *skipped: dict[str, int], kept: bool = True
    ) -> dict[int, dict[str, Any]]:
        """The steps that it logged."""
        runs.reset()
        self._log.clear()
        job = plan(self.folder, attempt, *skipped, kept=kept)
        recorder = Recorder(job.job.attempt, Placement(0, 0, 1, 1), time.time())
        claim_folder(job)
        run(
            job,
            recorder,
            Watchdog(job.guard, job.execution, job.grace_period_seconds, recorder, lambda *_: None),
        )
        lines = [vars(record) for record in self._log.records if "totalSteps" in vars(record)]
        return {line["step"]: line for line in lines}

    def sealed(self) -> list[str]:
        """The complete checkpoints."""
        return [f"{one.parent.name}/{one.name}" for one in complete(self.folder / "runs")]


def numbers(step: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in a resumed run."""
    return {key: step[key] for key in ("reward", "kl", "loss", "grad_norm", "tokens")}


def test_a_run_goes_on_without_what_it_diverged_on_and_remembers_it(train: Train) -> None:
    with pytest.raises(
        Diverged, match=r"gradient norm is nan at step 4 .*last good checkpoint is .*checkpoint-2"
    ) as end:
        train(1)
    assert end.value.diverged_on == Generations(**LEFT_OUT)
    assert train.sealed() == ["attempt-1/checkpoint-2"]

    second = train(2, LEFT_OUT)
    assert sorted(second) == [3, 4, 5]
    assert train.sealed() == ["attempt-2/checkpoint-5", "attempt-2/checkpoint-4"]
    last, before = complete(train.folder / "runs")
    assert read_manifest(before).skipped == [Generations(**LEFT_OUT)]

    shutil.rmtree(last)  # as an ordinary kill after step 4 leaves it
    third = train(3, LEFT_OUT)
    assert sorted(third) == [5]
    assert numbers(third[5]) == numbers(second[5])

    fourth = train(4, LEFT_OUT, {"first": 5, "last": 5})
    assert sorted(fourth) == [5]
    assert numbers(fourth[5]) != numbers(third[5])
    assert train.sealed() == ["attempt-4/checkpoint-5", "attempt-2/checkpoint-4"]

    with pytest.raises(Diverged, match="was trained on what the run diverged on") as end:
        train(5, LEFT_OUT, {"first": 4, "last": 5})
    assert end.value.diverged_on is None
    assert len(train.sealed()) == 2


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_anew_without_it(train: Train) -> None:
    with pytest.raises(Diverged, match="No checkpoint was saved before") as end:
        train(1, kept=False)
    assert end.value.diverged_on == Generations(**LEFT_OUT)
    assert sorted(train(2, LEFT_OUT, kept=False)) == [1, 2, 3, 4, 5]


def test_weights_that_are_spoiled_after_the_last_step_are_no_success(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ReferenceGRPOTrainer.train

    def spoiled(trainer: Any, **options: Any) -> None:
        original(trainer, **options)
        next(trainer.model.parameters()).data.view(-1)[:1] = math.nan

    monkeypatch.setattr(ReferenceGRPOTrainer, "train", spoiled)
    with pytest.raises(Diverged, match=f"is not finite after step {STEPS}"):
        train(1, LEFT_OUT, kept=False)
