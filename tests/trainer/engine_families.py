"""Tells, as JSON, what an engine of each kind of model says of its layout, and which weights a
proof finds to differ.

Run in a process of its own, with vLLM: `python -m tests.trainer.engine_families FOLDER MODEL_TYPE
…`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed
from vllm import LLM

from grpo_trainer.engine_pod.hash_check import differing_names, expected_prints
from grpo_trainer.engine_pod.vllm_arguments import EXTENSION
from grpo_trainer.generation.merged_weights import policy_weights, weight_shapes
from tests.trainer.engine_runs import FACTS

SIZES = {
    "vocab_size": 101,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
"""A vocabulary that vLLM pads; heads as small as its attention for CPUs takes them."""
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "decoder_sparse_step": 1},
    "deepseek_v2": {
        "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 9, "head_dim": 32, "num_key_value_heads": 4,
    },
}  # fmt: skip
SEED = 77


def model_of(kind: str, folder: Path, tied: bool) -> PreTrainedModel:
    """A tiny random model of this type, saved with its configuration."""
    set_seed(0)
    config = AutoConfig.for_model(
        kind, **(SIZES | EXTRA.get(kind, {}) | {"tie_word_embeddings": tied})
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


def engine(folder: Path) -> LLM:
    """Made without weights."""
    return LLM(
        model=str(folder), dtype="float32", load_format="dummy", skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=2**24,
        worker_extension_cls=EXTENSION,
    )  # fmt: skip


def facts(kind: str, folder: Path, tied: bool) -> dict[str, Any]:
    """Problems of the layout; and after a sync and after one flipped bit in every parameter, what
    differs."""
    model = model_of(kind, folder, tied)
    llm = engine(folder)

    def call(method: str, *arguments: Any) -> Any:
        return llm.collective_rpc(method, args=arguments)[0]

    sources, problems = call(
        "weights_learn", {k: list(v) for k, v in weight_shapes(model).items()}, "float32"
    )
    if problems:
        return {"problems": problems}
    wanted = {}
    for name, tensor in policy_weights(model, torch.float32):
        call("weights_load", name, tensor)
        wanted[name] = expected_prints(tensor, sources[name], SEED)
    live = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    synced = differing_names(wanted, call("weights_prints", SEED))
    missed = []
    for name, parameter in live.named_parameters():
        bits = parameter.data.view(-1).view(torch.int32)
        bits[bits.numel() // 2] ^= 1
        if not differing_names(wanted, call("weights_prints", SEED)):
            missed.append(name)
        bits[bits.numel() // 2] ^= 1
    return {
        "problems": [],
        "synced": synced,
        "missed": missed,
        "parameters": len(list(live.parameters())),
    }


if __name__ == "__main__":
    told, here = {}, Path(sys.argv[1])
    for number, wanted_kind in enumerate(sys.argv[2:]):
        name, _, variant = wanted_kind.partition(":")
        told[wanted_kind] = facts(name, here / str(number), variant == "tied")
    (here / FACTS).write_text(json.dumps(told))
