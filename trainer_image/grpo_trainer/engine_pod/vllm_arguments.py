"""The plan's engine in vLLM's own words: arguments of LLM and AsyncEngineArgs, settings of
sampling, and seeds.

Both kinds of engines take these arguments. vLLM itself is not imported, so that a laptop can look
at them.

Every completion has a seed of its own. It depends on the job, the generation and the completion's
place in it, and on nothing else. Whichever engine samples it, at the first try or after a crash, in
this attempt or in one that resumed, it draws the same numbers.
"""

from pathlib import Path
from typing import Any, Literal

from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.spec.training import TrainingSpec

from .hash_check import mix_bits

SEEDS = 1 << 63
"""vLLM takes seeds below it."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples at no lower one but 0 (vllm/sampling_params.py, _MAX_TEMP): it takes this in its
place."""


def completion_seed(seed: int, generation: int, place: int) -> int:
    """Seed of one completion.

    Args:
        seed: spec.training.seed.
        generation: from 0, over the whole run.
        place: of the completion among those of all ranks, from 0.
    """
    return mix_bits(mix_bits(mix_bits(seed) ^ generation) ^ place) % SEEDS


def sampling_arguments(training: TrainingSpec, stop_tokens: list[int]) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams, beside the seed: one completion with its tokens'
    log-probabilities."""
    return {
        "n": 1,
        "temperature": training.temperature,
        "top_p": training.top_p,
        "top_k": training.top_k,
        "min_p": training.min_p or 0.0,
        "repetition_penalty": training.repetition_penalty,
        "max_tokens": training.max_completion_length,
        "stop_token_ids": stop_tokens,
        # Of the sampled token alone; a number would add the likeliest others.
        "logprobs": 0,
        "detokenize": False,
    }


def tokens_and_logprobs(output: Any) -> tuple[list[int], list[float]]:
    """Tokens of a completion as vLLM gives it, with the one that ended it, and the log-probability
    of each."""
    tokens = list(output.token_ids)
    return tokens, [
        step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)
    ]


def logprobs_mode(training: TrainingSpec) -> Literal["processed_logprobs", "raw_logprobs"]:
    """Which log-probabilities the engine tells, such that they are of the distribution that the
    trainer computes.

    Processed ones are taken after the temperature, as the trainer's, but also after top-p and its
    kin, which the trainer knows nothing of: the importance ratio would be biased by the cut (TRL
    issue 6789). Raw ones are taken before all of it, and so are the trainer's at temperature 1.
    """
    if training.truncation and training.temperature == 1:
        return "raw_logprobs"
    return "processed_logprobs"


BATCHED_TOKENS = 4096
"""Tokens of one pass: with vLLM's own default its profile at the start takes more memory than
sampling does (TRL 1.16, trl/generation/vllm_generation.py)."""
PRIVACY = {"VLLM_NO_USAGE_STATS": "1"}
"""Variables of every process with an engine, which the job may override: vLLM reports no usage
statistics."""
NO_VLLM = (
    "spec.image: this image has no vLLM, which spec.generation.engine needs; use an image of this "
    "version with vLLM, "
    "or set spec.generation.engine to Transformers"
)
EXTENSION = "grpo_trainer.engine_pod.weight_receiver.WeightsWorker"
"""The class with which vLLM's workers load and prove weights."""


def engine_dtype(execution: ExecutionPlan) -> Literal["bfloat16", "float32"]:
    """The engine's type, as torch names it: the one that the policy computes in."""
    return "bfloat16" if execution.autocast else execution.dtype


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
    # Dummy weights: the first sync brings the policy's. generation_config vllm: the model's own
    # file would change how completions are sampled.
    arguments = {
        "model": str(model),
        "dtype": engine_dtype(plan.execution),
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
