"""The reference strategies in one process: what each builds, leaves alone, rejects and restores.

Every trainer is TRL's own, on a tiny model. test_reference_gang.py compares the strategies under
several parallelisms.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from trl.trainer.utils import use_adapter

from grpo_trainer.reference.strategies import (
    Adapter,
    NoReference,
    Sharded,
    evaluating,
    is_adapter_disabled,
    on_device,
    strategy_for,
)
from grpo_trainer.runtime.errors import TrainingError
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.models import load_policy
from grpo_trainer.weights.offloaded_base import ALIGNMENT
from tests.support.facts.reference_facts import disturb, score, whole
from tests.support.ranks import demo_model, runs

SYNC = {"sync": {"everySteps": 2, "mixup": 0.25}}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    runs.reset()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return demo_model.save_policy(tmp_path / "model")


def build(
    model: Path, strategy: str = "Clone", *callbacks: Any, **arguments: Any
) -> ReferenceGRPOTrainer:
    job = runs.plan(model, strategy, **arguments)
    return runs.build(job, *callbacks, output_dir=str(model.parent / "output"), save_strategy="no")


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def pointers(module: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


@pytest.mark.parametrize("strategy", ["Clone", "Offload"])
def test_the_copy_is_the_start_weights_frozen_in_eval_and_apart(model: Path, strategy: str) -> None:
    trainer = build(model, strategy)
    start = whole(trainer.model)
    reference = trainer.ref_model
    assert equal(whole(reference), start)
    assert not any(module.training for module in reference.modules())
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert set(pointers(trainer.model)).isdisjoint(pointers(reference))
    disturb(trainer.model)
    assert equal(whole(reference), start)
    assert score(trainer, reference) != score(trainer, trainer.model)


@pytest.mark.parametrize("strategy", ["Clone", "Offload"])
def test_a_tied_embedding_stays_tied_in_the_copy(model: Path, strategy: str) -> None:
    reference = build(model, strategy).ref_model
    assert reference.lm_head.weight is reference.model.embed_tokens.weight


def test_an_offloaded_copy_takes_no_more_of_the_host_than_its_weights(model: Path) -> None:
    """torch's page-locked memory of a tensor is a power of two, up to twice its bytes."""
    parameters = list(build(model, "Offload").ref_model.parameters())
    (memory,) = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    size = parameters[0].untyped_storage().nbytes()
    assert memory
    assert size <= sum(parameter.nbytes + ALIGNMENT for parameter in parameters)


def test_neither_policy_nor_reference_drops_out(tmp_path: Path) -> None:
    trainer = build(demo_model.save_policy(tmp_path / "model", dropout=0.5))
    assert trainer.args.disable_dropout
    assert trainer.model.config.attention_dropout == 0.5, (
        "the exported configuration is the model's own"
    )
    trainer.model.train()
    assert (
        score(trainer, trainer.ref_model)
        == score(trainer, trainer.model)
        == score(trainer, trainer.model)
    )


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """There is no second device here: moves to one with non_blocking become clones, and are
    recorded."""
    moves: list[torch.device] = []
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("non_blocking"):
            return real(tensor, *args, **kwargs)
        moves.append(args[0])
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    return moves


def test_offload_brings_the_copy_in_for_its_own_passes_only(
    model: Path, other_device: list[torch.device]
) -> None:
    trainer = build(model, "Offload")
    home = pointers(trainer.ref_model)
    score(trainer, trainer.model)
    assert other_device == []
    score(trainer, trainer.ref_model)
    assert other_device == [trainer.accelerator.device] * len(home)
    assert pointers(trainer.ref_model) == home


def test_offload_returns_home_after_an_exception(other_device: list[torch.device]) -> None:
    layer = nn.Linear(2, 2)
    home = pointers(layer)

    def failing() -> None:
        with on_device(layer, torch.device("cuda")):
            assert set(pointers(layer)).isdisjoint(home)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        failing()
    assert other_device == [torch.device("cuda")] * 2
    assert pointers(layer) == home


def test_adapter_has_no_second_model_and_scores_with_the_base(model: Path) -> None:
    trainer = build(model, "Adapter")
    assert trainer.ref_model is None
    assert isinstance(trainer.model, PeftModel)
    job = runs.plan(model)
    policy = load_policy(job.model, job.execution, job.adapter).model
    base = sum(parameter.numel() for parameter in policy.parameters())
    adapters = sum(p.numel() for name, p in trainer.model.named_parameters() if "lora_" in name)
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) == base + adapters
    disturb(trainer.model)
    with use_adapter(trainer.model, None):
        reference = score(trainer, trainer.model)
    runs.reset()
    clone = build(model, "Clone")
    assert reference == score(clone, clone.ref_model)


def test_adapter_off_nests_survives_exceptions_and_restores_modes(tmp_path: Path) -> None:
    trainer = build(
        demo_model.save_policy(tmp_path / "model", dropout=0.5), "Adapter", adapter={"dropout": 0.5}
    )
    disturb(trainer.model)
    model = trainer.model
    model.train()
    model.get_base_model().model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}

    def failing() -> None:
        with use_adapter(model, None), trainer.strategy.scoring(trainer, model):
            with use_adapter(model, None), evaluating(model):
                assert is_adapter_disabled(model)
            assert is_adapter_disabled(model)
            assert not any(module.training for module in model.modules())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        failing()
    assert not is_adapter_disabled(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    with use_adapter(model, None):
        assert score(trainer, model) == score(trainer, model)  # no dropout in the reference
    assert score(trainer, model) != score(
        trainer, model
    )  # the adapter's own, which the plan asks for


def test_none_trains_without_a_reference(model: Path) -> None:
    logs = runs.Logs()
    trainer = build(model, "None", logs, training={"beta": 0.0, "maxSteps": 2})
    trainer.train()
    assert trainer.ref_model is None
    assert all("kl" not in row for row in logs.rows.values())


def test_trl_asking_for_a_second_model_is_an_error(model: Path) -> None:
    for strategy in (Adapter(), NoReference()):
        with pytest.raises(TrainingError, match="TRL asked for"):
            strategy.build(build(model))


def test_offload_under_zero3_shards_into_host_memory(model: Path) -> None:
    job = runs.plan(model, "Offload", zero=3)
    strategy = strategy_for(
        job.execution, job.reference, trust_remote_code=job.model.trust_remote_code
    )
    assert isinstance(strategy, Sharded)
    assert (
        strategy.config({"zero_optimization": {}})["zero_optimization"]["offload_param"]["device"]
        == "cpu"
    )


def test_sharded_offload_reaches_deepspeeds_config() -> None:
    policy = {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}
    job = runs.plan(Path("/m"), "Sharded", 3, reference={"offload": {}})
    strategy = strategy_for(
        job.execution, job.reference, trust_remote_code=job.model.trust_remote_code
    )
    assert isinstance(strategy, Sharded)
    zero = strategy.config(policy)["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert Sharded().config(policy)["zero_optimization"] == {"stage": 3}
    assert policy["zero_optimization"]["offload_param"] == {"device": "none"}
