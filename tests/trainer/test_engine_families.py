"""Which kinds of models can be proven in an engine: every type of PROVEN_FAMILIES, by real vLLM,
and no other kind.

engine_families.py makes a tiny model of each, syncs it and flips a bit of every live parameter. One
process takes them all, those with experts first: vLLM sets up their groups once, with its first
model.
"""

from pathlib import Path
from typing import Any

import pytest

from grpo_api.spec.generation import PROVEN_FAMILIES
from tests.trainer.engine_runs import engine_run

pytestmark = pytest.mark.realtime

EXPERTS = ("qwen3_moe", "deepseek_v2")
FIRST = ["qwen3_moe", "llama:tied", "qwen2", "gemma2:tied", "phi3"]
TIED = ("gemma", "gemma2", "gemma3_text", "cohere2")
"""Types that vLLM has only with one weight for embedding and head."""
ALL = [*EXPERTS, *(f"{kind}:tied" if kind in TIED else kind for kind in PROVEN_FAMILIES)]


def facts(kinds: list[str], folder: Path, vllm: dict[str, str]) -> dict[str, Any]:
    """What engine_families.py tells of each."""
    found: dict[str, Any] = engine_run(
        "engine_families", folder, vllm, *kinds, VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    assert list(found) == kinds
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [FIRST, pytest.param(ALL, marks=pytest.mark.soak)], ids=["first", "all"]
)
def test_weights_of_proven_families_are_covered_whole_and_derived_layouts_are_refused(
    kinds: list[str], tmp_path: Path, vllm_cpu: dict[str, str]
) -> None:
    for kind, told in facts(kinds, tmp_path, vllm_cpu).items():
        if kind in EXPERTS:
            assert told["problems"]
            assert kind not in PROVEN_FAMILIES
        else:
            assert told["problems"] == told["synced"] == told["missed"] == [], kind
            assert told["parameters"] > 10
