"""Model folders that can't be used: a damaged tokenizer, a model of a kind that nobody knows."""

import json
from pathlib import Path

import pytest

from grpo_trainer.errors import BadInput
from grpo_trainer.weights.models import load_policy
from harness.ranks import demo_model, runs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return demo_model.save_policy(tmp_path / "model")


def test_a_damaged_tokenizer_is_rejected(model: Path) -> None:
    path = model / "tokenizer.json"
    path.write_text(path.read_text()[:-50])
    with pytest.raises(BadInput, match=r"model .*/model has no usable tokenizer: "):
        load_policy(runs.plan(model))


def test_a_model_of_an_unknown_kind_is_rejected(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mystery"}))
    with pytest.raises(BadInput, match=r"can't be loaded by AutoModelForCausalLM: .*mystery"):
        load_policy(runs.plan(model))
