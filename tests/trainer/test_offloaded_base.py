"""A frozen base that is in host memory while an engine is awake: it is really gone, comes back bit
for bit, and changes nothing of a training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from grpo_api.report.training_metrics import ENGINE_MISMATCH
from grpo_planner.memory import states
from grpo_planner.memory.setup import Engine, Setup
from grpo_trainer.generation import colocated
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.generation_base import EngineSetup, Sample
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.weights.models import load_policy
from grpo_trainer.weights.offloaded_base import OffloadedBase
from tests.support.facts.reference_facts import whole
from tests.support.ledger.config_shapes import from_config
from tests.support.ranks import demo_model, runs
from tests.trainer.test_engine_colocated import FakeEngine

STEPS = 3


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """A model's folder; afterwards no parallelism is left."""
    yield demo_model.save_policy(tmp_path / "model")
    runs.reset()


def frozen(policy: nn.Module) -> list[nn.Parameter]:
    """The base's parameters."""
    return [parameter for parameter in policy.parameters() if not parameter.requires_grad]


def storages(parameters: list[nn.Parameter]) -> list[Any]:
    """Their memory, without keeping it."""
    reference: Any = StorageWeakRef
    return [reference(parameter.untyped_storage()) for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_leaves_its_memory_and_comes_back_bit_for_bit(
    model: Path, dtype: torch.dtype
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    policy = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    # A NaN has many bit patterns, and equals nothing by value.
    frozen(policy)[0].data.view(-1)[0] = float("nan")
    before = {
        name: one.detach().view(torch.uint8).clone() for name, one in policy.named_parameters()
    }
    offloaded_base = OffloadedBase(policy)
    for _ in range(2):
        at_first = storages(frozen(policy))
        offloaded_base.move_to_host()
        offloaded_base.move_to_host()
        assert all(storage.expired() for storage in at_first)
        (shared,) = {one.untyped_storage().data_ptr() for one in frozen(policy)}
        offloaded_base.move_to_device()
        assert shared not in {one.untyped_storage().data_ptr() for one in policy.parameters()}
    after = {name: one.detach().view(torch.uint8) for name, one in policy.named_parameters()}
    assert all(torch.equal(after[name], one) for name, one in before.items())


class Sampling(ColocatedGeneration):
    """A colocated engine whose completions come from the weights that it was sent."""

    def __init__(self, setup: EngineSetup, model: nn.Module, stop_tokens: list[int]) -> None:
        self.device_bytes: list[int] = []
        self.lost: list[bool] = []
        super().__init__(setup, model, stop_tokens)
        self.sampler = AutoModelForCausalLM.from_pretrained(setup.folder).eval()
        self.at_rest = storages(frozen(model))

    @torch.no_grad()
    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        arguments: dict[str, Any],  # noqa: ARG002 - those of vLLM
        **_: Any,
    ) -> list[Sample]:
        """Draw a few tokens for each prompt, and note what the policy takes meanwhile."""
        self.lost.append(all(storage.expired() for storage in self.at_rest))
        base = self.offloaded_base
        host = base._memory.untyped_storage().data_ptr() if base else None
        every = {one.untyped_storage().data_ptr(): one for one in self.model.parameters()}
        self.device_bytes.append(sum(one.nbytes for at, one in every.items() if at != host))
        self.sampler.load_state_dict(self._llm.weights, strict=False)
        return [self._draw(list(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _draw(self, tokens: list[int], seed: int) -> Sample:
        assert self.proven_version is not None
        generator = torch.Generator().manual_seed(seed)
        drawn, logprobs = [], []
        for _ in range(runs.COMPLETION):
            scores = self.sampler(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            tokens = [*tokens, token]
            drawn.append(token)
            logprobs.append(float(scores[token]))
            if token in self.stop_tokens:
                break
        return Sample(drawn, logprobs, self.proven_version)

    def release_memory(self) -> None:
        """Also note where the base is while the policy is trained."""
        super().release_memory()
        self.at_rest = storages(frozen(self.model))


def trained(
    model: Path, *, offload: bool = False, correction: str = "none", dropout: float = 0.0
) -> dict[str, Any]:
    """What a LoRA training logged and completed, with its weights, and what its policy took."""
    settings = {
        "kind": "Colocated", "memoryShare": 0.1, "maxModelLength": 64, "maxSequences": 8,
        "offloadBase": offload,
    }  # fmt: skip
    job = runs.plan(
        model, "Adapter", training={"maxSteps": STEPS, "importanceSampling": {"mode": correction}},
        execution={"engine": settings}, adapter={"dropout": dropout},
    )  # fmt: skip
    setup = EngineSetup(job, model, PhaseClock(lambda: 0.0), lambda _: None, lambda: None)
    scored: list[str] = []

    def reward(completions: list[str], **more: Any) -> list[float]:
        scored.extend(completions)
        return runs.digits(completions, **more)

    logs = runs.Logs()
    config = runs.configuration(
        job, output_dir=str(model.parent / "output"), save_strategy="no", logging_steps=1
    )
    trainer = runs.trainer(
        job, config, load_policy(job.model, job.execution, job.adapter), logs, rewards=reward,
        make_engine=lambda policy, stop: Sampling(setup, policy, stop),
    )  # fmt: skip
    trainer.train()
    engine = trainer.engine
    assert isinstance(engine, Sampling)
    return {
        "rows": logs.numbers(1, STEPS),
        "mismatches": [
            row[ENGINE_MISMATCH.trl] for row in logs.rows.values() if ENGINE_MISMATCH.trl in row
        ],
        "completions": scored,
        "weights": whole(trainer.model),
        "device_bytes": engine.device_bytes,
        "lost": engine.lost,
    }


def test_a_training_whose_base_waits_in_host_memory_has_the_same_digits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number, completion and weight; the engine has the policy's weights, and the policy
    takes the predicted bytes less meanwhile."""
    monkeypatch.setattr(colocated, "_start_engine", lambda _: FakeEngine())
    plain, offloaded = (trained(model, offload=offload) for offload in (False, True))
    for facts in ("rows", "completions", "mismatches"):
        assert plain[facts] == offloaded[facts]
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, offloaded["weights"][name]), name
    assert max(plain["mismatches"]) < 1e-5
    assert not any(plain["lost"])
    assert all(offloaded["lost"])
    assert len(offloaded["lost"]) > STEPS, "canaries are sampled, too"
    shape = from_config(AutoModelForCausalLM.from_pretrained(model).config.to_dict())
    setup = Setup(
        precision="float32", prompt=8, completion=8, micro_batch=8, lora_rank=4,
        engine=Engine(kind="Colocated", length=64, sleeps=True, offloads_base=True),
    )  # fmt: skip
    assert shape is not None
    resting = states.weights(shape, setup)
    assert set(plain["device_bytes"]) == {resting}
    assert set(offloaded["device_bytes"]) == {resting - states.offloaded_base(shape, setup)}


def test_dropout_of_the_adapter_is_no_difference_from_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which samples without it, as no run of guard.maxEngineMismatch may end by it."""
    monkeypatch.setattr(colocated, "_start_engine", lambda _: FakeEngine())
    mismatches = trained(model, correction="mask", dropout=0.3)["mismatches"]
    assert len(mismatches) == STEPS
    assert max(mismatches) < 1e-5
