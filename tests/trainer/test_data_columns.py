"""Columns with names that TRL takes for something else: the run trains on text, and rewards get
every column as it is.

TRL finds out in its first step, and its error names no column.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.spec.dataset import DatasetSpec
from grpo_trainer.data.dataset import RESERVED, load_prompts
from grpo_trainer.history.run_history import RunHistory
from grpo_trainer.reference.strategies import Clone
from grpo_trainer.rewards.reward_base import RewardCounters
from grpo_trainer.rewards.reward_set import RewardSet
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.training.build_run import make_trainer
from grpo_trainer.weights.models import load_policy
from tests.support.ranks import demo_model, runs

EXTRA = {
    "image": "cat.png",
    "images": ["cat.png", "dog.png"],
    "video": "cat.mp4",
    "column image": 1.5,
    "messages": [{"role": "user", "content": "x"}],
    "environment": "kitchen",
    "tools": None,
}


def plan(folder: Path, extra: dict[str, Any], chat: bool = False) -> Any:
    """A job of one step on text prompts, or chats, beside these columns."""
    rows = [{"prompt": f"say {number}", **extra} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"configMap": {"name": "rows"}, "paths": ["rows.jsonl"]}
    dataset = {"files": files} | ({"systemPrompt": "Answer."} if chat else {})
    job = runs.plan(demo_model.save_policy(folder / "model"), training={"maxSteps": 1})
    return job.model_copy(update={"dataset": DatasetSpec.model_validate(dataset)})


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_a_step_is_trained_and_rewards_get_every_column(tmp_path: Path, chat: bool) -> None:
    job = plan(tmp_path, EXTRA, chat)
    seen: list[dict[str, Any]] = []

    def reward(completions: Sequence[Any], **given: Any) -> list[float]:
        seen.append(given)
        return [1.0] * len(completions)

    config = runs.configuration(job, output_dir=str(tmp_path / "output"), save_strategy="no")
    loaded = load_policy(job.model, job.execution, job.adapter)
    prompts = load_prompts(job.dataset, job.training, loaded.tokenizer, root=tmp_path)
    rewards = RewardSet(list(job.rewards), ["own"], [reward], {"own": RewardCounters()})
    history = RunHistory(None, 1, job.samples)
    trainer = make_trainer(
        prompts, rewards, history, [], loaded=loaded, strategy=Clone(), args=config
    )
    trainer.train()
    assert trainer.state.global_step == 1
    (given,) = seen
    assert {name: given[name][0] for name in EXTRA} == EXTRA


@pytest.mark.parametrize("name", RESERVED)
def test_a_column_that_rewards_could_not_get_is_rejected(tmp_path: Path, name: str) -> None:
    job = plan(tmp_path, {name: "x"})
    with pytest.raises(
        BadInput, match=f"column '{name}' has a name that reward functions get something else by"
    ):
        load_prompts(job.dataset, job.training, tiny_tokenizer(), root=tmp_path)


def test_pictures_of_a_hub_dataset_stay_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fingerprint in every process, and no library that decodes them."""
    stored = {"bytes": b"\x89PNG", "path": None}
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "image": datasets.Image(),
            "images": datasets.List(datasets.Image()),
        }
        | {"parts": {"sound": datasets.Audio()}, "clip": datasets.Video()}
    )
    table = pa.table(
        {"prompt": ["say 1", "say 2"], "image": [stored] * 2, "images": [[stored]] * 2}
        | {"parts": [{"sound": stored}] * 2, "clip": [stored] * 2}
    )
    rows = datasets.Dataset(
        datasets.table.InMemoryTable(table.cast(features.arrow_schema)),
        datasets.DatasetInfo(features=features),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    spec = DatasetSpec.model_validate({"name": "some/pictures"})
    training = runs.plan(Path("/models/demo"), training={"promptsPerStep": 1}).training
    first, second = (load_prompts(spec, training, tiny_tokenizer()) for _ in range(2))
    assert first.rows[0]["image"] == stored
    assert first.rows[0]["images"] == [stored]
    assert first.rows[0]["parts"] == {"sound": stored}
    assert first.fingerprint == second.fingerprint
