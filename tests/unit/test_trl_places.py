"""Each field of TRL's GRPOConfig has one place in a GRPOJob."""

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
