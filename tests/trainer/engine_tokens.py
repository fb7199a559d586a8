"""Tells, as JSON, what vLLM on CPUs makes of a checkpoint: greedy completions, and whether weights
that are packed for its kernels, as they are without our plugin, are still the checkpoint's. Run in
a process of its own, with vLLM: `python -m tests.trainer.engine_tokens FOLDER`, where FOLDER/model
has it.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as kernels
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.model_executor.layers import utils

from grpo_trainer.engine_pod.engine_metrics import EngineMetrics
from grpo_trainer.engine_pod.vllm_arguments import EXTENSION
from tests.trainer.engine_names import GREEDY_LENGTH, GREEDY_PROMPTS
from tests.trainer.engine_runs import FACTS

FLIPPED = "model.layers.1.mlp.up_proj.weight"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PACKS = {"_supports_onednn": (kernels, kernels._supports_onednn)}
PACKS |= {"check_cpu_sgl_kernel": (utils, utils.check_cpu_sgl_kernel)}
"""What the plugin turns off, as vLLM has it: kernels that want weights in a form of their own."""


def engine(folder: Path) -> LLM:
    """With the checkpoint's weights."""
    return LLM(
        model=str(folder), skip_tokenizer_init=True, max_num_seqs=4, dtype="float32",
        enforce_eager=True,
        max_model_len=64, kv_cache_memory_bytes=1 << 26, worker_extension_cls=EXTENSION,
        disable_log_stats=False,
    )  # fmt: skip


def tokens(llm: LLM) -> list[list[int]]:
    """The likeliest."""
    greedy = SamplingParams(
        temperature=0, max_tokens=GREEDY_LENGTH, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in GREEDY_PROMPTS], greedy, use_tqdm=False
    )
    return [list(each.outputs[0].token_ids) for each in outputs]


def metrics() -> dict[str, list[Any]]:
    """Kind, labels and number of series of what a page shows of the engine, by name."""
    return {
        family.name: [family.type, sorted(family.samples[0].labels), len(family.samples)]
        for family in EngineMetrics().collect()
    }


def live(llm: LLM) -> Any:
    """The engine's model."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def shapes(llm: LLM) -> dict[str, list[int]]:
    """Of every parameter as it lies in the engine."""
    return {name: list(parameter.shape) for name, parameter in live(llm).named_parameters()}


def computed(llm: LLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight of every linear layer as its kernel computes: what it makes of the identity
    matrix, turned."""
    for name, module in live(llm).named_modules():
        above, _, leaf = name.rpartition(".")
        if not hasattr(module, "quant_method") or leaf == "embed_tokens":
            continue
        width = module.embedding_dim if leaf == "lm_head" else module.input_size_per_partition
        turned = module.quant_method.apply(module, torch.eye(width), None).t()
        parts = getattr(module, "output_partition_sizes", None) or [len(turned)]
        for part, weight in zip(FUSED.get(leaf, (leaf,)), turned.split(list(parts)), strict=True):
            yield f"{above}.{part}.weight".lstrip("."), weight


def differing(llm: LLM, wanted: dict[str, torch.Tensor]) -> list[str]:
    """The weights that the kernels don't compute with; rows beyond the vocabulary are no
    weights."""
    return [
        name
        for name, found in computed(llm)
        if not torch.equal(found[: len(wanted[name])], wanted[name])
    ]


def packed(folder: Path) -> dict[str, Any]:
    """An engine with vLLM's own kernels, and one whose checkpoint differs in one bit."""
    for name, (module, original) in PACKS.items():
        setattr(module, name, original)
    wanted = load_file(folder / "model" / "model.safetensors")
    llm = engine(folder / "model")
    found: dict[str, Any] = {
        "tokens": tokens(llm),
        "shapes": shapes(llm),
        "differing": differing(llm, wanted),
    }
    sizes = {name: list(tensor.shape) for name, tensor in wanted.items()}
    found |= {"read": [name for name, _ in computed(llm)]}
    found["problems"] = llm.collective_rpc("weights_learn", args=(sizes, "float32"))[0][1]
    shutil.copytree(folder / "model", folder / "flipped")
    other = {name: tensor.clone() for name, tensor in wanted.items()}
    other[FLIPPED].view(torch.int32)[5, 7] ^= 1
    save_file(other, folder / "flipped" / "model.safetensors", metadata={"format": "pt"})
    return found | {"flipped": differing(engine(folder / "flipped"), wanted)}


def main(folder: Path) -> None:
    """Plain, then packed: the plugin, which vLLM calls before its first model, is called once in a
    process."""
    plain = engine(folder / "model")
    found = {"tokens": tokens(plain), "shapes": shapes(plain), "metrics": metrics()}
    (folder / FACTS).write_text(json.dumps({"plain": found, "packed": packed(folder)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
