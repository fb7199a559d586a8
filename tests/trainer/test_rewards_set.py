"""RewardSet: names, weights, mounts and tokens by position, checks before training, and reward
models.

TRL takes rewards as parallel lists, where one that is out of step is wrong without an error.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.spec.rewards import RewardSpec
from grpo_api.text.contract import reward_mount, reward_token_env
from grpo_trainer.rewards.http_service import HTTPFunction
from grpo_trainer.rewards.reward_model import RewardModel
from grpo_trainer.rewards.reward_set import RewardSet, build_rewards
from grpo_trainer.runtime.errors import BadInput
from tests.support.ranks import demo_model

pytestmark = pytest.mark.realtime

ROWS = Dataset.from_list([{"prompt": "1+1=", "answer": "#### 2", "word": "two", "none": None}])


def rewards_of(*rewards: dict[str, Any], root: Path = Path("absent")) -> RewardSet:
    return build_rewards([RewardSpec.model_validate(reward) for reward in rewards], root=root)


def test_names_weights_and_functions_agree_by_position() -> None:
    rewards = rewards_of(
        {"format": {"pattern": "a"}, "weight": 0.5},
        {"accuracy": {}, "weight": -2},
        {"format": {"pattern": "b"}},
        {"name": "judge", "http": {"url": "http://judge/"}},
        {"http": {"url": "http://other/", "batchTimeoutSeconds": 40}},
    )
    assert rewards.names == ["format", "accuracy", "format_2", "judge", "http"]
    assert [function.__name__ for function in rewards.functions] == rewards.names
    assert rewards.weights == [0.5, -2, 1, 1, 1]
    assert rewards.processing_classes == [None] * 5
    assert list(rewards.counters) == rewards.names
    assert rewards.longest_seconds == 10 + 0 + 10 + max(300, 40), (
        "services are asked at the same time"
    )
    assert rewards.functions[2](completions=["b"]) == [1.0]


def test_files_and_tokens_are_found_by_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (reward_mount(1), reward_token_env(1)) == ("/rewards/1", "GRPO_REWARD_TOKEN_1")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine.py").write_text(
        "def one(completions, **kwargs):\n    return [1] * len(completions)\n"
    )
    python = {"python": {"function": "mine:one", "configMap": {"name": "mine"}}}
    rewards = rewards_of({"format": {"pattern": "a"}}, python, root=tmp_path)
    try:
        assert rewards.functions[1](prompts=["p"], completions=["c"]) == [1.0]
    finally:
        rewards.close()
        rewards.close()
    with pytest.raises(
        BadInput,
        match=r"reward 'python': python.function mine:one can't be imported: ModuleNotFound",
    ):
        rewards_of(python, root=tmp_path)
    monkeypatch.setenv(reward_token_env(0), "s3cret\n")
    (judge,) = rewards_of({"http": {"url": "http://judge/"}}).functions
    assert isinstance(judge, HTTPFunction)
    assert judge._headers == {"Authorization": "Bearer s3cret"}
    monkeypatch.setenv(reward_token_env(0), "s3\ncret")
    with pytest.raises(BadInput, match=r"reward 'http': the token .*store it as one line"):
        rewards_of({"http": {"url": "http://judge/"}})


@pytest.mark.parametrize(
    ("accuracy", "message"),
    [
        (
            {"answerColumn": "result"},
            r"'accuracy': column 'result' is not in the dataset; set accuracy.answerColumn to one",
        ),
        (
            {"answerColumn": "none"},
            r"column 'none', row 1 of those that are trained on: None is neither text nor a number",
        ),
        (
            {"answerColumn": "word", "compare": "Numeric"},
            r"row 1 .*'two' is not a number; set accuracy.compare to Exact",
        ),
    ],
)
def test_answers_are_checked_before_training(accuracy: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rewards_of({"accuracy": accuracy}).check_dataset(ROWS)


def test_a_missing_number_is_no_answer() -> None:
    rows = Dataset.from_list([{"answer": 1.0}, {"answer": float("nan")}])
    with pytest.raises(BadInput, match=r"row 2 of those that are trained on: the answer is empty"):
        rewards_of({"accuracy": {}}).check_dataset(rows)


def test_good_answers_pass_the_check() -> None:
    rewards_of(
        {"accuracy": {"compare": "Numeric"}}, {"accuracy": {"answerColumn": "word"}}
    ).check_dataset(ROWS)
    with pytest.raises(BadInput, match=r"row 2 of those that are trained on: the answer is empty"):
        rewards_of({"accuracy": {}}).check_dataset(
            Dataset.from_list([{"answer": "1"}, {"answer": "so\n####"}])
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_reward_model_is_frozen_and_scores_as_its_files_do(tmp_path: Path, dtype: str) -> None:
    folder = demo_model.save_reward_model(tmp_path / "judge")
    rewards = rewards_of(
        {"name": "judge", "model": {"name": str(folder), "dtype": dtype, "batchSize": 2}}
    )
    (model,) = rewards.functions
    assert isinstance(model, RewardModel)
    assert model.config._name_or_path == model.__name__ == "judge"
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    (tokenizer,) = rewards.processing_classes
    inputs = tokenizer(
        ["hello", "a", "rather longer"], return_tensors="pt", padding=True, padding_side="right"
    )
    expected = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    ).eval()
    expected.config.pad_token_id = tokenizer.pad_token_id
    with torch.inference_mode():
        logits = model(**inputs).logits
        assert logits.shape == (3, 1)
        assert logits.dtype == torch.float32
        tolerance = 1e-6 if dtype == "float32" else 2e-2
        torch.testing.assert_close(
            logits, expected(**inputs).logits.float(), atol=tolerance, rtol=tolerance
        )


def test_what_is_no_reward_model_is_bad_input(tmp_path: Path) -> None:
    two = demo_model.save_reward_model(tmp_path / "two", labels=2)
    with pytest.raises(BadInput, match="has 2 labels; a reward model has one"):
        rewards_of({"model": {"name": str(two)}})
    policy = demo_model.save_policy(tmp_path / "policy")
    with pytest.raises(BadInput, match=r"labels|lacks 1 weights, the first is score.weight"):
        rewards_of({"model": {"name": str(policy)}})
    with pytest.raises(BadInput, match="absent does not exist"):
        rewards_of({"model": {"name": str(tmp_path / "absent")}})


def test_a_reward_model_must_be_able_to_read_the_prompts(tmp_path: Path) -> None:
    folder = demo_model.save_reward_model(tmp_path / "judge")
    tiny_tokenizer(None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    rewards = rewards_of({"name": "judge", "model": {"name": str(folder)}})
    rewards.check_dataset(ROWS)
    with pytest.raises(
        BadInput,
        match="'judge': the prompts are chats but the reward model's tokenizer has no chat templ",
    ):
        rewards.check_dataset(
            Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}])
        )


def test_a_reward_model_is_rejected_where_it_would_load_partitioned(tmp_path: Path) -> None:
    folder = demo_model.save_reward_model(tmp_path / "judge")
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        with pytest.raises(AssertionError):
            rewards_of({"model": {"name": str(folder)}})
    finally:
        unset_hf_deepspeed_config()
        del zero3
