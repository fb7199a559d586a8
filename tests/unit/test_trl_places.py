"""Each field of TRL's GRPOConfig has one place in a GRPOJob."""

from grpo_api.spec.generation import EngineArguments
from grpo_api.spec.keyword_arguments import TRANSFORMERS, VLLM
from grpo_api.spec.trl_places import FIELDS, PLACES


def test_every_field_of_grpo_config_has_a_place_and_no_other_name_has() -> None:
    assert sorted(PLACES) == sorted(FIELDS)


def test_a_place_names_a_path_or_a_reason() -> None:
    for name, place in PLACES.items():
        if place.kind == "Spec":
            assert place.path, name
            assert not place.reason, name
        else:
            assert place.reason, name
        assert place.kind != "Override" or place.path == f"training.overrides.{name}"


TAKEN_BY = {
    "generation.kwargs": {*TRANSFORMERS, *VLLM},
    "generation.engineArguments": {*EngineArguments.model_fields},
}
"""Names that the spec's maps of arguments take."""


def test_a_refusal_names_a_map_of_arguments_only_if_that_takes_the_field() -> None:
    named = {name: place.path for name, place in PLACES.items() if place.path in TAKEN_BY}
    for name, path in named.items():
        has_its_own_field = PLACES[name].kind == "Spec"
        assert has_its_own_field or name.removeprefix("vllm_") in TAKEN_BY[path], name
