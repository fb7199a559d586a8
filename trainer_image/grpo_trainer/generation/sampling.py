"""How completions are sampled: the plan's settings in vLLM's words, and a seed of its own for every completion.

A seed depends on the job, the generation and the completion's place in it, and on nothing else: whichever engine
samples it, at the first try or after a crash, in this attempt or in one that resumed, it draws the same numbers.
"""

from typing import Any, Literal

from grpo_api.spec.training import TrainingSpec

from .multilinear import mix

SEEDS = 1 << 63
"""vLLM takes seeds below it."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples at no lower one but 0 (vllm/sampling_params.py, _MAX_TEMP): it takes this in its place."""


def completion_seed(seed: int, generation: int, place: int) -> int:
    """Seed of one completion.

    Args:
        seed: spec.training.seed.
        generation: from 0, over the whole run.
        place: of the completion among those of all ranks, from 0.
    """
    return mix(mix(mix(seed) ^ generation) ^ place) % SEEDS


def sampling_arguments(training: TrainingSpec, stop_tokens: list[int]) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams, beside the seed: one completion with its tokens' log-probabilities."""
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


def sampled(output: Any) -> tuple[list[int], list[float]]:
    """Tokens of a completion as vLLM gives it, with the one that ended it, and the log-probability of each."""
    tokens = list(output.token_ids)
    return tokens, [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]


def logprobs_mode(training: TrainingSpec) -> Literal["processed_logprobs", "raw_logprobs"]:
    """Which log-probabilities the engine tells, such that they are of the distribution that the trainer computes.

    Processed ones are taken after the temperature, as the trainer's, but also after top-p and its kin, which the
    trainer knows nothing of: the importance ratio would be biased by the cut (TRL issue 6789). Raw ones are taken
    before all of it, and so are the trainer's at temperature 1.
    """
    if training.truncation and training.temperature == 1:
        return "raw_logprobs"
    return "processed_logprobs"
