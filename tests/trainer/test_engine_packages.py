"""vLLM for CPUs as the tests have it: complete beside the trainer's packages, shadowing none, its
weights plain; and without our plugin, which packs them.
"""

from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_api.report.metrics import VLLM
from harness.images.vllm_packages import engine_packages
from harness.images.wheels import site_packages
from tests.trainer.engine_names import GREEDY_LENGTH, GREEDY_PROMPTS
from tests.trainer.engine_runs import engine_run

pytestmark = pytest.mark.realtime

Facts = dict[str, Any]
HIDDEN, HEADS, KEY_HEADS, MIDDLE = 128, 4, 2, 176
UNUSED = {
    *("opencv-python-headless", "torchvision", "torchaudio", "torchcodec"),  # video and sound
    *("torch", "setuptools", "intel-openmp"),  # the trainer's torch and its own OpenMP; building
}
"""What vLLM for CPUs and its libraries ask for, and no engine of ours imports."""


def installed(folder: Path) -> dict[str, Distribution]:
    return {canonicalize_name(each.name): each for each in distributions(path=[str(folder)])}


def missing(engine: dict[str, Distribution], everything: dict[str, Distribution]) -> set[str]:
    """What the engine's distributions ask for, without extras, and no folder has in a version that
    they accept."""
    asked = [Requirement(line) for each in engine.values() for line in each.requires or []]
    wanted = [
        one
        for one in asked
        if one.marker is None or one.marker.evaluate({"python_version": "3.11", "extra": ""})
    ]
    found = {name: each.version for name, each in everything.items()}
    return {
        str(one)
        for one in wanted
        if not one.specifier.contains(found.get(canonicalize_name(one.name), ""))
    }


def test_the_engines_folder_has_what_the_trainers_lacks_and_nothing_else() -> None:
    engine, trainer = installed(engine_packages()), installed(site_packages())
    assert engine.keys() & trainer.keys() == set()
    assert {Requirement(line).name for line in missing(engine, trainer | engine)} <= UNUSED


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A model, and the folder in which it lies."""
    folder = tmp_path_factory.mktemp("packages")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=MIDDLE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)  # the best two tokens stand far apart
    model.save_pretrained(folder / "model")
    return model, folder


@pytest.fixture(scope="module")
def facts(made: tuple[LlamaForCausalLM, Path], vllm_cpu: dict[str, str]) -> Facts:
    """What engines make of it."""
    found: Facts = engine_run(
        "engine_tokens", made[1], vllm_cpu, VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_an_engine_on_cpus_samples_as_transformers_does(
    made: tuple[LlamaForCausalLM, Path], facts: Facts, kind: str
) -> None:
    assert facts[kind]["tokens"] == [greedy(made[0], ids) for ids in GREEDY_PROMPTS]


@pytest.mark.slow
def test_vllm_has_all_metrics_that_are_declared_of_it(facts: Facts) -> None:
    found = {name: (kind, labels) for name, (kind, labels, _) in facts["plain"]["metrics"].items()}
    assert found == {
        metric.name.removesuffix("_total"): (
            metric.kind,
            sorted([*metric.labels, *(["le"] if metric.kind == "histogram" else [])]),
        )
        for metric in VLLM
    }


@pytest.mark.slow
def test_with_the_plugin_weights_are_plain_tensors(facts: Facts) -> None:
    width = HIDDEN // HEADS
    shapes = facts["plain"]["shapes"]
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == [
        HIDDEN + 2 * KEY_HEADS * width,
        HIDDEN,
    ]
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == [2 * MIDDLE, HIDDEN]


@pytest.mark.slow
def test_packed_weights_read_back_through_their_kernels_are_the_checkpoints(
    made: tuple[LlamaForCausalLM, Path], facts: Facts
) -> None:
    packed = facts["packed"]
    assert packed["shapes"]["model.layers.0.mlp.gate_up_proj.weight"] == [0]
    matrices = {name for name, weight in made[0].named_parameters() if weight.dim() > 1}
    assert set(packed["read"]) == matrices - {"model.embed_tokens.weight"}
    assert packed["differing"] == []
    assert packed["flipped"] == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.slow
def test_packed_weights_are_refused_for_training_since_no_hash_reaches_them(facts: Facts) -> None:
    assert (
        "model.layers.0.mlp.gate_up_proj.weight: its values are packed away, where nothing can "
        "read them"
    ) in (facts["packed"]["problems"])


def greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {
        "max_new_tokens": GREEDY_LENGTH,
        "min_new_tokens": GREEDY_LENGTH,
        "do_sample": False,
    }
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
    return [int(token) for token in out[0, len(prompt) :]]
