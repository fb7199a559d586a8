"""Which tokens of an engine are compared where the completions can't be: when, of which prompts,
with which seeds and settings."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.training import TrainingSpec
from grpo_trainer.engine_pod.vllm_arguments import (
    LOGITS_TEMPERATURE,
    completion_seed,
    logits_temperature,
    sampling_arguments,
)
from grpo_trainer.generation import canary

PROMPTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=8)
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.0, 1.5]),
        "top_p": st.sampled_from([0.9, 1.0]),
        "top_k": st.sampled_from([0, 20]),
        "min_p": st.sampled_from([None, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.1]),
        "importance_sampling": st.sampled_from([{}, {"mode": "truncate"}, {"mode": "none"}]),
    }
)

GENERATION = st.sampled_from(
    [
        GenerationSpec(),
        GenerationSpec(stop=["</answer>"]),
        GenerationSpec(
            engine="Colocated", fallback="Never", kwargs={"presence_penalty": 0.5, "min_tokens": 2}
        ),
    ]
)


@given(settings=SETTINGS, generation=GENERATION)
def test_the_engine_is_compared_by_all_completions_or_by_a_canary(
    settings: dict[str, Any], generation: GenerationSpec
) -> None:
    training = TrainingSpec.model_validate(settings)
    due = [number for number in range(17) if canary.is_due(training, generation, number)]
    cut = settings["top_p"] < 1 or settings["top_k"] or settings["min_p"]
    is_truncated = bool(cut or settings["repetition_penalty"] != 1 or generation.kwargs)
    without_correction = settings["importance_sampling"] == {"mode": "none"}
    assert due == ([0, 8, 16] if without_correction or is_truncated else [])


@given(settings=SETTINGS, generation=GENERATION)
def test_it_is_drawn_at_the_temperature_alone(
    settings: dict[str, Any], generation: GenerationSpec
) -> None:
    training = TrainingSpec.model_validate(settings)
    arguments = canary.arguments_for(training, generation)
    # The live model has the temperature of a truncated distribution in its logits.
    is_in_logits = bool(training.truncation or generation.kwargs)
    temperature = 1.0 if is_in_logits else training.temperature
    plain = TrainingSpec(temperature=temperature, max_completion_length=canary.TOKENS)
    assert arguments == sampling_arguments(plain, GenerationSpec(), []) | {"ignore_eos": True}


@given(settings=SETTINGS, generation=GENERATION)
def test_the_temperature_is_applied_once(
    settings: dict[str, Any], generation: GenerationSpec
) -> None:
    """vLLM subtracts a penalty from a logit before it divides by the temperature: (l - p) / t is
    l / t - p / t."""
    training = TrainingSpec.model_validate(settings)
    in_logits = logits_temperature(training, generation).get(LOGITS_TEMPERATURE, 1.0)
    arguments = sampling_arguments(training, generation, [])
    assert in_logits * arguments["temperature"] == training.temperature
    for name, value in (generation.kwargs or {}).items():
        scale = training.temperature if name == "presence_penalty" else 1
        assert arguments[name] * scale == value


@given(prompts=PROMPTS, count=st.integers(1, 12))
def test_every_rank_has_as_many_prompts_as_it_is_asked_for(
    prompts: list[list[int]], count: int
) -> None:
    chosen = canary.prompts_for(prompts, count)
    assert len(chosen) == count
    assert all(prompt in prompts for prompt in chosen)
    different = {tuple(prompt) for prompt in prompts}
    assert len({tuple(prompt) for prompt in chosen}) == min(count, len(different))


@given(
    generation=st.integers(0, 10**6),
    ranks=st.integers(1, 8),
    count=st.integers(1, 8),
    places=st.integers(1, 500),
)
def test_no_seed_is_anothers(generation: int, ranks: int, count: int, places: int) -> None:
    training = TrainingSpec()
    seeds = [completion_seed(training.seed, generation, place) for place in range(places)]
    for rank in range(ranks):
        seeds += canary.seeds_for(training, generation, rank, count)
    assert len(set(seeds)) == places + ranks * count
