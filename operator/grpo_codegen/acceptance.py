"""Data of the acceptance run, which may import neither the planner nor know the repository: pins
and predictions.

Each term of the memory model that grows with a model's size decides in one of the nine
configurations. They have 0.5 to 7 billion parameters, tied and separate heads, and two precisions.
Some train without gradient checkpointing, and some train an adapter.
"""

import json
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_planner.memory.phases import MARGIN, WORKSPACES, device_bytes, predict
from grpo_planner.memory.setup import Precision, Setup
from grpo_planner.model import catalogue

ROOT = Path(__file__).parents[2]
NATIVE = ("numpy", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "pydantic-core", "tokenizers", "triton")
"""Packages that no requirement of ours names and that decide what runs on a GPU."""
ACCUMULATION = 2
GENERATED = 4
"""Completions generated at a time, in micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of the memory check."""

    model: str
    family: str
    micro_batch: int
    prompt: int
    completion: int
    precision: Precision = "bfloat16"
    checkpointing: bool = True
    lora_rank: int = 0


_HALF = Case(model="qwen2.5-0.5b", family="qwen2", micro_batch=4, prompt=256, completion=256)
_SMALL = Case(model="qwen2.5-1.5b", family="qwen2", micro_batch=8, prompt=512, completion=512)
_LARGE = replace(_SMALL, model="qwen2.5-7b")
CASES = (
    _HALF,
    replace(_HALF, checkpointing=False),
    replace(_HALF, precision="mixed"),
    _SMALL,
    replace(_SMALL, precision="mixed"),
    replace(_HALF, model="llama-3.2-1b", family="llama", completion=512, checkpointing=False),
    replace(_SMALL, lora_rank=16),
    replace(_LARGE, micro_batch=4),
    replace(_LARGE, lora_rank=16),
)


def predictions() -> str:
    """predictions.json: every case with its model's widths and its predicted bytes, by phase and on
    the device."""
    return json.dumps([_predicted(case) for case in CASES], indent=1) + "\n"


def _predicted(case: Case) -> dict[str, Any]:
    shape = catalogue.shapes()[case.model]
    setup = Setup(
        precision=case.precision,
        prompt=case.prompt,
        completion=case.completion,
        micro_batch=case.micro_batch,
        accumulation=ACCUMULATION,
        generation_batch=GENERATED * case.micro_batch,
        lora_rank=case.lora_rank,
        checkpointing=case.checkpointing,
        # one that needs no weights of its own: what counts here is what the pass adds
        reference="Adapter",
    )
    prediction = predict(shape, setup, WORKSPACES)
    widths = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }
    return asdict(case) | {
        "accumulation": ACCUMULATION,
        "generation_batch": setup.generation_batch,
        "config": widths,
        "phases": prediction.phases,
        "device_bytes": device_bytes(prediction, 1, MARGIN["Exact"], expandable=True),
    }


def pins() -> str:
    """pins.json: the image's version of each package that the trainer names, and of the native ones
    below them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        _name(requirement)
        for requirement in (*project["dependencies"], *project["optional-dependencies"]["trainer"])
    }
    pinned = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line
    )
    pins = {name: pinned[name] for name in sorted({*named, *NATIVE}) if name in pinned}
    return json.dumps(pins, indent=1) + "\n"


def _name(requirement: str) -> str:
    """The package of a requirement such as `torch>=2.11`, as constraints.txt spells it."""
    return requirement.partition(">")[0].partition("=")[0].strip().lower()
