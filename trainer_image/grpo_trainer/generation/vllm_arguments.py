"""The plan's engine in vLLM's own words: arguments of LLM and AsyncEngineArgs, the same for both kinds, and what else
both need of vLLM.

Without vLLM itself, so that a laptop can look at them.
"""

from pathlib import Path
from typing import Any, Literal

from grpo_api.plan.plan import TrainingPlan

from .sampling import logprobs_mode

BATCHED_TOKENS = 4096
"""Tokens of one pass: with vLLM's own default its profile at the start takes more memory than sampling does (TRL 1.16,
trl/generation/vllm_generation.py)."""
PRIVACY = {"VLLM_NO_USAGE_STATS": "1"}
"""Variables of every process with an engine, which the job may override: vLLM reports no usage statistics."""
NO_VLLM = (
    "spec.image: this image has no vLLM, which spec.generation.engine needs; use an image of this version with vLLM, "
    "or set spec.generation.engine to Transformers"
)
EXTENSION = "grpo_trainer.generation.worker_extension.WeightsWorker"
"""The class with which vLLM's workers load and prove weights."""


def engine_dtype(plan: TrainingPlan) -> Literal["bfloat16", "float32"]:
    """The engine's type, as torch names it: the one that the policy computes in."""
    return "bfloat16" if plan.execution.autocast else plan.execution.dtype


def vllm_arguments(plan: TrainingPlan, model: Path) -> dict[str, Any]:
    """Keyword arguments for an engine of this plan that begins without weights.

    Args:
        plan: one with an engine.
        model: folder of its configuration.
    """
    engine, on_gpu = plan.execution.engine, plan.execution.accelerator == "GPU"
    assert engine is not None
    own = plan.generation.engine_arguments
    may_sleep = engine.sleep and on_gpu
    # Dummy weights: the first sync brings the policy's. generation_config vllm: the model's own file would change how
    # completions are sampled.
    arguments = {
        "model": str(model),
        "dtype": engine_dtype(plan),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": plan.model.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel,
        "gpu_memory_utilization": engine.memory_share,
        "kv_cache_memory_bytes": engine.cache_bytes or None,
        "max_model_len": engine.max_model_length,
        "max_num_seqs": engine.max_sequences,
        "max_num_batched_tokens": max(BATCHED_TOKENS, engine.max_sequences),
        # CPUs have no CUDA graphs.
        "enforce_eager": not on_gpu,
        "enable_sleep_mode": may_sleep,
        "logprobs_mode": logprobs_mode(plan.training),
        "seed": 0,
        "worker_extension_cls": EXTENSION,
    }
    return arguments | (own.model_dump(exclude_none=True, by_alias=False) if own else {})
