"""`training.overrides` takes what the plan leaves open, and says of all else where it is set."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.job import SpecInvalid, parse_spec
from grpo_api.spec.keyword_arguments import Overrides
from grpo_api.spec.trl_places import FIELDS, PLACES
from grpo_api.text.schema import schema_fields
from grpo_codegen.crd import job_schema
from tests.samples import SPEC, changed

PATH = "spec.training.overrides"
MOST_LETTERS = 300
"""A message to users has no more."""
ELSEWHERE = {"generation.kwargs", "model.chatTemplateKwargs", "tracking"}
"""Fields of the spec that TRL's name and that the schema does not have yet."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
NAMES = st.sampled_from([*FIELDS]) | st.text(max_size=200)


def problems(overrides: Any) -> list[str]:
    """What is said of overrides; nothing where they are accepted."""
    try:
        parse_spec({**SPEC, "training": {"overrides": overrides}})
    except SpecInvalid as error:
        return error.problems
    return []


def test_the_overrides_are_the_fields_whose_place_they_are() -> None:
    places = [name for name, place in PLACES.items() if place.kind == "Override"]
    assert sorted(Overrides.model_fields) == sorted(places)


@pytest.mark.parametrize("name", Overrides.model_fields)
def test_an_override_has_trls_type(name: str) -> None:
    kinds = FIELDS[name].type.split(" | ")
    values: dict[str, tuple[Any, Any]] = {
        "bool": (True, 1),
        "int": (3, 3.5),
        "float": (0.5, "0.5"),
        "str": ("info", "loud"),
    }
    right, wrong = values[kinds[0]]
    assert problems({name: right}) == []
    (problem,) = problems({name: wrong})
    assert problem.startswith(f"{PATH}.{name}: ")
    assert json.dumps(wrong) in problem
    assert problems({name: None}) == []


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in Overrides.model_fields])
def test_another_field_is_refused_with_what_to_use(name: str) -> None:
    (problem,) = problems({name: 1})
    place = PLACES[name]
    assert problem.startswith(f"{PATH}.{name}: ")
    assert place.reason in problem
    assert not place.path or f"spec.{place.path}" in problem
    assert len(problem) <= MOST_LETTERS


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_prompt_length", "set spec.training.maxPromptLength instead (got 1)"),
        ("torch_dtype", "set spec.training.dtype instead (got 1)"),
        ("use_liger_loss", "can't be set: the memory model knows eager modules"),
        ("lora_r", "set spec.adapter.rank instead (got 1)"),
    ],
)
def test_a_setting_of_an_earlier_trl_or_of_its_command_is_refused_with_what_to_use(
    name: str, says: str
) -> None:
    (problem,) = problems({name: 1})
    assert problem.startswith(f"{PATH}.{name}: ")
    assert says in problem


def test_a_place_is_a_field_of_the_spec() -> None:
    known = {path for path, _ in schema_fields(job_schema()["properties"]["spec"])}
    paths = {place.path for place in PLACES.values() if place.path}
    assert {path for path in paths if path not in known} <= ELSEWHERE


def test_a_misspelt_field_is_answered_by_the_right_one() -> None:
    assert problems({"torchEmptyCacheSteps": 4}) == [
        f"{PATH}.torchEmptyCacheSteps: GRPOConfig of the pinned TRL has no such field; did you "
        "mean torch_empty_cache_steps? (got 4)"
    ]


def test_all_overrides_are_judged_at_once() -> None:
    found = problems({"beta": 0.1, "tf32": "yes", "seeds": 1})
    assert sorted(problem.split(":")[0] for problem in found) == [
        f"{PATH}.beta",
        f"{PATH}.seeds",
        f"{PATH}.tf32",
    ]


@given(st.dictionaries(NAMES, JSON, max_size=6) | JSON)
def test_whatever_is_written_is_accepted_or_refused_by_its_path(overrides: Any) -> None:
    found = problems(overrides)
    for problem in found:
        assert problem.startswith(PATH)
        assert len(problem) <= MOST_LETTERS
    if isinstance(overrides, dict):
        wrong = {name for name in overrides if name not in Overrides.model_fields}
        assert len(found) >= len(wrong)


def test_an_override_is_passed_on_only_where_it_is_set() -> None:
    spec = parse_spec(changed({"training.overrides": {"tf32": False, "log_level": None}}))
    assert spec.training.overrides.arguments == {"tf32": False}
