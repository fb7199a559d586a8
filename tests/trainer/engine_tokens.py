"""Greedy completions of a model by vLLM, and the shapes of its live weights, for test_engine_packages.py.

A process of its own: vllm can be imported only where PYTHONPATH has `engine_packages()`.
"""

import json
import os
from pathlib import Path
from typing import Any

PROMPTS = [[7, 30, 12], [3, 9, 27, 81, 5, 40], [60]]
LENGTH = 24


def shapes(model: Any) -> dict[str, list[int]]:
    """Shape of every parameter as it lies in the engine's process."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def main(folder: str) -> None:
    """Write engine.json into the model's folder; standard output is vLLM's."""
    from vllm import LLM, SamplingParams

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function of ours is sent to the engine's process
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 26}
    engine = LLM(model=folder, skip_tokenizer_init=True, max_num_seqs=4, **settings)
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy, use_tqdm=False)
    found = {"tokens": [list(each.outputs[0].token_ids) for each in outputs], "shapes": engine.apply_model(shapes)[0]}
    (Path(folder) / "engine.json").write_text(json.dumps(found))
