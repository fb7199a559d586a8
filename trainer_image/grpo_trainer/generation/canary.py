"""A few tokens per engine whose log-probabilities can be compared where the completions' can't.

Equal weights don't show that an engine computes rightly with them. For that its log-probabilities
are held against the trainer's. Two cases leave something out. Where TRL's correction is off, TRL
compares nothing. And log-probabilities of a truncated distribution are taken before the sampler, so
they don't show what the sampler does. In both cases every engine continues a prompt of every eighth
generation by a few tokens. These are drawn at the run's temperature without a cut, and their
log-probabilities, which are taken after the sampler, are compared.
"""

import math
from typing import Any

from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.training import TrainingSpec

from ..engine_pod.hash_check import SEEDS
from ..engine_pod.vllm_arguments import completion_seed, is_truncated, sampling_arguments

GENERATIONS_PER_CANARY = 8
"""A canary costs two short passes; an engine that computes wrongly does so in every generation."""
TOKENS = 32
"""Tokens of one, past the end of a text, so that EngineGuard knows how many it judges."""
FIRST_PLACE = SEEDS - (1 << 32)
"""Places of its completions in a generation, beyond those of any other."""


def is_due(training: TrainingSpec, generation: GenerationSpec, number: int) -> bool:
    """Return True if the generation with this number, from 0, has a canary."""
    is_needed = is_truncated(training, generation) or not training.has_engine_comparison
    return is_needed and number % GENERATIONS_PER_CANARY == 0


def count_per_rank(replicas: int, world_size: int) -> int:
    """Number of canaries that each rank has sampled, so that every engine samples one; `replicas`
    is 0 where every rank has an engine."""
    # With engines in pods of their own each gets a prompt of some rank, since the one with the
    # fewest gets the next.
    return math.ceil((replicas or world_size) / world_size)


def length(training: TrainingSpec) -> int:
    """Tokens of one canary."""
    return min(TOKENS, training.max_completion_length)


def prompts_for(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return `count` of a rank's prompts, as many different ones as it has.

    Every rank needs the same count, since under ZeRO-3 all of them score together; and a repeated
    prompt would go to the same engine.
    """
    different = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    return [different[at % len(different)] for at in range(count)]


def seeds_for(training: TrainingSpec, generation: int, rank: int, count: int) -> list[int]:
    """Seeds of a rank's canary completions: no other completion's."""
    first = FIRST_PLACE + rank * count
    return [completion_seed(training.seed, generation, first + at) for at in range(count)]


def arguments_for(training: TrainingSpec, generation: GenerationSpec) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams: the run's temperature alone, and no end."""
    no_cut = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    uncut = training.model_copy(update={**no_cut, "max_completion_length": length(training)})
    # The engine may have the run's temperature in its logits.
    temperature = sampling_arguments(training, generation, [])["temperature"]
    plain = sampling_arguments(uncut, GenerationSpec(), [])
    return plain | {"temperature": temperature, "ignore_eos": True}
