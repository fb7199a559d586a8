"""The plan's engine in vLLM's own words: arguments of LLM and AsyncEngineArgs, settings of
sampling, and seeds.

Both kinds of engines take these arguments. vLLM itself is not imported, so that a laptop can look
at them.

Every completion has a seed of its own. It depends on the job, the generation and the completion's
place in it, and on nothing else. Whichever engine samples it, at the first try or after a crash, in
this attempt or in one that resumed, it draws the same numbers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.generation import EngineArguments, EnginePlan, GenerationSpec
from grpo_api.spec.keyword_arguments import PENALTIES
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.contract import ALLOCATOR_ENV, EXPANDABLE_SEGMENTS, has_hidden_segments

from ..runtime.errors import BadInput
from .hash_check import SEEDS, mix_bits


def completion_seed(seed: int, generation: int, place: int) -> int:
    """Seed of one completion: of spec.training.seed, its generation (from 0, over the whole run)
    and its place (from 0) among those of all ranks."""
    # vLLM takes seeds below 2**63 as well.
    return mix_bits(mix_bits(mix_bits(seed) ^ generation) ^ place) % SEEDS


def is_truncated(training: TrainingSpec, generation: GenerationSpec) -> bool:
    """Whether completions are sampled from another distribution than the policy's at the
    temperature; each argument of vLLM in generation.kwargs makes it another one."""
    return bool(training.truncation or generation.kwargs)


def sampling_arguments(
    training: TrainingSpec, generation: GenerationSpec, stop_tokens: list[int]
) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams, beside the seed: one completion with its tokens'
    log-probabilities."""
    arguments = {
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
    if generation.stop:
        # Special tokens are text: one such as <|im_end|> may be a stop string.
        arguments |= {"stop": generation.stop, "detokenize": True, "skip_special_tokens": False}
    if is_truncated(training, generation):
        # The temperature is in the logits (see logits_temperature).
        scaled = _scale_penalties(generation.kwargs or {}, training.temperature)
        arguments |= {"temperature": 1.0, **scaled}
    return arguments


def _scale_penalties(kwargs: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """Arguments as they act on logits that are divided by the temperature: vLLM subtracts these
    penalties from logits that are not."""
    return {
        name: value / temperature if name in PENALTIES else value for name, value in kwargs.items()
    }


def is_tokenizer_needed(generation: GenerationSpec) -> bool:
    """Whether the engine itself has to turn tokens into text, or text into tokens."""
    return bool(generation.stop) or "bad_words" in (generation.kwargs or {})


def tokens_and_logprobs(output: Any) -> tuple[list[int], list[float]]:
    """Tokens of a completion as vLLM gives it, with the one that ended it, and the log-probability
    of each.

    Raises:
        RuntimeError: the completion was cut off.
    """
    # AsyncLLM returns what an abort or an internal error has cut off as it returns whole ones;
    # vLLM's own server makes HTTP 500 of it (v1/engine, FinishReason).
    if output.finish_reason in ("abort", "error"):
        raise RuntimeError(f"vLLM cut a completion off: finish_reason {output.finish_reason}")
    tokens = list(output.token_ids)
    return tokens, [
        step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)
    ]


LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
AFTER_SAMPLER: LogprobsMode = "processed_logprobs"


def logprobs_mode(training: TrainingSpec, generation: GenerationSpec) -> LogprobsMode:
    """Which log-probabilities the engine returns, such that they are of the distribution that the
    trainer computes.

    Processed ones are taken after the temperature, as the trainer's, but also after top-p and its
    kin, which the trainer does not apply: each token's importance ratio would be the probability
    mass of the kept tokens, 0.896 in the mean at top-p 0.8 (TRL issue 6789). Raw ones are taken
    before all of it.
    """
    return "raw_logprobs" if is_truncated(training, generation) else AFTER_SAMPLER


LOGITS_TEMPERATURE = "grpo_logits_temperature"
"""Key of vLLM's additional_config: WeightsWorker divides all logits by this temperature."""


def logits_temperature(training: TrainingSpec, generation: GenerationSpec) -> dict[str, float]:
    """vLLM's additional_config: the temperature of a truncated distribution.

    vLLM takes raw log-probabilities before the temperature, and the trainer computes its own after
    it. So the engine's model divides its logits, and requests are sampled at temperature 1. Top-k,
    top-p and min-p follow the temperature in vLLM. A repetition penalty multiplies or divides a
    logit by its sign, so that it commutes with the temperature.
    """
    if not is_truncated(training, generation) or training.temperature == 1:
        return {}
    return {LOGITS_TEMPERATURE: training.temperature}


ENGINE_ENVIRONMENT = {
    # vLLM would send statistics of its use to its developers.
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler is compiled by nvcc while vLLM warms up (vLLM issue 49497), and the image
    # has no nvcc on PATH. vLLM never samples with it where a request has a seed
    # (v1/worker/gpu/sample/sampler.py), and each of ours has one.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # LLM logs every 10 s of sampling what its metrics say, too.
    "VLLM_LOG_STATS_INTERVAL": "1e9",
}
"""Variables of every process with an engine, which the job may override."""
MODEL_RUNNER_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Variable for an engine with model runner V1 (vllm/envs.py; unset, config/vllm.py takes V2 on
GPUs)."""
FLASHINFER_MAJOR = 10
"""Major compute capability on which vLLM prefers FlashInfer's attention (platforms/cuda.py)."""
EIGHT_BIT_CACHES: Mapping[str, Sequence[int]] = {
    "fp8": (9, 10), "fp8_e4m3": (9, 10), "fp8_e5m2": ()
}  # fmt: skip
"""Major compute capabilities whose FlashAttention reads a cache of 8 bits, by its type
(v1/attention/backends/fa_utils.py)."""
NO_VLLM = (
    "spec.image: this image has no vLLM, which spec.generation.engine needs; use an image of this "
    "version with vLLM, or set spec.generation.engine to Transformers"
)
EXTENSION = "grpo_trainer.engine_pod.weight_receiver.WeightsWorker"
"""The class with which vLLM's workers load and prove weights."""


def engine_environment(engine: EnginePlan) -> dict[str, str]:
    """Variables of every process with this engine, which the job may override."""
    return ENGINE_ENVIRONMENT | (MODEL_RUNNER_V1 if engine.model_runner == "V1" else {})


def attention_backend(
    dtype: str, capability: tuple[int, int] | None, cache_dtype: str | None = None
) -> str | None:
    """Name of vLLM's attention backend; None leaves the choice to vLLM.

    FlashInfer's kernels are compiled by nvcc at the first start, and the image has no nvcc on PATH.
    vLLM takes them first on some GPUs, and wherever FlashAttention can't read the cache.
    FlashAttention and Triton need no nvcc. FlashAttention and FlashInfer have no float32, so that
    vLLM itself takes another backend there.

    Args:
        dtype: the engine's type, as torch names it: the one that the policy computes in.
        capability: CUDA compute capability of the GPU; None on CPUs.
        cache_dtype: generation.engineArguments.kvCacheDtype.
    """
    if capability is None or dtype != "bfloat16":
        return None
    major = capability[0]
    able = EIGHT_BIT_CACHES.get(cache_dtype or "auto")
    if able is not None and major not in able:
        return "TRITON_ATTN"
    return "FLASH_ATTN" if major == FLASHINFER_MAJOR else None


def require_visible_segments(environment: Mapping[str, str]) -> None:
    """An engine that sleeps must see whether torch's allocator has expandable segments.

    The operator refuses such values in spec.env; they may also come from a Secret, a ConfigMap or
    the image.

    Raises:
        BadInput: it would not.
    """
    # torch reads the first of the two that is set.
    name = next((name for name in ALLOCATOR_ENV if name in environment), None)
    if name and has_hidden_segments(name, environment[name]):
        raise BadInput(
            f"environment variable {name} is {environment[name]!r}: vLLM sees expandable segments "
            f"only in {ALLOCATOR_ENV[0]}, spelt {EXPANDABLE_SEGMENTS}, and an engine that sleeps "
            "fails with those that it does not see; write them so, or set "
            "spec.generation.sleep to false"
        )


def gpu_capability() -> tuple[int, int] | None:
    """CUDA compute capability of this process's GPU; None on CPUs.

    vLLM asks the driver for it. torch would open a context on the GPU, and the main process of an
    engine pod needs none.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return None if capability is None else (capability.major, capability.minor)


def vllm_arguments(
    plan: TrainingPlan, model: Path, capability: tuple[int, int] | None
) -> dict[str, Any]:
    """Keyword arguments for an engine of this plan that begins without weights. `model` is the
    folder of its configuration, `capability` that of its GPUs, as for attention_backend."""
    engine, on_gpu = plan.execution.engine, plan.execution.accelerator == "GPU"
    assert engine is not None
    spec_arguments = plan.generation.engine_arguments or EngineArguments()
    # No more than are planned for: model runner V2 has a row of the vocabulary for each.
    sequences = min(engine.max_sequences, spec_arguments.max_num_seqs or engine.max_sequences)
    pass_tokens = spec_arguments.pass_tokens(engine.max_model_length)
    may_sleep = engine.sleep and on_gpu
    dtype = plan.execution.compute_dtype
    # Dummy weights: the first sync brings the policy's. generation_config vllm: the model's own
    # file would change how completions are sampled.
    arguments = {
        "model": str(model),
        "dtype": dtype,
        "attention_backend": attention_backend(dtype, capability, spec_arguments.kv_cache_dtype),
        "load_format": "dummy",
        "skip_tokenizer_init": not is_tokenizer_needed(plan.generation),
        "generation_config": "vllm",
        "trust_remote_code": plan.model.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel,
        "gpu_memory_utilization": engine.memory_share,
        "kv_cache_memory_bytes": engine.cache_bytes or None,
        "max_model_len": engine.max_model_length,
        "max_num_seqs": sequences,
        # A decoding pass has a token of each.
        "max_num_batched_tokens": max(pass_tokens, sequences),
        # CPUs have no CUDA graphs.
        "enforce_eager": not on_gpu,
        "enable_sleep_mode": may_sleep,
        "logprobs_mode": logprobs_mode(plan.training, plan.generation),
        "additional_config": logits_temperature(plan.training, plan.generation),
        "seed": 0,
        "worker_extension_cls": EXTENSION,
    }
    sizes = {"max_num_seqs", "max_num_batched_tokens"}
    chosen = spec_arguments.model_dump(exclude_none=True, by_alias=False, exclude=sizes)
    # Model runner V1 is there for engines that failed otherwise, so the job's own choice gives way.
    eager = {"enforce_eager": True} if engine.model_runner == "V1" else {}
    return arguments | chosen | eager
