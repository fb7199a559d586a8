"""A reference that moves, is saved and comes back, and the states that everything must be in.

In one process; test_reference_gang.py has several.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grpo_api.spec.rewards import ModelReward
from grpo_trainer.gang import ranks
from grpo_trainer.reference import reference_state, strategies
from grpo_trainer.rewards.reward_base import RewardCounters
from grpo_trainer.rewards.reward_model import RewardModel
from grpo_trainer.runtime.errors import BadInput, TrainingError, WeightsDiffer
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights import parameters
from grpo_trainer.weights.models import load_policy, load_reward_model
from grpo_trainer.weights.policy_checks import check_states
from tests.support.facts.reference_facts import disturb, whole
from tests.support.ranks import demo_model, runs

SYNC = {"sync": {"everySteps": 2, "mixup": 0.25}}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    runs.reset()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return demo_model.save_policy(tmp_path / "model")


def build(model: Path, *callbacks: Any, **arguments: Any) -> ReferenceGRPOTrainer:
    job = runs.plan(model, **arguments)
    return runs.build(job, *callbacks, output_dir=str(model.parent / "output"), save_strategy="no")


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("tied", [True, False])
def test_sync_mixes_every_parameter_once(tmp_path: Path, tied: bool) -> None:
    trainer = build(demo_model.save_policy(tmp_path / "model", tied=tied), reference=SYNC)
    before = whole(trainer.ref_model)
    disturb(trainer.model)
    trainer.strategy.move(trainer)
    policy = whole(trainer.model)
    expected = {name: before[name].mul(0.75).add(policy[name], alpha=0.25) for name in before}
    assert equal(whole(trainer.ref_model), expected)


def test_sync_rejects_models_that_do_not_match() -> None:
    with pytest.raises(AssertionError):
        strategies.mix_weights(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), 0.5)
    with pytest.raises(AssertionError, match="weight"):
        strategies.mix_weights(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False), 0.5)


def test_full_mixup_at_every_step_keeps_the_kl_at_zero(model: Path) -> None:
    logs = runs.Logs()
    build(model, logs, reference={"sync": {"everySteps": 1, "mixup": 1.0}}).train()
    assert [logs.rows[step]["kl"] for step in range(1, 7)] == [0.0] * 6


def test_only_a_moved_reference_is_saved(model: Path, tmp_path: Path) -> None:
    trainer = build(model)
    trainer.strategy.save(trainer, tmp_path / "checkpoint")
    assert [path.name for path in (tmp_path / "checkpoint" / reference_state.FOLDER).iterdir()] == [
        reference_state.IDENTITY
    ]


def test_a_checkpoint_of_other_start_weights_is_rejected(tmp_path: Path) -> None:
    first = build(demo_model.save_policy(tmp_path / "model"))
    first.strategy.save(first, tmp_path / "checkpoint")
    first.strategy.restore(first, tmp_path / "checkpoint")
    runs.reset()
    second = build(demo_model.save_policy(tmp_path / "model", seed=1))
    with pytest.raises(BadInput, match=f"{first.start}, now {second.start}"):
        second.strategy.restore(second, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"rms_norm_eps": 0.5}),
        ("generation_config.json", {"eos_token_id": [1, 7]}),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
    ],
)
def test_a_model_whose_files_beside_the_weights_have_changed_is_not_continued(
    tmp_path: Path, file: str, change: dict[str, Any]
) -> None:
    folder = demo_model.save_policy(tmp_path / "model")
    first = build(folder)
    checkpoint = tmp_path / "checkpoint"
    first.strategy.save(first, checkpoint)
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | change))
    first.strategy.restore(first, checkpoint)  # it has what it was loaded from
    runs.reset()
    second = build(folder)
    with pytest.raises(BadInput, match=r"the model's config\.json, .* has changed since"):
        second.strategy.restore(second, checkpoint)
    identity = checkpoint / reference_state.FOLDER / reference_state.IDENTITY
    saved = json.loads(identity.read_text())
    del saved["configuration"]  # as an earlier image has it
    identity.write_text(json.dumps(saved))
    second.strategy.restore(second, checkpoint)


def test_ranks_with_other_files_beside_the_same_weights_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model.save_policy(tmp_path / "model")
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine, mine, "other"])
    with pytest.raises(WeightsDiffer, match="the tokenizer on rank 2 is another than on rank 0"):
        reference_state.shared_configuration(folder)


def test_a_resumed_policy_is_proven_against_the_checkpoint(model: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "output")
    settings = {"output_dir": folder, "save_strategy": "steps", "save_steps": 3}
    runs.build(runs.plan(model), **settings).train()
    runs.reset()
    trainer: Any = runs.build(runs.plan(model), **settings)
    load = trainer._load_from_checkpoint

    def damaged(checkpoint: str, *arguments: Any) -> None:
        load(checkpoint, *arguments)
        with torch.no_grad():
            trainer.model.get_parameter("model.norm.weight")[0] += 1e-3

    trainer._load_from_checkpoint = damaged
    with pytest.raises(WeightsDiffer, match=r"resumed policy: parameter model\.norm\.weight"):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")


def test_a_saved_reference_is_restored_and_proven(model: Path, tmp_path: Path) -> None:
    trainer = build(model, reference=SYNC)
    disturb(trainer.ref_model.requires_grad_(True))
    moved = whole(trainer.ref_model.requires_grad_(False))
    trainer.strategy.save(trainer, tmp_path)
    disturb(trainer.ref_model.requires_grad_(True))
    trainer.strategy.restore(trainer, tmp_path)
    assert equal(whole(trainer.ref_model), moved)
    path = next(tmp_path.rglob("reference.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsDiffer, match="saved was"):
        trainer.strategy.restore(trainer, tmp_path)


def test_states_are_checked_not_assumed(model: Path, tmp_path: Path) -> None:
    reward = demo_model.save_reward_model(tmp_path / "reward")
    job = runs.plan(model, training={"maxSteps": 1})
    config = runs.configuration(job, output_dir=str(tmp_path / "output"), save_strategy="no")
    spec = ModelReward(name=str(reward), dtype="float32")
    judge = RewardModel("judge", load_reward_model(spec), 8, RewardCounters(), "cpu")
    rewards = [runs.digits, judge]
    loaded = load_policy(job.model, job.execution, job.adapter)
    trainer = runs.trainer(
        job, config, loaded, rewards=rewards, reward_tokenizers=[None, judge.tokenizer]
    )
    trainer.train()
    check_states(trainer)
    layer = trainer.ref_model.model.layers[0]
    score_head = judge.model.get_parameter("score.weight")
    norm = trainer.model.model.norm.weight
    group = trainer.optimizer.param_groups[0]["params"]

    def wrong(message: str, do: Any, undo: Any) -> None:
        do()
        with pytest.raises(TrainingError, match=message):
            check_states(trainer)
        undo()
        check_states(trainer)

    wrong(r"layers\.0.* reference is in train mode", layer.train, layer.eval)
    wrong(
        r"layers\.0.* reference requires a gradient",
        lambda: layer.requires_grad_(True),
        lambda: layer.requires_grad_(False),
    )
    wrong(
        r"score\.weight of the reward model 1 has a gradient",
        lambda: setattr(score_head, "grad", torch.zeros_like(score_head)),
        lambda: setattr(score_head, "grad", None),
    )
    wrong(r"of the reward model 1 is in the optimizer", lambda: group.append(score_head), group.pop)
    wrong(
        "no parameter of the policy",
        lambda: trainer.model.requires_grad_(False),
        lambda: trainer.model.requires_grad_(True),
    )
    kept = trainer.optimizer.param_groups
    without = [[p for p in g["params"] if p is not norm] for g in kept]
    lists = [g["params"] for g in kept]
    wrong(
        r"norm\.weight requires a gradient, but the optimizer",
        lambda: [g.update(params=p) for g, p in zip(kept, without, strict=True)],
        lambda: [g.update(params=p) for g, p in zip(kept, lists, strict=True)],
    )


def test_a_share_is_the_parameters_own_memory() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    with parameters.local_share(parameter) as share:
        share.tensor.fill_(2.0)
        assert (share.start, share.stop, share.shape, share.is_whole) == (0, 6, (2, 3), True)
    assert parameter.detach().eq(2.0).all()
