"""Maps of JSON that libraries judge: what of one is accepted, and how what is wrong is said."""

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.spec.keyword_arguments import FIELDS, MAX_BYTES, TRANSFORMERS, VLLM
from grpo_api.text.schema import schema_fields, structural_schema
from tests.generated import cases
from tests.samples import changed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
NAMES = st.sampled_from(["enable_thinking", "tools", "a b", "", "x" * 65]) | st.text(max_size=9)


def parsed(**changes: Any) -> GRPOJobSpec:
    return parse_spec(changed({name.replace("__", "."): value for name, value in changes.items()}))


def judged(**changes: Any) -> tuple[GRPOJobSpec | None, list[str]]:
    """The job, or what is wrong with it."""
    try:
        return parsed(**changes), []
    except SpecInvalid as error:
        return None, error.problems


@settings(max_examples=cases(100, gate=10))
@given(variables=st.dictionaries(NAMES, JSON, max_size=40))
def test_any_map_of_variables_is_accepted_whole_or_refused_with_its_path(
    variables: dict[str, Any],
) -> None:
    made, problems = judged(model__chatTemplateKwargs=variables)
    assert all(one.startswith("spec.model.chatTemplateKwargs") for one in problems)
    if made is None:
        return
    accepted = made.model.chat_template_kwargs
    assert accepted == {name: value for name, value in variables.items() if value is not None}
    assert len(json.dumps(accepted, ensure_ascii=False).encode()) <= MAX_BYTES


def test_keys_of_yaml_that_are_numbers_are_text_as_for_kubectl() -> None:
    made = parsed(model__chatTemplateKwargs={"names": {1: "one", "two": 2, None: 3}})
    assert made.model.chat_template_kwargs == {"names": {"1": "one", "two": 2, "null": 3}}
    assert hash(made.model)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"tools": [], "tokenize": True}, "tokenize, tools: TRL's own"),
        ({"no name": 1}, "'no name' is no name of an argument"),
        ({"a": "x" * MAX_BYTES}, f"at most {MAX_BYTES} are allowed"),
        ({"a": [[[[[[[[[1]]]]]]]]]}, "nested deeper than 8 levels"),
        ({f"a{number}": 1 for number in range(33)}, "at most 32 items"),
        ({"a": float("nan")}, "is no JSON"),
        ({"a": "\ud800"}, "is no JSON"),
        ({"a": date(2026, 1, 1)}, "is no JSON"),
        ({"a": {date(2026, 1, 1): 1}}, "is no JSON"),
    ],
)
def test_what_no_template_can_be_given_is_named(variables: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecInvalid, match=says) as error:
        parsed(model__chatTemplateKwargs=variables)
    assert len(error.value.problems) == 1


@settings(max_examples=cases(100, gate=10))
@given(
    engine=st.sampled_from(["Transformers", "Colocated", "Servers"]),
    kwargs=st.dictionaries(
        st.sampled_from([*TRANSFORMERS, *VLLM, *FIELDS, "num_beams"]), JSON, max_size=4
    ),
)
def test_sampling_arguments_are_the_engine_s_or_refused_by_name(
    engine: str, kwargs: dict[str, Any]
) -> None:
    given_kwargs = {name: value for name, value in kwargs.items() if value is not None}
    known = TRANSFORMERS if engine == "Transformers" else VLLM
    generation = {"engine": engine, "fallback": "Never", "kwargs": kwargs}
    made, problems = judged(generation=generation)
    for problem in problems:
        assert problem.startswith("spec.generation")
        for name in given_kwargs.keys() - known.keys():
            assert f"kwargs.{name}: " in problem or "no JSON" in problem or "levels" in problem
    if made:
        assert made.generation.kwargs == given_kwargs
        assert given_kwargs.keys() <= known.keys()


@pytest.mark.parametrize(
    ("engine", "kwargs", "says"),
    [
        ("Transformers", {"temperature": 0.7}, "kwargs.temperature: set training.temperature"),
        ("Transformers", {"stop_strings": ["a"]}, "kwargs.stop_strings: set generation.stop"),
        ("Transformers", {"num_beams": 4}, "kwargs.num_beams: not for engine Transformers"),
        ("Transformers", {"presence_penalty": 1}, "not for engine Transformers"),
        ("Transformers", {"typical_p": 2}, "kwargs.typical_p: must be at most"),
        (
            "Transformers",
            {"min_new_tokens": True},
            "kwargs.min_new_tokens: must be",
        ),
        ("Transformers", {"suppress_tokens": [1, -1]}, r"kwargs.suppress_tokens: \[1\]"),
        (
            "Colocated",
            {"typical_p": 0.9},
            "not for engine Colocated, which takes allowed",
        ),
        ("Servers", {"max_tokens": 9}, "kwargs.max_tokens: set training.maxCompletionLength"),
        ("Servers", {"presence_penalty": "1"}, "kwargs.presence_penalty: must be"),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_write(
    engine: str, kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecInvalid, match=says):
        parsed(generation={"engine": engine, "fallback": "Never", "kwargs": kwargs})


def test_a_field_that_is_named_instead_of_an_argument_exists() -> None:
    paths = {path for path, _ in schema_fields(structural_schema(GRPOJobSpec, defaults=True))}
    assert paths >= set(FIELDS.values())


@pytest.mark.parametrize("engine", ["Colocated", "Servers"])
@given(penalty=st.floats(-2, 2), temperature=st.floats(0.01, 3))
@settings(max_examples=cases(50, gate=8))
def test_a_penalty_that_vllm_would_refuse_at_the_temperature_is_refused(
    engine: str, penalty: float, temperature: float
) -> None:
    """The engine is given it divided by the temperature."""
    generation = {
        "engine": engine,
        "fallback": "Never",
        "kwargs": {"presence_penalty": penalty, "min_tokens": 2},
    }
    made, problems = judged(generation=generation, training__temperature=temperature)
    assert (made is None) == (abs(penalty) > 2 * min(1.0, temperature))
    for problem in problems:
        assert "generation.kwargs.presence_penalty" in problem
        assert "lower the first, or raise the second" in problem


def test_a_job_with_such_maps_can_be_planned_twice() -> None:
    """The planner's caches take a model's section as a key."""
    first, second = (parsed(model__chatTemplateKwargs={"a": [1, {"b": None}]}) for _ in range(2))
    assert hash(first.model) == hash(second.model)
    assert first.model == second.model
    dumped = GRPOJobSpec.model_validate_json(first.model_dump_json(exclude_none=True))
    assert dumped.model == first.model


def test_fewest_tokens_above_the_longest_completion_are_refused() -> None:
    generation = {"engine": "Servers", "fallback": "Never", "kwargs": {"min_tokens": 513}}
    with pytest.raises(SpecInvalid, match=r"generation\.kwargs\.min_tokens 513: .* is 512"):
        parsed(generation=generation)
    assert parsed(generation=generation, training__maxCompletionLength=513).generation.kwargs


RATES = st.sampled_from([1e-9, 1e-7, 1e-6, 1e-5, 1.0])


@settings(max_examples=cases(60, gate=10))
@given(
    rate=RATES,
    end=st.none() | st.just(0.0) | RATES,
    kind=st.sampled_from(["polynomial", "linear"]),
    use=st.sampled_from(["IfNeeded", "Always"]),
)
def test_an_adapters_rate_is_above_the_end_of_a_polynomial_schedule(
    rate: float, end: float | None, kind: str, use: str
) -> None:
    has_end = kind == "polynomial" and end is not None
    made, problems = judged(
        training__learningRate=1,
        training__lrSchedulerType=kind,
        training__lrSchedulerKwargs={"lr_end": end} if has_end else {},
        adapter={"use": use, "learningRate": rate},
    )
    falls = rate > (end if has_end and end is not None else 1e-7)
    rule = "adapter.learningRate must be above training.lrSchedulerKwargs.lr_end"
    if kind == "linear" or falls:
        assert made, problems
    elif end == 1.0:
        assert problems  # training.learningRate has the same end
    else:
        assert [rule in problem for problem in problems] == [True]
